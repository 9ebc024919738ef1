"""Flags as Caffe's tools take them: gflags, given to argparse.

`caffepy.cli.options.normalise` has made `--name` or `--name=value`, with dashes inside the name, of gflags' spellings.
What is left are switches: `-encoded`, `-encoded=true` and `-noencoded` are gflags' ways of setting one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from caffepy.options.types import LARGEST

_TRUE = ("true", "t", "yes", "y", "1")
_FALSE = ("false", "f", "no", "n", "0")


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


def add_backend_flags(parser: argparse._ActionsContainer) -> None:
    """--backend and --force, of tools that write a database."""
    parser.add_argument("--backend", choices=("lmdb", "leveldb"), default="lmdb", help="kind of database (lmdb)")
    add_force_flag(parser)


def add_force_flag(parser: argparse._ActionsContainer) -> None:
    """--force."""
    add_switch(parser, "force", "replace the database that is there")


def add_positionals(parser: argparse._ActionsContainer, names: Sequence[tuple[str, type, str]]) -> None:
    """Positional arguments: name, type, what it is."""
    for name, kind, help_text in names:
        parser.add_argument(name.lower(), type=kind, metavar=name, help=help_text)


def add_image_flags(parser: argparse._ActionsContainer) -> None:
    """What convert_imageset and convert_annoset do to images, and the order in which they write them."""
    add_switch(parser, "gray", "read images as grey ones, of one channel")
    add_switch(parser, "shuffle", "write in a random order, which --seed decides")
    parser.add_argument("--seed", type=size, default=0, metavar="N", help="of the random order (0)")
    for side in ("height", "width"):
        parser.add_argument(
            f"--resize-{side}", type=size, default=0, metavar="N", help=f"{side} of all images (0: as they are)"
        )
    add_switch(parser, "check-size", "fail if two images differ in size")
    add_switch(parser, "encoded", "store image files instead of pixels")
    parser.add_argument(
        "--encode-type", default="", metavar="TYPE", help="store them as jpg, png, ... (default: as the file is)"
    )
    add_threads_flag(parser)


def add_threads_flag(parser: argparse._ActionsContainer) -> None:
    """--threads."""
    parser.add_argument("--threads", type=size, default=0, metavar="N", help="that decode images (0: all cores)")


def size(text: str) -> int:
    """A whole number of at least 0."""
    number = int(text) if text.isascii() and text.isdigit() and len(text) < len(str(LARGEST)) + 1 else -1
    if not 0 <= number <= LARGEST:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 0 to {LARGEST}")
    return number


ROOT_AND_LIST: tuple[tuple[str, type, str], ...] = (
    ("ROOTFOLDER", str, "put before each path of the list"),
    ("LISTFILE", Path, "a line for each image"),
)
"""The first arguments of tools that read lists of images."""


def add_files(parser: argparse._ActionsContainer) -> None:
    """The two files of tools that write one anew."""
    add_positionals(parser, (("OLD", Path, "the file to read"), ("NEW", Path, "the file to write")))
