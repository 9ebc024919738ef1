"""`caffepy compute_image_mean`: the mean image of a database."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from caffepy.cli.options import Parser
from caffepy.cli.tools.flags import add_threads_flag

logger = logging.getLogger(__name__)

_DESCRIPTION = """\
Compute the mean image of a database and the mean of each channel, as Caffe's compute_image_mean does.

OUTPUT_FILE is what transform_param { mean_file: ... } names; the channels' means are for mean_value."""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """The command's options."""
    parser = subparsers.add_parser(
        "compute_image_mean", help="compute the mean image of a database", description=_DESCRIPTION
    )
    parser.add_argument("input_db", type=Path, metavar="INPUT_DB", help="the database")
    parser.add_argument("output_file", type=Path, nargs="?", metavar="OUTPUT_FILE", help="the mean to write")
    parser.add_argument("--backend", choices=("lmdb", "leveldb"), default="lmdb", help="kind of database (lmdb)")
    add_threads_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Compute the mean, write it and log the channels' means.

    Raises:
        DataError: the database cannot be read, or its images differ in size.
        RunError: the mean cannot be written.
    """
    from caffepy.cli.progress import showing
    from caffepy.data.conversion.mean import channel_means, compute_mean, write_mean
    from caffepy.files import check_writable

    if args.output_file is not None:
        check_writable(args.output_file)
    with showing("files") as progress:
        mean = compute_mean(args.input_db, args.backend, args.threads or None, progress)
    if args.output_file is not None:
        write_mean(args.output_file, mean)
        logger.info("Write to %s", args.output_file)
    logger.info("Number of channels: %d", len(mean))
    for channel, value in enumerate(channel_means(mean)):
        logger.info("mean_value channel [%d]: %.6g", channel, value)
    return 0
