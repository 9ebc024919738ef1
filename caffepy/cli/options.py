"""Commands, whose options are fields: in Caffe's spellings, with errors in one line; and the options of many commands.

Caffe's own programs use gflags: `-solver x`, `-solver=x`, `--solver x` and `--solver=x` are equivalent, and so are
`--sigint_effect` and `--sigint-effect`. `normalise` converts all of them to argparse's form.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from caffepy.errors import CaffepyError, ConfigError, OptionError
from caffepy.training.options import TrainSettings
from caffepy.utils.options import (
    NEEDED,
    Option,
    alias_names,
    field_names,
    file_name,
    gpus_option,
    option,
    option_values,
    options_of,
    plugin_name,
    same_option,
    switch,
)
from caffepy.utils.registry import suggest

_TRUE = ("true", "t", "yes", "y", "1")
_FALSE = ("false", "f", "no", "n", "0")
"""Values of a switch; gflags' forms are `-encoded`, `-encoded=true` and `-noencoded`."""
_OPTIONS_OF_FILES = {
    ".prototxt": ("--model", "--solver"),
    ".caffemodel": ("--weights",),
    ".solverstate": ("--snapshot",),
}
"""The options that take a file of this ending, of commands without positional arguments."""
_NAMES = re.compile(r"(?<=argument )--?\w[\w-]*(?:/--?\w[\w-]*)+")
"""The names of an option in argparse's messages."""
_OPTION = re.compile(r"-{1,2}([A-Za-z][\w-]+)(=.*)?", re.DOTALL)


def normalise(arguments: Sequence[str]) -> list[str]:
    """Convert options in gflags' spellings to `--name` or `--name=value`, with dashes inside the name.

    Words after ``--`` or a Python script are another program's arguments and stay unchanged.
    """
    result: list[str] = []
    for index, argument in enumerate(arguments):
        if argument == "--" or argument.endswith(".py"):
            return result + list(arguments[index:])
        match = _OPTION.fullmatch(argument)
        result.append(f"--{match[1].replace('_', '-')}{match[2] or ''}" if match else argument)
    return result


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises OptionError: one line, with the nearest option if there is one."""

    def __init__(self, **settings: object) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **settings)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        """Raise OptionError instead of printing the usage and exiting."""
        raise OptionError(f"{message}; '{self.prog} --help' lists the options")

    def parse_strictly(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse the arguments; leftover arguments are an error.

        Raises:
            OptionError: an unknown option or argument, or an invalid value. The message uses the given name of an
                option.
        """
        try:
            namespace, rest = self.parse_known_args(arguments)
        except OptionError as error:
            given = {argument.split("=")[0] for argument in arguments}

            def name_given(found: re.Match[str]) -> str:
                return next((name for name in found[0].split("/") if name in given), found[0])

            raise OptionError(_NAMES.sub(name_given, str(error))) from None
        parser: Parser = getattr(namespace, "parser", self)
        while rest and not rest[0].startswith("-") and parser.take_late(namespace, rest[0]):
            rest = rest[1:]
        if rest:
            parser.refuse(rest[0])
        return namespace

    def take_late(self, namespace: argparse.Namespace, text: str) -> bool:
        """Set an optional positional argument, or add one to a list, which argparse rejects behind options."""
        for action in self._positionals._group_actions:
            if action.nargs == "+":
                value = action.type(text) if callable(action.type) else text
                setattr(namespace, action.dest, [*getattr(namespace, action.dest), value])
                return True
            if action.nargs == "?" and action.choices is None and getattr(namespace, action.dest) is action.default:
                setattr(namespace, action.dest, action.type(text) if callable(action.type) else text)
                return True
        return False

    def refuse(self, argument: str) -> NoReturn:
        """Report an unexpected argument.

        Raises:
            OptionError: always.
        """
        name = argument.split("=")[0]
        if not name.startswith("-"):
            options = [
                option
                for option in _OPTIONS_OF_FILES.get(os.path.splitext(argument)[1], ())
                if option in self._option_string_actions
            ]
            hint = f": a file has an option here, {' or '.join(f'{one} {argument}' for one in options)}"
            self.error(f"unexpected argument '{argument}'{hint if options else ''}")
        known = [option for option in self._option_string_actions if option.startswith("--")]
        self.error(f"unknown option '{name}'; {suggest(name, known)}")


if TYPE_CHECKING:
    _Subparsers = argparse._SubParsersAction[Parser]
else:
    _Subparsers = argparse._SubParsersAction


