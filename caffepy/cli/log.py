"""A command's output on stderr: the log in glog's line format, readable by Caffe's log parsers, and progress bars.

Under mpirun only the root rank logs; other ranks report only errors. With --verbose all ranks log, with the rank in
each line.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from caffepy.errors import CaffepyError
from caffepy.glog import FileHandler, GlogFormatter, StderrHandler, log_folder, minimum_level
from caffepy.parallel.processes.launcher import find_launcher
from caffepy.progress import progress_bar

if TYPE_CHECKING:
    from caffepy.data.conversion.progress import Progress


def rank_prefix() -> str:
    """Return a prefix such as `rank 1 on host7: ` on ranks other than the root, else "". Does not need MPI."""
    launcher = find_launcher()
    return f"rank {launcher.rank} on {socket.gethostname()}: " if launcher and launcher.rank else ""


def raise_once(error: CaffepyError) -> NoReturn:
    """Raise an error that occurred before the ranks joined; if there are several ranks, only one prints it."""
    launcher = find_launcher()
    if launcher is None or launcher.size == 1:
        raise error
    from caffepy.parallel.processes.create import raise_together

    raise_together(error)


@contextmanager
def log_to_stderr(verbose: bool = False, caffes: str = "") -> Iterator[StderrHandler]:
    """Send caffepy's log to stderr within a `with` block, and to the files of GLOG_log_dir if it is set.

    Args:
        verbose: log debug lines too, on every rank.
        caffes: the name of Caffe's program that this process replaces; errors are then glog's lines. "": caffepy.
    """
    launcher = find_launcher()
    rank = launcher.rank if launcher else 0
    prefix = f"[rank {rank}] " if launcher and verbose else ""
    handler = StderrHandler()
    handler.setFormatter(GlogFormatter(prefix, bool(caffes)))
    handlers: list[logging.Handler] = [handler]
    if (folder := log_folder()) is not None:
        handlers.append(FileHandler(folder, caffes or "caffe"))
        handlers[-1].setFormatter(GlogFormatter(prefix, glogs_errors=True))
    logger = logging.getLogger("caffepy")
    before = logger.level
    level = minimum_level() if rank == 0 else max(minimum_level(), logging.ERROR)
    logger.setLevel(logging.DEBUG if verbose else level)
    for one in handlers:
        logger.addHandler(one)
    try:
        yield handler
    finally:
        for one in handlers:
            logger.removeHandler(one)
            one.close()
        logger.setLevel(before)


@contextmanager
def showing(what: str) -> Iterator[Progress]:
    """Yield a progress counter, shown as a bar if stderr is a terminal.

    Args:
        what: the unit, in the plural.
    """
    from caffepy.data.conversion.progress import Progress

    progress = Progress(what)
    with progress_bar(lambda: progress.done, lambda: progress.total, f" {what}"):
        yield progress


@contextmanager
def quiet_net() -> Iterator[None]:
    """Hide the log of a net's layers from stderr within a `with` block."""
    logger = logging.getLogger("caffepy.net")
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)
