"""Tables by name, in which layer types, solver types, fillers and policies register themselves."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from caffepy.errors import ConfigError

T = TypeVar("T")


def suggest(name: str, known: Iterator[str] | list[str]) -> str:
    """A clause that offers the known name nearest to `name`, or lists the known names."""
    names = sorted(known)
    folded = {candidate.lower().lstrip("-"): candidate for candidate in names}
    near = difflib.get_close_matches(name.lower().lstrip("-"), list(folded), n=1, cutoff=0.6)
    if near:
        return f"did you mean '{folded[near[0]]}'?"
    return f"known: {', '.join(names)}"


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
