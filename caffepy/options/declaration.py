"""An option is declared once, as the field of a dataclass.

The command line (`caffepy.cli.options`), the keywords of `caffepy.train`, the comparison of ranks and the table in the
documents derive from the declarations.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar

from caffepy.errors import ConfigError
from caffepy.options.types import NUMBERS
from caffepy.registry import suggest

T = TypeVar("T")

_KEY = "option"


@dataclass(frozen=True)
class Option:
    """One option.

    Args:
        name: the field, which is the keyword of `caffepy.train`.
        default: the value if it is not given.
        help: one line for `--help` and the documents, without the default.
        flags: on the command line; empty: none of its own.
        parse: text to value, raises argparse.ArgumentTypeError; None: a switch, or one of `choices`.
        choices: the values, if there are few.
        metavar: the value in `--help`.
        group: the title under which `--help` lists it.
        per_rank: ranks may differ in it.
        repeatable: each occurrence on the command line adds a value.
    """

    name: str
    default: Any
    help: str
    flags: tuple[str, ...]
    parse: Callable[[str], Any] | None = None
    choices: tuple[str, ...] | None = None
    metavar: str | None = None
    group: str = ""
    per_rank: bool = False
    repeatable: bool = False

    @property
    def default_text(self) -> str:
        """The default as documents show it; empty where there is none, or where it is off."""
        if isinstance(self.default, bool):
            return "on" if self.default else ""
        number = isinstance(self.default, float)
        return f"{self.default:g}" if number else str(self.default) if self.default else ""

    @property
    def described(self) -> str:
        """The help text with the default."""
        return f"{self.help} (default: {self.default_text})" if self.default_text else self.help

    @property
    def destination(self) -> str:
        """The attribute of argparse's namespace."""
        return self.flags[-1].lstrip("-").replace("-", "_") if self.flags else self.name


def option(default: Any, help: str, **declared: Any) -> Any:
    """A dataclass field that is an option; `declared` are further fields of `Option`, `flags` by default ``--name``."""
    metadata = {_KEY: {"help": help, **declared}}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def options_of(cls: Any) -> list[Option]:
    """The options that a dataclass declares, in their order; a field that is a dataclass contributes its own."""
    return [one for declared in fields(cls) for one in _options_of_field(declared)]


def _options_of_field(declared: Field[Any]) -> list[Option]:
    if _is_group(declared):
        return options_of(declared.default_factory)
    if _KEY not in declared.metadata:
        return []
    default = declared.default if declared.default_factory is MISSING else declared.default_factory()
    settings = {"flags": (f"--{declared.name.replace('_', '-')}",), **declared.metadata[_KEY]}
    return [Option(declared.name, default, **settings)]


def _is_group(declared: Field[Any]) -> bool:
    return declared.default_factory is not MISSING and is_dataclass(declared.default_factory)


def option_values(options: Any) -> Iterator[tuple[Option, Any]]:
    """Each option with its value in an instance of the dataclass that declares it."""
    for declared in fields(options):
        value = getattr(options, declared.name)
        if _is_group(declared):
            yield from option_values(value)
        else:
            yield from ((one, value) for one in _options_of_field(declared))


def with_values(options: T, values: Mapping[str, Any]) -> T:
    """Return a copy of an instance with other values of its options and of its groups' options."""
    changes: dict[str, Any] = {}
    for declared in fields(options):  # type: ignore[arg-type]
        if _is_group(declared):
            changes[declared.name] = with_values(getattr(options, declared.name), values)
        elif _KEY in declared.metadata and declared.name in values:
            changes[declared.name] = values[declared.name]
    return replace(options, **changes)  # type: ignore[type-var]


def check_names(names: Mapping[str, Any], known: list[str], function: str) -> None:
    """Refuse keywords that are not options.

    Raises:
        ConfigError: an unknown name; the message has the nearest one.
    """
    for name in names:
        if name not in known:
            raise ConfigError(f"{function} has no option '{name}'; {suggest(name, known)}")


def check_values(options: Any) -> None:
    """Refuse numbers and choices that the command line would refuse.

    Raises:
        ConfigError: the first value that does not fit.
    """
    for one, value in option_values(options):
        if value == one.default:
            continue
        if one.choices is not None and value not in one.choices:
            raise ConfigError(f"{one.name} cannot be '{value}'; known: {', '.join(one.choices)}")
        if one.parse in NUMBERS:
            try:
                one.parse(str(value))
            except argparse.ArgumentTypeError as error:
                raise ConfigError(f"{one.name}: {error}") from error
