"""Lines of the log as glog writes them, and the handlers that write them to stderr and to glog's files.

    I1121 11:29:00.123456 12345 solver.py:123] Iteration 100, loss = 0.25

Level letter, month and day, time, thread, source line. The error that ends the command is ``caffepy: error: message``,
or for Caffe's programs a line of level F.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from caffepy.errors import printable, printable_message
from caffepy.utils.options import whole

ENDS = {"ends": True}
"""`extra` of the record of an error that ends the command without an exception in `caffepy.cli.main`."""
_LETTERS = {logging.WARNING: "W", logging.ERROR: "E", logging.CRITICAL: "F"}
LEVELS = (logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)
"""Logging levels by glog severity."""
_SEVERITIES = ("INFO", "WARNING", "ERROR", "FATAL")


def minimum_level() -> int:
    """The level below which nothing is logged, from the environment variable GLOG_minloglevel (0 to 3)."""
    value = os.environ.get("GLOG_minloglevel", "")  # noqa: SIM112
    level = whole(value)
    return logging.INFO if level is None else LEVELS[min(level, len(LEVELS) - 1)]


def log_folder() -> Path | None:
    """The folder of glog's log files: GLOG_log_dir, unless GLOG_logtostderr is set; None without one."""
    folder = os.environ.get("GLOG_log_dir")  # noqa: SIM112
    to_stderr = os.environ.get("GLOG_logtostderr", "")[:1].lower() in ("1", "t", "y")  # noqa: SIM112
    return Path(folder) if folder and not to_stderr else None


class GlogFormatter(logging.Formatter):
    """Formats records as glog does.

    Args:
        prefix: put before each message; names the rank.
        glogs_errors: also the error that ends the command.
    """

    def __init__(self, prefix: str = "", glogs_errors: bool = False) -> None:
        super().__init__()
        self._prefix = prefix
        self._glogs_errors = glogs_errors

    def format(self, record: logging.LogRecord) -> str:
        """`I1121 11:29:00.123456 12345 solver.py:123] message`, a traceback below it or above the last error."""
        ends = getattr(record, "ends", False)
        message = printable_message(record.getMessage())  # a name in it forges no line and no escape sequence
        if ends and not self._glogs_errors:
            trace = f"{self.formatException(record.exc_info)}\n" if record.exc_info else ""
            return f"{trace}caffepy: error: {message}"
        letter = _LETTERS.get(record.levelno, "I")
        stamp = time.strftime("%m%d %H:%M:%S", time.localtime(record.created))
        microseconds = int(record.created % 1 * 1e6)
        source = f"{threading.get_native_id():5d} {record.filename}:{record.lineno}]"
        line = f"{letter}{stamp}.{microseconds:06d} {source} {self._prefix}{message}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line

    def formatException(self, ei: Any) -> str:  # noqa: N802 -- logging's name
        """The lines of a traceback; an exception's message is one line."""
        parts = [part.rstrip("\n") for part in traceback.format_exception(*ei)]
        return "\n".join("\n".join(map(printable, part.split("\n") if part[:1] in " \n" else [part])) for part in parts)


def write_line(line: str) -> None:
    """Write a line to stderr and flush; does nothing without a stderr."""
    if sys.stderr is None:
        return
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


class StderrHandler(logging.Handler):
    """Writes to the current `sys.stderr`, above the progress bar if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.write_line: Callable[[str], None] = write_line
        """Writes a line; a progress bar replaces it while it is shown."""
        self.write_last: Callable[[str], None] = write_line
        """Writes the error that ends the command; a progress bar ends before it, so that no bar follows."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record; a broken stderr does not stop training."""
        try:
            write = self.write_last if getattr(record, "ends", False) else self.write_line
            write(self.format(record))
        except (OSError, ValueError):
            return


class FileHandler(logging.Handler):
    """Writes glog's log files: one per severity, with the lines of this and higher severities.

    A file ``caffe.HOST.USER.log.INFO.20170101-120000.4711`` is made with the first line for it, and the symbolic link
    ``caffe.INFO`` names it. If it cannot be made, a line on stderr says so, and the command goes on.

    Args:
        folder: of the files.
        program: the first part of their names.
    """

    def __init__(self, folder: Path, program: str) -> None:
        super().__init__()
        self._folder = folder
        self._program = program
        self._files: list[TextIO | None] = []
        """The opened files by severity; None: the file cannot be created."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record to the files of its severity and of lower ones."""
        severity = sum(record.levelno >= level for level in LEVELS[1:])
        line = self.format(record)
        while len(self._files) <= severity:
            self._files.append(self._open(_SEVERITIES[len(self._files)]))
        for file in self._files[: severity + 1]:
            if file is not None:
                with suppress(OSError, ValueError):  # full disk
                    file.write(f"{line}\n")
                    file.flush()

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            if file is not None:
                with suppress(OSError):
                    file.close()
        self._files = []
        super().close()

    def _open(self, severity: str) -> TextIO | None:
        now, user = time.localtime(), os.environ.get("USER") or "invalid-user"
        stamp = time.strftime("%Y%m%d-%H%M%S", now)
        name = f"{self._program}.{socket.gethostname()}.{user}.log.{severity}.{stamp}.{os.getpid()}"
        link = self._folder / f"{self._program}.{severity}"
        try:
            file = (self._folder / name).open("a", encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            write_line(f"Could not create log file: {error.strerror}: '{self._folder / name}'")
            return None
        with suppress(OSError):
            link.unlink(missing_ok=True)
            link.symlink_to(name)
        file.write(
            f"Log file created at: {time.strftime('%Y/%m/%d %H:%M:%S', now)}\n"
            f"Running on machine: {socket.gethostname()}\n"
            "Log line format: [IWEF]mmdd hh:mm:ss.uuuuuu threadid file:line] msg\n"
        )
        return file
