"""`caffepy convert_imageset`: a database of images and their labels."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from caffepy.cli.options import Parser
from caffepy.cli.tools.flags import ROOT_AND_LIST, add_backend_flags, add_image_flags, add_positionals

if TYPE_CHECKING:
    from caffepy.data.conversion.image_records import ImageOptions

_DESCRIPTION = """\
Make a database of the images that a list names, as Caffe's convert_imageset does.

Each line of LISTFILE is a path, which ROOTFOLDER is put before, a space and a label:

    cats/1.jpg 0

Images that cannot be read are named and left out. The database appears under its name only when it is complete."""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """The command's options."""
    parser = subparsers.add_parser(
        "convert_imageset", help="make a database of images and labels", description=_DESCRIPTION
    )
    add_positionals(parser, (*ROOT_AND_LIST, ("DB_NAME", Path, "the database to make")))
    add_image_flags(parser)
    add_backend_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Make the database and print how many records it has.

    Raises:
        DataError: the list or all of its images cannot be read, or the database is there already.
        RunError: writing failed.
    """
    from caffepy.cli.progress import showing
    from caffepy.data.conversion.image_sets import Database, convert_image_set

    target = Database(args.db_name, args.backend, args.force)
    with showing("files") as progress:
        done = convert_image_set(args.rootfolder, args.listfile, target, image_options(args), seed_of(args), progress)
    print(f"{args.db_name}: {done.records} images{f', {done.skipped} left out' if done.skipped else ''}")
    return 0


def image_options(args: argparse.Namespace, **others: int) -> ImageOptions:
    """What the flags say of images."""
    from caffepy.data.conversion.image_records import ImageOptions
    from caffepy.data.conversion.progress import all_cores

    return ImageOptions(
        gray=args.gray,
        resize_height=args.resize_height,
        resize_width=args.resize_width,
        encoded=args.encoded,
        encode_type=args.encode_type,
        check_size=args.check_size,
        threads=args.threads or all_cores(),
        **others,
    )


def seed_of(args: argparse.Namespace) -> int | None:
    """The seed of the random order, if one is wanted."""
    seed: int | None = args.seed if args.shuffle else None
    return seed
