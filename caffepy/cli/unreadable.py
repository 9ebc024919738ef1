"""Images that a command leaves out because they cannot be read."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from caffepy.errors import DataError, RunError, one_line

log = logging.getLogger(__name__)


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
