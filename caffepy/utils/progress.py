"""A progress bar of iterations or files: below the log on a terminal, a widget in a notebook."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from caffepy.errors import printable
from caffepy.utils.glog import StderrHandler

_INTERVAL = 0.2
"""Seconds between looks at the iteration."""


class ProgressBar:
    """A bar that its own thread draws, from the first finished iteration on.

    Args:
        iteration: returns the current iteration.
        total: returns the last one; called when training has begun.
        unit: of the count.
        status: returns a text for the end of the line; None: there is none.
        file: the terminal; None: stderr.
    """

    def __init__(
        self,
        iteration: Callable[[], int],
        total: Callable[[], int],
        unit: str = "it",
        status: Callable[[], str] | None = None,
        file: TextIO | None = None,
    ) -> None:
        self._unit = unit
        self._status = status
        self._file = file or sys.stderr
        self._iteration = iteration
        self._total = total
        self._bar: Any = None
        self._stop = threading.Event()
        self._handlers = [h for h in logging.getLogger("caffepy").handlers if isinstance(h, StderrHandler)]
        self._writers = [(handler.write_line, handler.write_last) for handler in self._handlers]
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop drawing and let the log write to stderr directly again."""
        self._stop.set()
        self._thread.join()
        if self._bar is not None:
            with suppress(OSError, ValueError):
                self.show(self._iteration())
                self._bar.close()
        for handler, (line, last) in zip(self._handlers, self._writers, strict=True):
            handler.write_line, handler.write_last = line, last

    def show(self, iteration: int) -> None:
        """Move the bar to `iteration`; it appears with the first one above 0."""
        if self._bar is None:
            if iteration == 0:
                return
            self._open(iteration)
        if self._status is not None:
            self._bar.set_postfix_str(printable(self._status()), refresh=False)
        self._bar.update(iteration - self._bar.n)

    def _open(self, iteration: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # without ipywidgets a notebook shows the bar as text
            from tqdm.auto import tqdm

        self._bar = tqdm(total=self._total(), initial=iteration, unit=self._unit, file=self._file, dynamic_ncols=True)
        for handler in self._handlers:
            handler.write_line = self._write_above
            handler.write_last = self._write_last

    def _write_above(self, line: str) -> None:
        self._bar.write(line, file=self._file)

    def _write_last(self, line: str) -> None:
        self._stop.set()
        self._bar.close()
        for _, last in self._writers[:1]:
            last(line)

    def _watch(self) -> None:
        while not self._stop.wait(_INTERVAL):
            with suppress(OSError, ValueError):  # the terminal was closed
                self.show(self._iteration())


def interactive() -> bool:
    """Whether Python runs interactively: in a notebook, IPython or at its own prompt."""
    return hasattr(sys, "ps1")


@contextmanager
def progress_bar(
    iteration: Callable[[], int],
    total: Callable[[], int],
    unit: str = "it",
    wanted: bool | None = None,
    status: Callable[[], str] | None = None,
    file: TextIO | None = None,
) -> Iterator[None]:
    """Show a progress bar within a `with` block.

    Args:
        iteration: returns the current iteration.
        total: returns the last one; called when training has begun.
        unit: of the count.
        wanted: whether to show it; None: if stderr is a terminal.
        status: as `ProgressBar` takes it; so is `file`.
    """
    shown = sys.stderr is not None and sys.stderr.isatty() if wanted is None else wanted
    if not shown:
        yield
        return
    bar = ProgressBar(iteration, total, unit, status, file)
    bar.start()
    try:
        yield
    finally:
        bar.close()
