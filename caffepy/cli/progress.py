"""The progress bar of conversions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from caffepy.progress import progress_bar

if TYPE_CHECKING:
    from caffepy.data.conversion.progress import Progress


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
