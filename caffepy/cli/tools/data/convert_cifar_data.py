"""`caffepy convert_cifar_data`: CIFAR-10's databases and their mean."""

from __future__ import annotations

import argparse
from pathlib import Path

from caffepy.cli.options import Parser
from caffepy.cli.tools.flags import add_force_flag, add_positionals

_DESCRIPTION = """\
Make cifar10_train_lmdb and cifar10_test_lmdb of CIFAR-10's binary version, as Caffe's convert_cifar_data does, and
mean.binaryproto, the mean of the training images."""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """The command's options."""
    parser = subparsers.add_parser(
        "convert_cifar_data", help="make the databases of CIFAR-10", description=_DESCRIPTION
    )
    names = (
        ("INPUT_FOLDER", Path, "where data_batch_1.bin to _5.bin and test_batch.bin are"),
        ("OUTPUT_FOLDER", Path, "where to put the databases"),
    )
    add_positionals(parser, names)
    parser.add_argument("backend", choices=("lmdb", "leveldb"), nargs="?", default="lmdb", help="their kind (lmdb)")
    add_force_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Make the databases and print how many records they have.

    Raises:
        DataError: files are missing or are not CIFAR-10's, or a database is there already.
        RunError: writing failed.
    """
    from caffepy.data.conversion.known_sets import convert_cifar

    for path, count in convert_cifar(args.input_folder, args.output_folder, args.backend, args.force).items():
        print(f"{path}: {count} images")
    print(f"{args.output_folder / 'mean.binaryproto'}: the mean of the training images")
    return 0