class Commands(_Subparsers):
    """Subparsers whose one-line descriptions are listed in groups."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._summaries: dict[str, str] = {}

    def add_parser(self, name: str, **settings: Any) -> Parser:
        """Add a command; `help` is its listed description."""
        self._summaries[name] = settings.pop("help", "")
        return super().add_parser(name, **settings)

    def list_one_by_one(self) -> None:
        """Let argparse list the commands itself, as programs that read parsers expect."""
        self.help = "command"
        self._choices_actions = [
            self._ChoicesPseudoAction(name, (), summary) for name, summary in self._summaries.items()
        ]

    def listing(self, groups: Mapping[str, Sequence[str]]) -> str:
        """Return the list of the added commands by group."""
        width = max(map(len, self._summaries), default=0)
        parts = []
        for title, names in groups.items():
            lines = [f"  {name:{width}}  {self._summaries[name]}" for name in names if name in self._summaries]
            parts += ["\n".join([f"{title}:", *lines])] if lines else []
        return "\n\n".join(parts)


def add_options(parser: Parser, declared: Any) -> None:
    """Add the options that a dataclass declares, by group."""
    groups: dict[str, argparse._ActionsContainer] = {"": parser}
    exclusive: dict[str, argparse._ActionsContainer] = {}
    for one in options_of(declared):
        if one.group not in groups:
            groups[one.group] = parser.add_argument_group(one.group)
        container = groups[one.group]
        if one.excludes:
            if one.excludes not in exclusive:
                exclusive[one.excludes] = container.add_mutually_exclusive_group()
            container = exclusive[one.excludes]
        _add_option(container, one)


def _add_option(parser: argparse._ActionsContainer, one: Option) -> None:
    settings: dict[str, Any] = {"help": one.described.replace("%", "%%")}
    if one.default is not NEEDED:
        settings["default"] = one.default
    if one.gflags:
        _add_switch(parser, one, settings)
    elif isinstance(one.default, bool):
        action = argparse.BooleanOptionalAction if one.default else "store_true"
        parser.add_argument(*one.flags, dest=one.name, action=action, **settings)
    else:
        settings |= {"type": one.parse, "choices": one.choices, "metavar": one.metavar}
        if one.positional:
            nargs = one.nargs or (None if one.default is NEEDED else "?")
            parser.add_argument(one.name, nargs=nargs, **settings)
        else:
            action = "append" if one.repeatable else "store"
            parser.add_argument(*one.flags, dest=one.name, action=action, required=one.default is NEEDED, **settings)


class Switch(argparse.Action):
    """A boolean flag. Its spellings with a value are option names of their own for argparse."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        """Set the flag from the spelling."""
        name, _, value = (option_string or "").partition("=")
        setattr(namespace, self.dest, not name.startswith("--no") if not value else value.lower() in _TRUE)


def _add_switch(parser: argparse._ActionsContainer, one: Option, settings: dict[str, Any]) -> None:
    """Add a flag: ``--name``, ``--name=true`` (and gflags' other values) or ``--noname``."""
    words = [word for lower in (*_TRUE, *_FALSE) for word in dict.fromkeys((lower, lower.capitalize(), lower.upper()))]
    spellings = [
        spelling for flag in one.flags for spelling in (flag, f"--no{flag[2:]}", *(f"{flag}={word}" for word in words))
    ]
    action = parser.add_argument(*spellings, dest=one.name, action=Switch, nargs=0, **settings)
    action.option_strings = [one.flags[0]]  # for the help; the parser knows all


# -- commands, and options of several ------------------------------------------------------------------

TRACEBACK = "CAFFEPY_TRACEBACK"
"""The environment variable that enables tracebacks."""


@dataclass(kw_only=True)
class Command(ABC):
    """A command, whose fields are its options.

    The first line of a command's docstring is its description in `caffepy --help`, the rest begins its own help.

    Args:
        arguments: the command line, in `normalise`'s spelling.
    """

    verbose: bool = switch("log debug lines, on every rank; print tracebacks")
    traceback: bool = switch(f"print an error's traceback too; so does {TRACEBACK}=1")
    arguments: list[str] = field(default_factory=list)

    @abstractmethod
    def run(self) -> int:
        """Run the command and return the exit status."""

    def given_values(self, declared: Any) -> dict[str, Any]:
        """Return the values of the options that another dataclass declares too, by name."""
        names = {one.name for one in options_of(declared)}
        return {one.name: value for one, value in option_values(self) if one.name in names}


_FORKS = "nets of Caffe forks"


@dataclass(kw_only=True)
class ReadsNets(Command):
    """A command that reads nets. Its options add to caffepy's schema and layer types before that."""

    proto: Path | None = option(
        "a fork's caffe.proto: its fields and numbers are used too; also by CAFFEPY_PROTO", file_name, group=_FORKS
    )
    plugins: list[str] = option(
        "a Python file or module that registers layer types; may be given several times",
        plugin_name,
        "MODULE",
        default=[],
        flags=("--plugin",),
        group=_FORKS,
        repeatable=True,
    )
    ignore_fields: str | None = option(
        "fields to leave out of prototxts: PoolingParameter.dilation,NetParameter.x, or 'all' that the schema lacks; "
        "the log names them; also by CAFFEPY_IGNORE_FIELDS",
        field_names,
        "NAMES",
        group=_FORKS,
    )
    alias: str | None = option(
        "layer types that are others under a new name: SyncBN=BN,NewConv=Convolution, or NEW=OLD:FIELD with the field "
        "of OLD's settings; also by CAFFEPY_ALIAS",
        alias_names,
        "NEW=OLD",
        group=_FORKS,
    )


def overwrite_option(help: str = "replace an existing output, also an input of the command", **further: Any) -> Any:
    """A field that is --overwrite, of all commands that write and do not replace files as a tool of Caffe does."""
    return switch(help, flags=("--overwrite", "--force"), gflags=True, **further)


def engine_option() -> Any:
    """A field that is --engine."""
    return option(
        "inference engine on the CPU; onnxruntime needs the extra onnx", default="own", choices=("own", "onnxruntime")
    )


def devices_option(default: str, **further: Any) -> Any:
    """A field that is --gpu; `default` is the help on the default device."""
    return gpus_option(f"GPUs to use: 0 or 0,1,2,3 or 'all' ({default})", **further)


@dataclass(kw_only=True)
class DialectOption:
    """Whose behaviour a net gets; `caffepy.cli.main` applies it."""

    dialect: str | None = option(
        "numerical behaviour where BVLC's and NVIDIA's Caffe differ (default: NVIDIA's if the net or its solver has a "
        "field that only NVIDIA Caffe knows, else BVLC's)",
        choices=("bvlc", "nvidia"),
    )


@dataclass(kw_only=True)
class StateOptions(DialectOption):
    """Which layers a net has: for include and exclude rules."""

    level: int | None = same_option(TrainSettings, "level")
    stage: list[str] = same_option(TrainSettings, "stage")


@dataclass(kw_only=True)
class GpuOptions:
    """The device: GPUs or the CPU."""

    gpus: list[int] | str | None = devices_option("default: the CPU")
    cpu: bool = switch("use the CPU", excludes="device")


@dataclass(kw_only=True)
class ThreadOptions:
    """How a device computes."""

    threads: int | None = same_option(TrainSettings, "threads")
    math: str = same_option(TrainSettings, "math")


@dataclass(kw_only=True)
class DeviceOptions(GpuOptions, ThreadOptions):
    """The device, and how it computes."""


@dataclass(kw_only=True)
class NetDeviceOptions(DeviceOptions, StateOptions):
    """The device that a net is run on, and the net's layers."""


def import_plugin(name: str) -> None:
    """Import a module by its name, from sys.path or the working directory, or a file by its path.

    The module calls `caffepy.register_layer`.

    Raises:
        ConfigError: the module does not exist, or raises an exception.
    """
    try:
        if name.endswith(".py"):
            _import_file(Path(name))
        else:
            _import_module(name)
    except CaffepyError:
        raise
    except Exception as error:
        from caffepy.layers.python import describe

        raise ConfigError(f"--plugin {name}: {describe(error, name)}") from error


def _import_file(path: Path) -> None:
    if not path.is_file():
        raise ConfigError(f"--plugin {path}: no such file; give a Python file or the name of a module")
    path = path.resolve()
    _add_folder(path.parent)  # of modules that the file imports
    name = path.stem
    if name in sys.modules:
        if getattr(sys.modules[name], "__file__", None) == str(path):
            return
        raise ConfigError(f"--plugin {path}: a module named '{name}' is imported already; rename the file")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _import_module(name: str) -> None:
    _add_folder(Path(os.curdir).resolve())
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"--plugin {name}: no module '{name}' on PYTHONPATH or in the working directory; to give a file, write its "
            "path with .py"
        ) from None


def _add_folder(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
