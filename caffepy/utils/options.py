"""Options, declared once as fields of dataclasses, and whole numbers in texts from files, names and the environment.

The field of an option has a default, a help text and a function that reads its text. The command lines
(`cli/options.py`), the keywords of `caffepy.train`, the comparison of ranks and the table in the documents derive from
the declarations. A function raises argparse.ArgumentTypeError where the text does not fit; the message becomes the
command's. This module also has the options that several parts share. Nothing heavy is imported, so that `--help` stays
quick.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from caffepy.errors import ConfigError
from caffepy.utils.registry import suggest

LARGEST = 2**31 - 1
"""Largest whole number of an option."""
LONGEST_SECONDS = 1e8
"""Three years; threads cannot wait much longer."""


def file_list(text: str) -> list[Path]:
    """Files divided by commas, as Caffe's --weights takes them; at least one."""
    return [Path(part.strip()) for part in given(text, "a file").split(",") if part.strip()]


def given(text: str, what: str) -> str:
    """An argument in which there is something else than blanks and commas: a script's variable may be empty."""
    if not text.replace(",", "").strip():
        raise argparse.ArgumentTypeError(f"'{text}' names nothing: give {what}, or leave the option out")
    return text


def file_name(text: str) -> Path:
    """A file, which is named; an empty name would mean the working directory."""
    return Path(given(text, "a file"))


def snapshot_name(text: str) -> str:
    """A .solverstate's name, or ``auto``."""
    return given(text, "a .solverstate or 'auto'")


def plugin_name(text: str) -> str:
    """A Python module's name, or the path of its file."""
    return given(text, "a Python file or module")


def field_names(text: str) -> str:
    """Names of fields, divided by commas."""
    return given(text, "Message.field or 'all'")


def alias_names(text: str) -> str:
    """Layer types with the types that they are read as, divided by commas."""
    return given(text, "NEW=OLD")


def assignment(text: str) -> str:
    """``FIELD=VALUE``."""
    if not re.match(r"[^=]*\w[^=]*=", text):
        raise argparse.ArgumentTypeError(f"'{text}' is no field with its value, such as base_lr=0.01")
    return text


def name_list(text: str) -> list[str]:
    """Names divided by commas."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"'{text}' is not UTF-8") from None
    return [part.strip() for part in text.split(",") if part.strip()]


def positive(text: str) -> int:
    """A whole number of at least 1."""
    number = _whole(text)
    if not 1 <= number <= LARGEST:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least 1 and at most {LARGEST}")
    return number


def natural(text: str) -> int:
    """An option's whole number of 0 or more."""
    try:
        return positive(text)
    except argparse.ArgumentTypeError:
        if text.strip() == "0":
            return 0
        raise argparse.ArgumentTypeError(f"'{text}' is no whole number of 0 or more") from None


def level(text: str) -> int:
    """A whole number, of either sign, as the schema's int32 holds it."""
    number = _whole(text, LARGEST + 1)
    if not -LARGEST <= number <= LARGEST:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from {-LARGEST} to {LARGEST}")
    return number


def gpu_number(text: str) -> int:
    """The number of one GPU."""
    number = _whole(text, -1)
    if not 0 <= number <= LARGEST:
        raise argparse.ArgumentTypeError(f"'{text}' is no GPU's number such as 0")
    return number


def _whole(text: str, otherwise: int = 0) -> int:
    """The number that `text` is; `otherwise` where it is none, or has more digits than Python reads."""
    try:
        return int(text)
    except ValueError:
        return otherwise


def positive_seconds(text: str) -> float:
    """A number of seconds above 0."""
    seconds = positive_number(text, "a number of seconds")
    if seconds > LONGEST_SECONDS:
        raise argparse.ArgumentTypeError(f"'{text}' is more than {LONGEST_SECONDS:g} seconds")
    return seconds


def positive_number(text: str, what: str = "a number") -> float:
    """A number above 0; `what` it is, for the message."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is not {what} above 0")
    return number


def decay(text: str) -> float:
    """A number above 0 and below 1."""
    number = positive_number(text)
    if number >= 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0 and below 1")
    return number


def fraction(text: str, what: str = "a number") -> float:
    """A number from 0 to 1; `what` it is, for the message."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not {what} from 0 to 1")
    return number


