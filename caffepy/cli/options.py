"""Command-line options as people type them for Caffe, and the parser that reports mistakes in one line.

Caffe's own programs use gflags: `-solver x`, `-solver=x`, `--solver x` and `--solver=x` are the same there, and so are
`--sigint_effect` and `--sigint-effect`. `normalise` turns all of them into what argparse knows.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from caffepy.defaults import MATH_MODES
from caffepy.errors import ConfigError
from caffepy.registry import suggest

LARGEST = 2**31 - 1
"""Largest whole number of an option."""
LONGEST_SECONDS = 1e8
"""Three years; threads cannot wait much longer."""
_NAMES = re.compile(r"(?<=argument )--?\w[\w-]*(?:/--?\w[\w-]*)+")
"""The names of an option, as argparse puts them into messages."""
_OPTION = re.compile(r"-{1,2}([A-Za-z][\w-]+)(=.*)?", re.DOTALL)


def normalise(arguments: Sequence[str]) -> list[str]:
    """Options in gflags' spellings as `--name` or `--name=value`, with dashes inside the name.

    What follows ``--`` or a Python script is left as it is: those are another program's options.
    """
    result: list[str] = []
    for index, argument in enumerate(arguments):
        if argument == "--" or argument.endswith(".py"):
            return result + list(arguments[index:])
        match = _OPTION.fullmatch(argument)
        result.append(f"--{match[1].replace('_', '-')}{match[2] or ''}" if match else argument)
    return result


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose mistakes are ConfigErrors: one line, with the nearest option where there is one."""

    def __init__(self, **settings: object) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **settings)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and leaving."""
        raise ConfigError(f"{message}; '{self.prog} --help' lists what there is")

    def parse_strictly(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse; anything left over is a mistake.

        Raises:
            ConfigError: an unknown option or argument, or a value that does not fit. An option of several names has
                the one that was given.
        """
        try:
            namespace, rest = self.parse_known_args(arguments)
        except ConfigError as error:
            given = {argument.split("=")[0] for argument in arguments}

            def name_given(found: re.Match[str]) -> str:
                return next((name for name in found[0].split("/") if name in given), found[0])

            raise ConfigError(_NAMES.sub(name_given, str(error))) from None
        parser: Parser = getattr(namespace, "parser", self)
        if len(rest) == 1 and not rest[0].startswith("-") and parser.take_late(namespace, rest[0]):
            return namespace
        if rest:
            parser.refuse(rest[0])
        return namespace

    def take_late(self, namespace: argparse.Namespace, text: str) -> bool:
        """Set the positional argument that may be left out, which argparse does not take behind options; whether."""
        for action in self._positionals._group_actions:
            if action.nargs == "?" and action.choices is None and getattr(namespace, action.dest) is action.default:
                setattr(namespace, action.dest, action.type(text) if callable(action.type) else text)
                return True
        return False

    def refuse(self, argument: str) -> NoReturn:
        """Say that `argument` means nothing here.

        Raises:
            ConfigError: always.
        """
        name = argument.split("=")[0]
        if not name.startswith("-"):
            self.error(f"unexpected argument '{argument}'")
        known = [option for option in self._option_string_actions if option.startswith("--")]
        self.error(f"unknown option '{name}'; {suggest(name, known)}")


if TYPE_CHECKING:
    _Subparsers = argparse._SubParsersAction[Parser]
else:
    _Subparsers = argparse._SubParsersAction


class Commands(_Subparsers):
    """Subparsers whose one-line descriptions are listed in groups, not in one list after the options."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._summaries: dict[str, str] = {}

    def add_parser(self, name: str, **settings: Any) -> Parser:
        """Add a command; `help` is its line in the listing."""
        self._summaries[name] = settings.pop("help", "")
        return super().add_parser(name, **settings)

    def listing(self, groups: Mapping[str, Sequence[str]]) -> str:
        """The commands that were added, by their groups."""
        width = max(map(len, self._summaries), default=0)
        parts = []
        for title, names in groups.items():
            lines = [f"  {name:{width}}  {self._summaries[name]}" for name in names if name in self._summaries]
            parts += ["\n".join([f"{title}:", *lines])] if lines else []
        return "\n\n".join(parts)


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


def add_device_options(parser: argparse._ActionsContainer, default: str) -> None:
    """--gpu, --cpu, --threads and --math; `default` says what holds when neither device is given."""
    device = parser.add_mutually_exclusive_group()
    device.add_argument(
        "--gpu",
        "--gpus",
        dest="gpus",
        type=gpu_list,
        metavar="LIST",
        help=f"GPUs to use: 0 or 0,1,2,3 or 'all' ({default})",
    )
    device.add_argument("--cpu", action="store_true", help="use the CPU")
    parser.add_argument(
        "--threads", type=positive, metavar="N", help="CPU threads a solver may use (default: all it can get)"
    )
    parser.add_argument(
        "--math",
        choices=MATH_MODES,
        default="tf32",
        help="how GPUs multiply in FLOAT: on tensor cores, factors rounded to 10 bits (tf32, default), or fully (fp32)",
    )


def add_convolution_options(parser: argparse._ActionsContainer) -> None:
    """--autotune, --deterministic and their opposites."""
    parser.add_argument(
        "--autotune",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="try ways of computing each convolution on the GPU once and remember the fastest (default)",
    )
    parser.add_argument(
        "--deterministic",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="the same bits in every run (default); without it BatchNorm in half precision takes its sums from "
        "convolutions that round differently each time, which is faster",
    )


def add_engine_options(parser: argparse._ActionsContainer) -> None:
    """--eager, --no-fuse and --no-share."""
    parser.add_argument("--eager", action="store_true", help="run layer by layer instead of replaying captured graphs")
    parser.add_argument("--no-fuse", action="store_true", help="compute every layer by itself")
    parser.add_argument("--no-share", action="store_true", help="give every blob memory of its own")


def add_engine_option(parser: Parser) -> None:
    """--engine."""
    parser.add_argument(
        "--engine", choices=("own", "onnxruntime"), default="own",
        help="what computes the net on the CPU; onnxruntime comes with the extra onnx (own)",
    )  # fmt: skip


def add_dialect_option(parser: argparse._ActionsContainer) -> None:
    """--dialect, which `caffepy.cli.main` puts into effect."""
    parser.add_argument(
        "--dialect",
        choices=("bvlc", "nvidia"),
        help="whose numbers, where BVLC's and NVIDIA's Caffe differ (default: NVIDIA's where the net or its solver has "
        "a field that only NVIDIA Caffe knows, else BVLC's)",
    )


def add_state_options(parser: argparse.ArgumentParser) -> None:
    """--level and --stage, which choose among the layers' include and exclude rules."""
    parser.add_argument("--level", type=level, metavar="N", help="the net's level, for include and exclude rules")
    parser.add_argument(
        "--stage", type=name_list, default=[], metavar="LIST", help="the net's stages, divided by commas"
    )
