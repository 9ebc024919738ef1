"""Commands that set up a machine: `caffepy completion` for shells, and `caffepy shims` for scripts that call Caffe.

shtab makes the shell completion of commands, options and files. The shims are files in the places of Caffe's programs,
so that scripts that call Caffe call caffepy.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from caffepy.cli.options import Command, Commands, overwrite_option
from caffepy.errors import ConfigError, RunError
from caffepy.utils.files import atomic_write
from caffepy.utils.installation import MissingExtraError
from caffepy.utils.options import argument

# -- `caffepy completion` ------------------------------------------------------------------------------

SHELLS = ("bash", "zsh", "tcsh")


@dataclass(kw_only=True)
class CompletionCommand(Command):
    """Print a completion script.

    Print a script that completes commands, options and files in a shell.

    For bash:    caffepy completion bash > ~/.local/share/bash-completion/completions/caffepy
    For zsh:     caffepy completion zsh > DIR/_caffepy, where DIR is a folder of $fpath
    For tcsh:    caffepy completion tcsh > ~/.caffepy.csh, and source it in ~/.cshrc
    """

    shell: str = argument("the shell", choices=SHELLS)

    def run(self) -> int:
        """Print the script.

        Raises:
            MissingExtraError: shtab is not installed.
        """
        try:
            import shtab
        except ImportError as error:
            raise MissingExtraError("shtab", "completion", "to complete commands in a shell") from error
        from caffepy.cli.main import build_parser

        parser = build_parser()
        for action in _actions(parser):
            kind = {"DIR": shtab.DIRECTORY, "FILE": shtab.FILE}.get(str(action.metavar))
            takes_path = getattr(action.type, "__name__", "") in ("Path", "file_name")
            if kind is not None or takes_path:
                action.complete = kind or shtab.FILE  # type: ignore[attr-defined]
        print(shtab.complete(parser, self.shell))
        return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The options and positional arguments of a parser and of its commands, which become visible to shtab."""
    for action in parser._actions:
        if isinstance(action, Commands):
            action.list_one_by_one()
            for command in action.choices.values():
                yield from _actions(command)
        else:
            yield action


# -- `caffepy shims` -----------------------------------------------------------------------------------

TOOLS = (
    "caffe",
    "compute_image_mean",
    "convert_annoset",
    "convert_imageset",
    "create_label_map",
    "device_query",
    "extract_features",
    "finetune_net",
    "get_image_size",
    "net_speed_benchmark",
    "test_net",
    "train_net",
    "upgrade_net_proto_binary",
    "upgrade_net_proto_text",
    "upgrade_solver_proto_text",
)
"""Programs of build/tools."""
EXAMPLES = {
    "cifar10": "convert_cifar_data",
    "mnist": "convert_mnist_data",
    "siamese": "convert_mnist_siamese_data",
}
"""Programs of build/examples, by folder."""
MARK = "Written by caffepy shims"
"""A line with these words makes a file one that a later call replaces."""


@dataclass(kw_only=True)
class ShimsCommand(Command):
    """Put caffepy in the place of a Caffe.

    Write files that call caffepy into the places of Caffe's programs, so that scripts of Caffe run unchanged:

      DIR/build/tools/caffe, convert_imageset, ...        also with the ending .bin
      DIR/build/examples/mnist/convert_mnist_data, ...    also with the ending .bin
      DIR/python/caffe/__init__.py                        for PYTHONPATH=DIR/python
      DIR/scripts/create_annoset.py                       of SSD's Caffe, for Python 3

    DIR is a checkout of Caffe or a new folder. The files call this Python.
    """

    folder: Path = argument("the root folder of a Caffe", Path, "DIR")
    overwrite: bool = overwrite_option("replace Caffe's own files, and keep them as NAME.orig")

    def run(self) -> int:
        """Write the files and print how to use them.

        Raises:
            ConfigError: the folder has other files in these places, and `--overwrite` is not given.
            RunError: a file cannot be written.
        """
        contents = shim_contents()
        paths = {self.folder / name: text for name, text in contents.items()}
        others = [path for path in paths if _is_other(path)]
        if others and not self.overwrite:
            raise ConfigError(
                f"{self.folder} already has {', '.join(str(path.relative_to(self.folder)) for path in others)}; "
                "--overwrite replaces such files and keeps each as NAME.orig"
            )
        try:
            for path in others:
                path.rename(_unused_name(path))
            for path, text in paths.items():
                _write(path, text)
        except OSError as error:
            raise RunError(f"'{error.filename}' cannot be written: {error.strerror}") from error
        root = self.folder.absolute()
        print(f"{self.folder}: {len(paths)} files that call {sys.executable}")
        print(f"for programs that look for Caffe: export CAFFE_ROOT={shlex.quote(str(root))}")
        print(f"for Python scripts: export PYTHONPATH={shlex.quote(str(root / 'python'))}")
        return 0


def shim_contents() -> dict[str, str]:
    """Return the text of each file by its path in the folder."""
    programs = {f"build/tools/{name}": name for name in TOOLS}
    programs |= {f"build/examples/{folder}/{name}": name for folder, name in EXAMPLES.items()}
    contents = {f"{path}{ending}": _program(name) for path, name in programs.items() for ending in ("", ".bin")}
    contents["python/caffe/__init__.py"] = _PACKAGE
    contents["scripts/create_annoset.py"] = _SCRIPT
    return contents


def _program(name: str) -> str:
    command = "" if name == "caffe" else f" {name}"
    return f"""\
#!/bin/sh
# {MARK}.
exec {shlex.quote(sys.executable)} -m caffepy.cli.caffe{command} "$@"
"""


_PACKAGE = f'''\
"""{MARK}: `import caffe` gives caffepy."""

import importlib
import sys

del sys.modules["caffe"]  # this module, which caffepy's replaces
importlib.import_module("caffepy.as_caffe").install(force=True)
importlib.import_module("caffe")
'''
_SCRIPT = f'''\
"""{MARK}: `caffepy create_annoset` as SSD's script of this name."""

import sys

from caffepy.cli.caffe import main

if __name__ == "__main__":
    sys.exit(main(["create_annoset"] + sys.argv[1:]))
'''


def _unused_name(path: Path) -> Path:
    """The path with .orig behind it, or with .orig2, .orig3, ...: an earlier original stays."""
    names = (path.with_name(f"{path.name}.orig{number if number > 1 else ''}") for number in count(1))
    return next(name for name in names if not os.path.lexists(name))


def _is_other(path: Path) -> bool:
    """Whether there is a file at this path that this command has not written."""
    if path.is_symlink() and not path.exists():
        return True
    return path.exists() and not (path.is_file() and MARK.encode() in path.read_bytes()[:1000])


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        file.write(text.encode())
    if not path.name.endswith(".py"):
        path.chmod(0o777 & ~_umask())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