def score_and_patience(text: str) -> str:
    """``SCORE:PATIENCE``, the name of a score and a number of tests."""
    name, _, patience = text.rpartition(":")
    if not name or not patience.isdecimal() or not 1 <= int(patience) <= LARGEST:
        raise argparse.ArgumentTypeError(f"'{text}' is no score and number of tests such as accuracy:5")
    return text


def iteration_range(text: str) -> range:
    """``20:40``, the iterations from 20 on that come before 40."""
    match = re.fullmatch(r"([0-9]{1,10}):([0-9]{1,10})", text.strip())
    if match is None or int(match[1]) >= int(match[2]):
        raise argparse.ArgumentTypeError(f"'{text}' is not a range of iterations such as 20:40")
    return range(int(match[1]), int(match[2]))


def record_shape(text: str) -> tuple[int, ...]:
    """The dimensions of one record, divided by commas."""
    try:
        shape = tuple(int(part) for part in text.split(","))
    except ValueError:
        shape = (0,)
    if min(shape) < 1 or math.prod(shape) > LARGEST:
        raise argparse.ArgumentTypeError(f"'{text}' is no shape such as 3,224,224")
    return shape


def gpu_list(text: str) -> list[int] | str:
    """GPU numbers divided by commas, or `all`."""
    if text.strip().lower() == "all":
        return "all"
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [-1]
    if min(numbers) < 0 or max(numbers) > LARGEST:
        raise argparse.ArgumentTypeError(f"'{text}' is neither 'all' nor GPU numbers such as 0 or 0,1")
    if len(set(numbers)) < len(numbers):
        raise argparse.ArgumentTypeError(f"'{text}' names a GPU twice")
    return numbers


NUMBERS = (positive, natural, level, positive_seconds, positive_number, decay)
"""Types whose values Python programs give as numbers."""
METAVARS: dict[Any, str] = {
    Path: "FILE",
    file_name: "FILE",
    snapshot_name: "FILE",
    **dict.fromkeys((positive, natural, level, gpu_number), "N"),
    **dict.fromkeys((file_list, name_list, gpu_list), "LIST"),
    positive_seconds: "SECONDS",
    record_shape: "C,H,W",
}
"""The value in `--help` by the function that reads it, for options that give no other word."""
NEEDED = MISSING
"""The default of an option that must be given."""


T = TypeVar("T")

_KEY = "option"


@dataclass(frozen=True)
class Option:
    """One option.

    Args:
        name: the field, which is the keyword of `caffepy.train`.
        default: the value if it is not given; `NEEDED`: it must be given.
        help: one line for `--help` and the documents, without the default.
        flags: on the command line; empty: none of its own.
        parse: text to value, raises argparse.ArgumentTypeError; None: a switch if the default is a bool, else a text.
        metavar: the value in `--help`.
        choices: the values, if there are few.
        group: the title under which `--help` lists it.
        per_rank: ranks may differ in it.
        repeatable: each occurrence on the command line adds a value.
        positional: an argument without a flag.
        nargs: of a positional argument, as for argparse.
        excludes: options with the same word here exclude each other.
        gflags: a switch that has gflags' spellings too: ``--name=true`` and ``--noname``.
    """

    name: str
    default: Any
    help: str
    flags: tuple[str, ...]
    parse: Callable[[str], Any] | None = None
    metavar: str | None = None
    choices: tuple[str, ...] | None = None
    group: str = ""
    per_rank: bool = False
    repeatable: bool = False
    positional: bool = False
    nargs: str | None = None
    excludes: str = ""
    gflags: bool = False

    @property
    def default_text(self) -> str:
        """The default as documents show it; empty where there is none, or where it is off."""
        if isinstance(self.default, bool):
            return "on" if self.default else ""
        if isinstance(self.default, float):
            return f"{self.default:g}"
        return str(self.default) if isinstance(self.default, int | str) and self.default else ""

    @property
    def described(self) -> str:
        """The help text with the default, unless the text describes it."""
        described = "(default" in self.help or not self.default_text
        return self.help if described else f"{self.help} (default: {self.default_text})"


def option(
    help: str,
    parse: Callable[[str], Any] | None = None,
    metavar: str | None = None,
    *,
    default: Any = None,
    **further: Any,
) -> Any:
    """A dataclass field that is an option; `further` are fields of `Option`, `flags` by default ``--name``."""
    metadata = {_KEY: {"help": help, "parse": parse, "metavar": metavar or METAVARS.get(parse), **further}}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def switch(help: str, *, default: bool = False, **further: Any) -> Any:
    """A dataclass field that is an option without a value."""
    return option(help, default=default, **further)


