"""`caffepy create_label_map`: the labels of classes, for SSD."""

from __future__ import annotations

import argparse
from pathlib import Path

from caffepy.cli.options import Parser
from caffepy.cli.tools.flags import add_positionals, add_switch

_DESCRIPTION = """\
Write the LabelMap of a list of classes, as the create_label_map of SSD's Caffe does.

Each line of MAPFILE is a name, or a name and a label, or these and the name that people are shown."""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """The command's options."""
    parser = subparsers.add_parser(
        "create_label_map", help="write the LabelMap of a list of classes", description=_DESCRIPTION
    )
    add_positionals(parser, (("MAPFILE", Path, "the list of classes"), ("OUTFILE", Path, "the LabelMap to write")))
    add_switch(parser, "include-background", "add the class none_of_the_above as label 0")
    parser.add_argument(
        "--delimiter", default=" ", metavar="CHARS", help="each of these divides fields (default: a space)"
    )


def run(args: argparse.Namespace) -> int:
    """Write the LabelMap and print how many classes it has.

    Raises:
        DataError: the list cannot be read or does not hold together.
        RunError: writing failed.
    """
    from caffepy.data.conversion.label_maps import create_label_map

    count = create_label_map(args.mapfile, args.outfile, args.delimiter, args.include_background)
    print(f"{args.outfile}: {count} classes")
    return 0
