"""`caffepy data mnist`: LMDBs of MNIST, from what comes with caffepy, from files that are there, or fetched."""

from __future__ import annotations

import argparse
from pathlib import Path

from caffepy.cli.options import Parser
from caffepy.errors import ConfigError

_DESCRIPTION = """\
Make mnist_train_lmdb and mnist_test_lmdb, as Caffe's convert_mnist_data does.

Without --subset and --from the whole set (60,000 and 10,000 digits, 11 MB) is fetched from its public mirrors
and checked by its SHA-256. An LMDB appears under its name only when it is complete; one that holds the same digits
already is left as it is, one that holds anything else is replaced with --force alone."""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """The command's options."""
    parser = subparsers.add_parser("data", help="make the LMDBs of a known data set", description=_DESCRIPTION)
    parser.add_argument("set", choices=["mnist"], help="which set")
    parser.add_argument("--subset", action="store_true", help="only the 10,000 digits that come with caffepy")
    parser.add_argument(
        "--from", dest="source", type=Path, metavar="DIR", help="take the idx files in DIR, packed by gzip or not"
    )
    parser.add_argument("--to", type=Path, default=Path(), metavar="DIR", help="where to put the LMDBs (default: here)")
    parser.add_argument("--force", action="store_true", help="replace LMDBs that are there")


def run(args: argparse.Namespace) -> int:
    """Make the LMDBs and print where they are.

    Raises:
        DataError: input files are missing or wrong, or LMDBs of other records are there already.
        RunError: fetching or writing failed.
    """
    from caffepy.data.sources import mnist

    if args.subset and args.source is not None:
        raise ConfigError("--subset and --from exclude each other; give one of them")
    source = mnist.SUBSET if args.subset else args.source
    read = mnist.fetch_file if source is None else mnist.folder_reader(source)
    there = {path for path in mnist.lmdb_paths(args.to).values() if path.exists() and not args.force}
    for path, count in mnist.build_lmdbs(args.to, read, args.force).items():
        print(f"{path}: {count} digits{', there already' if path in there else ''}")
    return 0