def argument(*declared: Any, default: Any = NEEDED, **further: Any) -> Any:
    """A dataclass field that is a positional argument, declared as for `option`; with a default it may be left out."""
    return option(*declared, default=default, positional=True, **further)


def gpus_option(help: str, **further: Any) -> Any:
    """A dataclass field that is --gpu."""
    return option(help, gpu_list, flags=("--gpu", "--gpus"), excludes="device", **further)


def same_option(cls: Any, name: str, **changed: Any) -> Any:
    """A dataclass field that is the same option as another class's, outside of its group."""
    (one,) = (one for one in options_of(cls) if one.name == name)
    settings = {declared.name: getattr(one, declared.name) for declared in fields(one) if declared.name != "name"}
    return option(**settings | {"group": ""} | changed)


def options_of(cls: Any) -> list[Option]:
    """The options that a dataclass declares, then its bases'; a field that is a dataclass contributes its own."""
    order = [name for base in cls.__mro__ for name in base.__dict__.get("__annotations__", ())]
    declared = sorted(fields(cls), key=lambda one: order.index(one.name))
    return [option for one in declared for option in _options_of_field(one)]


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


def from_values(cls: type[T], values: Mapping[str, Any]) -> T:
    """Return an instance with these values of its options and of its groups' options."""
    settings: dict[str, Any] = {}
    for declared in fields(cls):  # type: ignore[arg-type]
        if _is_group(declared):
            settings[declared.name] = from_values(declared.default_factory, values)  # type: ignore[arg-type]
        elif _KEY in declared.metadata:
            settings[declared.name] = values[declared.name]
    return cls(**settings)


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


MATH_MODES = ("fp32", "tf32")
"""How a GPU multiplies: in full float32, or on tensor cores, which round factors to ten bits of mantissa."""
MATH = "tf32"
"""Which of them applies where none is given."""
TIMEOUT = 300.0
"""Longest wait for another device or rank, in seconds."""
MAX_SKIPPED = 50
"""Updates skipped in a row, because gradients are not finite, after which training ends."""

_ENGINE = "GPU engine"
KEEP_GROUP = "which snapshots stay"


@dataclass(frozen=True)
class ExecutionOptions:
    """How a solver's iterations are run on the device; results are the same to rounding with each."""

    eager: bool = switch("run layer by layer instead of replaying captured graphs", group=_ENGINE)
    fuse: bool = switch("compute groups of layers as one", default=True, group=_ENGINE)
    share: bool = switch("let blobs that are never needed at the same time share memory", default=True, group=_ENGINE)
    autotune: bool = switch(
        "time the algorithms for each convolution on the GPU once and remember the fastest", default=True, group=_ENGINE
    )
    deterministic: bool = switch(
        "the same bits in every run; without it BatchNorm in half precision takes its sums from convolutions that "
        "round differently each time, which is faster",
        default=True,
        group=_ENGINE,
    )


@dataclass(frozen=True)
class RetentionPolicy:
    """Which snapshots stay.

    Smaller scores are better for the tops of loss layers and for `loss`, larger for all others.
    """

    keep_last: int = option(
        "keep the K newest snapshots with this prefix, not all", positive, "K", default=0, group=KEEP_GROUP
    )
    keep_best: str = option(
        "keep also the snapshot with the best SCORE, an output of a test net or 'loss'; implies --keep-last 1",
        str,
        "SCORE",
        default="",
        group=KEEP_GROUP,
    )


# -- whole numbers -------------------------------------------------------------------------------------

_DIGITS = 20
"""Of the longest number; Python refuses to read thousands of digits, and `isdigit` takes characters such as ²."""


def whole(text: str | bytes, least: int = 0, most: int = LARGEST) -> int | None:
    """The whole number that `text` is, in ASCII digits after at most one sign; None if it is none in these bounds."""
    signed = text.decode(errors="replace") if isinstance(text, bytes) else text
    digits = signed[1:] if signed[:1] in ("+", "-") else signed
    if not (digits.isascii() and digits.isdigit() and len(digits) <= _DIGITS):
        return None
    number = int(signed)
    return number if least <= number <= most else None
