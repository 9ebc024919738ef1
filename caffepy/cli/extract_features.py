"""`caffepy extract_features`: write blobs of a trained net to databases."""

from __future__ import annotations

import argparse
import logging
from contextlib import ExitStack
from pathlib import Path

from caffepy.cli.options import (
    Parser,
    add_device_options,
    add_dialect_option,
    add_overwrite_flag,
    add_state_options,
)
from caffepy.errors import ConfigError, printable
from caffepy.utils.options import name_list, positive

logger = logging.getLogger(__name__)

_DESCRIPTION = """\
Run a trained net in its TEST phase and write blobs to databases of float Datums, as Caffe's extract_features does.

The net needs a data layer. Separate several blobs and databases by commas:

    caffepy extract_features net.caffemodel net.prototxt fc7,prob fc7_lmdb,prob_lmdb 10 lmdb GPU 0"""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command and its options."""
    parser = subparsers.add_parser(
        "extract_features", help="write blobs of a trained net as databases", description=_DESCRIPTION
    )
    parser.add_argument("weights", type=Path, metavar="WEIGHTS", help="the .caffemodel")
    parser.add_argument("model", type=Path, metavar="NET", help="the net's prototxt")
    parser.add_argument("blobs", type=name_list, metavar="BLOBS", help="names of blobs")
    parser.add_argument("databases", type=name_list, metavar="DB_NAMES", help="the databases to write, one per blob")
    parser.add_argument("batches", type=positive, metavar="BATCHES", help="number of batches")
    parser.add_argument("backend", choices=("lmdb", "leveldb"), help="kind of database")
    parser.add_argument("device", choices=("CPU", "GPU"), nargs="?", help="device of the net (CPU)")
    parser.add_argument("device_id", type=int, nargs="?", default=0, metavar="DEVICE_ID", help="index of the GPU (0)")
    add_overwrite_flag(parser, "replace existing databases")
    add_device_options(parser, "default: the CPU")
    add_state_options(parser)
    add_dialect_option(parser)


def run(args: argparse.Namespace) -> int:
    """Write the features and print the record counts.

    Raises:
        ConfigError: the numbers of databases and blobs differ, or the net has no such blob.
        CaffepyError: files, data or device cannot be used.
    """
    if len(args.blobs) != len(args.databases):
        raise ConfigError(f"{len(args.blobs)} blobs but {len(args.databases)} databases; name one for each blob")
    if args.device == "GPU" and args.gpus is None:
        args.gpus = [args.device_id]
    from caffepy.cli.nets import open_net
    from caffepy.cli.output import showing
    from caffepy.data.sources.record_write import open_writer
    from caffepy.formats.proto import caffe_pb2
    from caffepy.infer.features import check_blobs, extract_features

    with ExitStack() as stack:
        net = stack.enter_context(open_net(args, caffe_pb2.TEST, args.batches, [args.weights]))
        check_blobs(net, args.blobs)
        writers = [
            stack.enter_context(open_writer(Path(path), args.backend, args.overwrite)) for path in args.databases
        ]
        progress = stack.enter_context(showing("batches"))
        progress.total = args.batches
        extract_features(net, args.blobs, writers, args.batches, progress.advance)
    for path, blob, writer in zip(args.databases, args.blobs, writers, strict=True):
        print(f"{path}: {writer.count} records of '{printable(blob)}'")
    return 0
