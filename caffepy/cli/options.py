"""Command-line options in Caffe's spellings, errors in one line, and `--plugin`: modules that register layer types.

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
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from caffepy.errors import CaffepyError, ConfigError, OptionError
from caffepy.training.options import TrainOptions
from caffepy.utils.options import ExecutionOptions, Option, gpu_list, options_of
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


def add_options(parser: argparse._ActionsContainer, declared: Any, names: Collection[str] = ()) -> None:
    """Add the options that a dataclass declares, by group.

    Args:
        parser: a parser or one of its groups.
        declared: the dataclass.
        names: add only these, without groups; empty: add all with a flag.
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
        if one.repeatable:
            settings["action"] = "append"
    else:
        settings["action"] = argparse.BooleanOptionalAction if one.default else "store_true"
    parser.add_argument(*one.flags, **settings)


def given_values(args: argparse.Namespace, declared: Any) -> dict[str, Any]:
    """Return the given values of a dataclass's options by field name."""
    return {one.name: getattr(args, one.destination) for one in options_of(declared) if one.destination in args}


def add_device_options(parser: argparse._ActionsContainer, default: str) -> None:
    """Add --gpu, --cpu, --threads and --math; `default` is the help on the default device."""
    _add_devices(parser, f"GPUs to use: 0 or 0,1,2,3 or 'all' ({default})")
    add_options(parser, TrainOptions, ("threads", "math"))


def _add_devices(parser: argparse._ActionsContainer, help: str) -> None:
    """Add --gpu and --cpu, which exclude each other."""
    device = parser.add_mutually_exclusive_group()
    device.add_argument("--gpu", "--gpus", dest="gpus", type=gpu_list, metavar="LIST", help=help)
    device.add_argument("--cpu", action="store_true", help="use the CPU")


def add_engine_options(parser: argparse._ActionsContainer) -> None:
    """Add --eager, --no-fuse and --no-share."""
    add_options(parser, ExecutionOptions, ("eager", "fuse", "share"))


def add_engine_option(parser: Parser) -> None:
    """Add --engine."""
    parser.add_argument(
        "--engine",
        choices=("own", "onnxruntime"),
        default="own",
        help="inference engine on the CPU; onnxruntime needs the extra onnx (own)",
    )


def add_dialect_option(parser: argparse._ActionsContainer) -> None:
    """Add --dialect, which `caffepy.cli.main` applies."""
    parser.add_argument(
        "--dialect",
        choices=("bvlc", "nvidia"),
        help="numerical behaviour where BVLC's and NVIDIA's Caffe differ (default: NVIDIA's if the net or its solver "
        "has a field that only NVIDIA Caffe knows, else BVLC's)",
    )


def add_state_options(parser: argparse._ActionsContainer) -> None:
    """Add --level and --stage, for include and exclude rules."""
    add_options(parser, TrainOptions, ("level", "stage"))


# -- arguments of Caffe's tools --------------------------------------------------------------------------


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


def add_switch(
    parser: argparse._ActionsContainer, name: str, help_text: str, default: bool = False, older: str = ""
) -> None:
    """Add a flag: ``--name``, ``--name=true`` (and gflags' other values) or ``--noname``; also under an older name."""
    words = [word for lower in (*_TRUE, *_FALSE) for word in dict.fromkeys((lower, lower.capitalize(), lower.upper()))]
    spellings = [
        spelling
        for one in filter(None, (name, older))
        for spelling in (f"--{one}", f"--no{one}", *(f"--{one}={word}" for word in words))
    ]
    action = parser.add_argument(*spellings, action=Switch, nargs=0, default=default, help=help_text)
    action.option_strings = [f"--{name}"]  # for the help; the parser knows all


def add_overwrite_flag(
    parser: argparse._ActionsContainer, help_text: str = "replace an existing output, also an input of the command"
) -> None:
    """Add --overwrite, of all commands that write and do not replace files as a tool of Caffe does."""
    add_switch(parser, "overwrite", help_text, older="force")


def add_positionals(parser: argparse._ActionsContainer, names: Sequence[tuple[str, type, str]]) -> None:
    """Add positional arguments, given as name, type and help."""
    for name, kind, help_text in names:
        parser.add_argument(name.lower(), type=kind, metavar=name, help=help_text)


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
