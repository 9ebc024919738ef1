"""`caffepy convert_mnist_data`: a database of a pair of idx files."""

from __future__ import annotations

import argparse
from pathlib import Path

from caffepy.cli.options import Parser
from caffepy.cli.tools.flags import add_backend_flags, add_positionals

_DESCRIPTION = """\
Make a database of MNIST's files, or of others in their format, as Caffe's convert_mnist_data does.

Files that end in .gz are unpacked. `caffepy data mnist` fetches MNIST and makes both of its databases."""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """The command's options."""
    parser = subparsers.add_parser(
        "convert_mnist_data", help="make a database of MNIST's files", description=_DESCRIPTION
    )
    names = (
        ("IMAGE_FILE", Path, "idx3 file of images"),
        ("LABEL_FILE", Path, "idx1 file of labels"),
        ("DB_NAME", Path, "the database to make"),
    )
    add_positionals(parser, names)
    add_backend_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Make the database and print how many records it has.

    Raises:
        DataError: the files are no such pair, or the database is there already.
        RunError: writing failed.
    """
    from caffepy.data.conversion.image_sets import Database
    from caffepy.data.conversion.known_sets import convert_digits

    target = Database(args.db_name, args.backend, args.force)
    print(f"{args.db_name}: {convert_digits(args.image_file, args.label_file, target)} images")
    return 0
