"""Lines of the log as glog writes them, and the handler that writes them to stderr.

    I1121 11:29:00.123456 12345 solver.py:123] Iteration 100, loss = 0.25

Level letter, month and day, time, thread, source line. The error that ends the command is ``caffepy: error: message``,
as `caffepy.cli.main` prints it.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable

ENDS = {"ends": True}
"""`extra` of the record of an error that ends the command without an exception in `caffepy.cli.main`."""
_LETTERS = {logging.WARNING: "W", logging.ERROR: "E", logging.CRITICAL: "F"}


class GlogFormatter(logging.Formatter):
    """Formats records as glog does.

    Args:
        prefix: put before each message; names the rank.
    """

    def __init__(self, prefix: str = "") -> None:
        super().__init__()
        self._prefix = prefix

    def format(self, record: logging.LogRecord) -> str:
        """`I1121 11:29:00.123456 12345 solver.py:123] message`, a traceback below it or above the last error."""
        if getattr(record, "ends", False):
            trace = f"{self.formatException(record.exc_info)}\n" if record.exc_info else ""
            return f"{trace}caffepy: error: {record.getMessage()}"
        letter = _LETTERS.get(record.levelno, "I")
        stamp = time.strftime("%m%d %H:%M:%S", time.localtime(record.created))
        microseconds = int(record.created % 1 * 1e6)
        source = f"{threading.get_native_id():5d} {record.filename}:{record.lineno}]"
        line = f"{letter}{stamp}.{microseconds:06d} {source} {self._prefix}{record.getMessage()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


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

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record; a broken stderr does not stop training."""
        try:
            self.write_line(self.format(record))
        except (OSError, ValueError):
            return
