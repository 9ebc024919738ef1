"""`caffepy convert_annoset`: a database of images with boxes, for SSD."""

from __future__ import annotations

import argparse
from pathlib import Path

from caffepy.cli.options import Parser
from caffepy.cli.tools.data.convert_imageset import image_options, seed_of
from caffepy.cli.tools.flags import (
    ROOT_AND_LIST,
    add_backend_flags,
    add_image_flags,
    add_positionals,
    add_switch,
    size,
)

_DESCRIPTION = """\
Make a database of images with labels or boxes, as the convert_annoset of SSD's Caffe does.

Each line of LISTFILE is a path and a label, or with --anno_type detection a path and that of a file with boxes;
ROOTFOLDER is put before the paths. Files of boxes are VOC's XML, one JSON an image with COCO's fields, or text: a
label's number, xmin, ymin, xmax and ymax a line."""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """The command's options."""
    parser = subparsers.add_parser(
        "convert_annoset", help="make a database of images with boxes", description=_DESCRIPTION
    )
    add_positionals(parser, (*ROOT_AND_LIST, ("DB_NAME", Path, "the database to make")))
    parser.add_argument(
        "--anno-type", choices=("classification", "detection"), default="classification",
        help="whether the list has labels or files of boxes (classification)",
    )  # fmt: skip
    parser.add_argument("--label-type", choices=("xml", "json", "txt"), default="xml", help="of those files (xml)")
    parser.add_argument("--label-map-file", type=Path, metavar="FILE", help="a LabelMap: the labels of the names")
    add_switch(parser, "check-label", "fail if the LabelMap has a name twice")
    parser.add_argument("--min-dim", type=size, default=0, metavar="N", help="scale a smaller side up to this")
    parser.add_argument("--max-dim", type=size, default=0, metavar="N", help="scale a larger side down to this")
    add_image_flags(parser)
    add_backend_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Make the database and print how many records it has.

    Raises:
        ConfigError: a label map is needed, and there is none.
        DataError: the list, all of its images or a file of boxes cannot be read, or the database is there already.
        RunError: writing failed.
    """
    from caffepy.cli.progress import showing
    from caffepy.data.conversion.annotation_sets import AnnotationOptions, convert_annotation_set
    from caffepy.data.conversion.image_sets import Database

    target = Database(args.db_name, args.backend, args.force)
    annotations = AnnotationOptions(args.anno_type, args.label_type, args.label_map_file, args.check_label)
    images = image_options(args, min_dim=args.min_dim, max_dim=args.max_dim)
    with showing("files") as progress:
        done = convert_annotation_set(
            args.rootfolder, args.listfile, target, images, annotations, seed_of(args), progress
        )
    print(f"{args.db_name}: {done.records} images{f', {done.skipped} left out' if done.skipped else ''}")
    return 0
