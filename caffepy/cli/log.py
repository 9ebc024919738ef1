"""What a command shows on stderr: the log in the line format of glog, which parsers for Caffe read, and progress bars.

Under mpirun only the root rank logs; other ranks report errors, unless --verbose asks for all, each line then with its
rank.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from caffepy.errors import CaffepyError
from caffepy.glog import GlogFormatter, StderrHandler
from caffepy.parallel.processes.launcher import find_launcher
from caffepy.progress import progress_bar

if TYPE_CHECKING:
    from caffepy.data.conversion.progress import Progress


def rank_prefix() -> str:
    """`rank 1 on host7: ` in a process that a launcher started beside the root, else nothing; MPI is not needed."""
    launcher = find_launcher()
    return f"rank {launcher.rank} on {socket.gethostname()}: " if launcher and launcher.rank else ""


def raise_once(error: CaffepyError) -> NoReturn:
    """Raise an error of a training that has not joined other ranks; where there are some, one of them prints it."""
    launcher = find_launcher()
    if launcher is None or launcher.size == 1:
        raise error
    from caffepy.parallel.processes.create import raise_together

    raise_together(error)


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


@contextmanager
def showing(what: str) -> Iterator[Progress]:
    """Yield what a conversion counts its work in, shown as a progress bar where stderr is a terminal.

    Args:
        what: is counted, in the plural.
    """
    from caffepy.data.conversion.progress import Progress

    progress = Progress(what)
    with progress_bar(lambda: progress.done, lambda: progress.total, f" {what}"):
        yield progress


@contextmanager
def quiet_net() -> Iterator[None]:
    """Keep what is logged of the layers of a net out of stderr within a `with` block."""
    logger = logging.getLogger("caffepy.net")
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)
