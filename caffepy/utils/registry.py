"""Tables by name, in which layer types, solver types, fillers and policies register themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from caffepy.errors import ConfigError

T = TypeVar("T")


_LETTERS_PER_TYPO = 5
"""Letters of a name for each typing error in it that is still taken for an error."""
_LONGEST = 100
"""Letters of the longest name that is compared."""


def suggest(name: str, known: Iterable[str]) -> str:
    """A clause that offers the known name nearest to `name`, or lists the known names."""
    names = sorted(known)
    similar = nearest(name, names)
    return f"did you mean '{similar}'?" if similar else f"known: {', '.join(names)}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name of which `name` is a misspelling, or None.

    Upper and lower case count as equal, and leading dashes do not count. A name of three or four letters may have one
    error, and longer names one for every five letters: a letter that is missing, added or wrong, or two that are
    exchanged.
    """
    written = name.lower().lstrip("-")
    if len(written) > _LONGEST:
        return None
    allowed = max(int(len(written) > 2), len(written) // _LETTERS_PER_TYPO)
    best: tuple[int, str] | None = None
    for candidate in sorted(known):
        other = candidate.lower().lstrip("-")
        if abs(len(other) - len(written)) <= allowed:
            errors = _count_errors(written, other)
            if errors <= allowed and (best is None or errors < best[0]):
                best = errors, candidate
    return best[1] if best else None


def _count_errors(first: str, second: str) -> int:
    """The optimal string alignment distance of two words."""
    above: list[int] = []
    row = list(range(len(second) + 1))
    for i, letter in enumerate(first, 1):
        before, above, row = above, row, [i]
        for j, other in enumerate(second, 1):
            errors = min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == second[j - 2] and first[i - 2] == other:
                errors = min(errors, before[j - 2] + 1)
            row.append(errors)
    return row[-1]


class Registry(Generic[T]):
    """A table from names in a prototxt to classes or functions.

    Args:
        kind: of the names, for messages: ``layer type``.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, *names: str) -> Callable[[T], T]:
        """Decorator that enters a class or function under each of `names`."""

        def enter(entry: T) -> T:
            for name in names:
                assert name not in self._entries, f"{self.kind} {name} registered twice"
                self._entries[name] = entry
            return entry

        return enter

    def replace(self, name: str, entry: T) -> None:
        """Enter a class or function under a name, in place of an earlier one."""
        self._entries[name] = entry

    def get(self, name: str, where: str = "") -> T:
        """The entry of `name`.

        Raises:
            ConfigError: the name is unknown; the message offers the nearest one.
        """
        if name not in self._entries:
            prefix = f"{where}: " if where else ""
            raise ConfigError(f"{prefix}unknown {self.kind} '{name}'; {suggest(name, list(self))}")
        return self._entries[name]

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)
