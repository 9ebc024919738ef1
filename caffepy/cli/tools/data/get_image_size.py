"""`caffepy get_image_size`: the sizes of a list's images, for SSD."""

from __future__ import annotations

import argparse
from pathlib import Path

from caffepy.cli.options import Parser
from caffepy.cli.tools.flags import ROOT_AND_LIST, add_positionals, add_threads_flag

_DESCRIPTION = """\
Write name, height and width of each image of a list, as the get_image_size of SSD's Caffe does.

detection_output_param { save_output_param { name_size_file: ... } } reads such files."""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """The command's options."""
    parser = subparsers.add_parser("get_image_size", help="write the sizes of images", description=_DESCRIPTION)
    add_positionals(parser, (*ROOT_AND_LIST, ("OUTFILE", Path, "the file to write")))
    parser.add_argument(
        "--name-id-file", type=Path, metavar="FILE", help="a name and a number a line: write numbers for names"
    )
    add_threads_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Write the sizes and print how many there are.

    Raises:
        DataError: the list or all of its images cannot be read, or an image has no number.
        RunError: writing failed.
    """
    from caffepy.cli.progress import showing
    from caffepy.data.conversion.annotation_sets import write_image_sizes

    with showing("files") as progress:
        done = write_image_sizes(
            args.rootfolder, args.listfile, args.outfile, args.name_id_file, args.threads or None, progress
        )
    print(f"{args.outfile}: {done.records} images{f', {done.skipped} left out' if done.skipped else ''}")
    return 0
