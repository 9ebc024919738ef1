"""A command's output: on stderr the log in glog's line format and progress bars, on stdout tables.

Under mpirun only the root rank logs; other ranks report only errors. With --verbose all ranks log, with the rank in
each line. `Unreadable` counts the images that a command leaves out because they cannot be read.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from caffepy.distributed.processes.launcher import find_launcher
from caffepy.errors import CaffepyError, DataError, RunError, one_line, printable
from caffepy.utils.glog import FileHandler, GlogFormatter, StderrHandler, log_folder, minimum_level
from caffepy.utils.progress import progress_bar

if TYPE_CHECKING:
    from caffepy.data.workers import Progress

log = logging.getLogger(__name__)


def rank_prefix() -> str:
    """Return a prefix such as `rank 1 on host7: ` on ranks other than the root, else "". Does not need MPI."""
    launcher = find_launcher()
    return f"rank {launcher.rank} on {socket.gethostname()}: " if launcher and launcher.rank else ""


def raise_once(error: CaffepyError) -> NoReturn:
    """Raise an error that occurred before the ranks joined; if there are several ranks, only one prints it."""
    launcher = find_launcher()
    if launcher is None or launcher.size == 1:
        raise error
    from caffepy.distributed.processes.world import raise_together

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
    from caffepy.data.workers import Progress

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


_GAP = "  "
_NARROWEST = 8
"""Columns are not shortened below this width."""


def print_table(rows: Iterable[Sequence[str]], right: Sequence[int] = (), shrinking: Sequence[int] = ()) -> None:
    """Print rows with aligned columns.

    Args:
        rows: the cells of each row.
        right: columns that are aligned right.
        shrinking: columns whose texts may be shortened to fit the terminal. If stdout is no terminal nothing is.
    """
    for line in format_table(rows, right, shrinking, _terminal_width()):
        print(line)


def format_table(
    rows: Iterable[Sequence[str]], right: Sequence[int], shrinking: Sequence[int], width: int | None
) -> list[str]:
    """Return the lines of a table, none longer than `width` if its columns can be made so narrow; None: any width."""
    table = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    if width is not None:
        _narrow(widths, shrinking, width - len(_GAP) * (len(widths) - 1))
    lines = []
    for row in table:
        cells = (
            _shortened(text, size).rjust(size) if column in right else _shortened(text, size).ljust(size)
            for column, (text, size) in enumerate(zip(row, widths, strict=True))
        )
        lines.append(_GAP.join(cells).rstrip())
    return lines


def _narrow(widths: list[int], shrinking: Sequence[int], room: int) -> None:
    """Narrow the widest of the columns `shrinking` until all columns fit into `room`."""
    while sum(widths) > room:
        widest = max(shrinking, key=lambda column: widths[column], default=None)
        if widest is None or widths[widest] <= _NARROWEST:
            return
        widths[widest] -= 1


def _shortened(text: str, size: int) -> str:
    """Return a text with its middle left out if it is longer than `size`."""
    if len(text) <= size:
        return text
    kept = size - 1
    return f"{text[: kept - kept // 2]}\N{HORIZONTAL ELLIPSIS}{text[len(text) - kept // 2 :]}"


def _terminal_width() -> int | None:
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except (OSError, ValueError):  # no terminal
        return None


class Unreadable:
    """The images that a command cannot read: each has a line in the log, and the exit status is 1.

    Args:
        given: the names of all images. The error of an only image ends the command.
    """

    def __init__(self, given: Iterable[str]) -> None:
        self._given = list(given)
        self.names: set[str] = set()

    def leave_out(self, name: str, error: DataError) -> None:
        """Note an image and log why it cannot be read.

        Raises:
            DataError: it is the only one.
        """
        if len(self._given) == 1:
            raise error
        if name not in self.names:
            log.error("left out: %s", one_line(str(error)))
        self.names.add(name)

    def check(self) -> None:
        """Check that an image was read.

        Raises:
            DataError: none was.
        """
        if self.names.issuperset(self._given):
            raise DataError(f"none of the {len(self._given)} images can be read; the lines above say why")

    @property
    def read(self) -> list[str]:
        """The names of the images that were read."""
        return [name for name in self._given if name not in self.names]

    @property
    def exit_status(self) -> int:
        """0, or 1 if images were left out."""
        return RunError.exit_status if self.names else 0
