"""Command-line options as people type them for Caffe, and the parser that reports mistakes in one line.

Caffe's own programs use gflags: `-solver x`, `-solver=x`, `--solver x` and `--solver=x` are the same there, and so are
`--sigint_effect` and `--sigint-effect`. `normalise` turns all of them into what argparse knows.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from caffepy.errors import ConfigError
from caffepy.options import ExecutionOptions
from caffepy.options.declaration import Option, options_of
from caffepy.options.types import gpu_list
from caffepy.parallel.options import TrainOptions
from caffepy.registry import suggest

_TRUE = ("true", "t", "yes", "y", "1")
_FALSE = ("false", "f", "no", "n", "0")
"""Words that set a switch; gflags' ways are `-encoded`, `-encoded=true` and `-noencoded`."""
_NAMES = re.compile(r"(?<=argument )--?\w[\w-]*(?:/--?\w[\w-]*)+")
"""The names of an option, as argparse puts them into messages."""
_OPTION = re.compile(r"-{1,2}([A-Za-z][\w-]+)(=.*)?", re.DOTALL)


def normalise(arguments: Sequence[str]) -> list[str]:
    """Options in gflags' spellings as `--name` or `--name=value`, with dashes inside the name.

    The words after ``--`` or a Python script stay unchanged: they are another program's options.
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


def add_options(parser: argparse._ActionsContainer, declared: Any, names: Collection[str] = ()) -> None:
    """Add the options that a dataclass declares, in their groups.

    Args:
        parser: a parser or one of its groups.
        declared: the dataclass.
        names: only these, without groups; empty: all that have a flag.
    """
    groups: dict[str, argparse._ActionsContainer] = {"": parser}
    for one in options_of(declared):
        if not one.flags or (names and one.name not in names):
            continue
        title = "" if names else one.group
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        if one.name == "devices":
            _add_devices(groups[title], one.described)
        else:
            _add_option(groups[title], one)


def _add_option(parser: argparse._ActionsContainer, one: Option) -> None:
    settings: dict[str, Any] = {"default": one.default, "help": one.described.replace("%", "%%")}
    if one.choices is not None:
        settings["choices"] = one.choices
    elif one.parse is not None:
        settings |= {"type": one.parse, "metavar": one.metavar}
    else:
        settings["action"] = argparse.BooleanOptionalAction if one.default else "store_true"
    parser.add_argument(*one.flags, **settings)


def given_values(args: argparse.Namespace, declared: Any) -> dict[str, Any]:
    """The values of those of a dataclass's options that the command has, by the fields' names."""
    return {one.name: getattr(args, one.destination) for one in options_of(declared) if one.destination in args}


def add_device_options(parser: argparse._ActionsContainer, default: str) -> None:
    """--gpu, --cpu, --threads and --math; `default` says what holds when neither device is given."""
    _add_devices(parser, f"GPUs to use: 0 or 0,1,2,3 or 'all' ({default})")
    add_options(parser, TrainOptions, ("threads", "math"))


def _add_devices(parser: argparse._ActionsContainer, help: str) -> None:
    """--gpu and --cpu, which exclude each other."""
    device = parser.add_mutually_exclusive_group()
    device.add_argument("--gpu", "--gpus", dest="gpus", type=gpu_list, metavar="LIST", help=help)
    device.add_argument("--cpu", action="store_true", help="use the CPU")


def add_engine_options(parser: argparse._ActionsContainer) -> None:
    """--eager, --no-fuse and --no-share."""
    add_options(parser, ExecutionOptions, ("eager", "fuse", "share"))


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


def add_state_options(parser: argparse._ActionsContainer) -> None:
    """--level and --stage, which choose among the layers' include and exclude rules."""
    add_options(parser, TrainOptions, ("level", "stage"))


# -- what Caffe's tools take -----------------------------------------------------------------------------


class Switch(argparse.Action):
    """A boolean flag; argparse finds the spellings with a value among the option's names."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: object,
        option_string: str | None = None,
    ) -> None:  # fmt: skip
        """Set the flag as the spelling says."""
        name, _, value = (option_string or "").partition("=")
        setattr(namespace, self.dest, not name.startswith("--no") if not value else value.lower() in _TRUE)


def add_switch(parser: argparse._ActionsContainer, name: str, help_text: str) -> None:
    """A flag that is off by default: ``--name``, ``--name=true`` (and gflags' other words) or ``--noname``."""
    words = [word for lower in (*_TRUE, *_FALSE) for word in dict.fromkeys((lower, lower.capitalize(), lower.upper()))]
    spellings = [f"--{name}={word}" for word in words]
    action = parser.add_argument(
        f"--{name}", f"--no{name}", *spellings, action=Switch, nargs=0, default=False, help=help_text
    )
    action.option_strings = [f"--{name}"]  # of what the help shows; the parser knows them all


def add_force_flag(parser: argparse._ActionsContainer) -> None:
    """--force."""
    add_switch(parser, "force", "replace the database that is there")


def add_positionals(parser: argparse._ActionsContainer, names: Sequence[tuple[str, type, str]]) -> None:
    """Positional arguments: name, type, what it is."""
    for name, kind, help_text in names:
        parser.add_argument(name.lower(), type=kind, metavar=name, help=help_text)
