"""The log as people's parsers know it: glog's line format on stderr.

    I1121 11:29:00.123456 12345 solver.py:123] Iteration 100, loss = 0.25

Level letter, month and day, time, thread, source line. Under mpirun only the root rank logs; other ranks report errors,
unless --verbose asks for all, each line then with its rank.
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from caffepy.parallel.processes.launcher import find_launcher

_LETTERS = {logging.WARNING: "W", logging.ERROR: "E", logging.CRITICAL: "F"}


def rank_prefix() -> str:
    """`rank 1 on host7: ` in a process that a launcher started beside the root, else nothing; MPI is not needed."""
    launcher = find_launcher()
    return f"rank {launcher.rank} on {socket.gethostname()}: " if launcher and launcher.rank else ""


class GlogFormatter(logging.Formatter):
    """Formats records as glog does.

    Args:
        prefix: put before each message: which rank speaks.
    """

    def __init__(self, prefix: str = "") -> None:
        super().__init__()
        self._prefix = prefix

    def format(self, record: logging.LogRecord) -> str:
        """`I1121 11:29:00.123456 12345 solver.py:123] message`, a traceback below it."""
        letter = _LETTERS.get(record.levelno, "I")
        stamp = time.strftime("%m%d %H:%M:%S", time.localtime(record.created))
        microseconds = int(record.created % 1 * 1e6)
        source = f"{threading.get_native_id():5d} {record.filename}:{record.lineno}]"
        line = f"{letter}{stamp}.{microseconds:06d} {source} {self._prefix}{record.getMessage()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def write_line(line: str) -> None:
    """Write a line to stderr, at once."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


class StderrHandler(logging.Handler):
    """Writes to whatever stderr is at the time, above the progress bar while there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.write_line: Callable[[str], None] = write_line
        """What writes a line; a progress bar puts its own way here."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record; a stderr that went away is no reason to stop training."""
        try:
            self.write_line(self.format(record))
        except (OSError, ValueError):
            return


@contextmanager
def log_to_stderr(verbose: bool = False) -> Iterator[StderrHandler]:
    """Send caffepy's log to stderr within a `with` block.

    Args:
        verbose: debug lines too, and every rank's.
    """
    launcher = find_launcher()
    rank = launcher.rank if launcher else 0
    handler = StderrHandler()
    handler.setFormatter(GlogFormatter(f"[rank {rank}] " if launcher and verbose else ""))
    logger = logging.getLogger("caffepy")
    before = logger.level
    logger.setLevel(logging.DEBUG if verbose else logging.INFO if rank == 0 else logging.ERROR)
    logger.addHandler(handler)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
