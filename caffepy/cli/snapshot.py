"""`caffepy snapshot verify`: whether .caffemodel and .solverstate files can be read and are whole."""

from __future__ import annotations

import argparse
from pathlib import Path

from caffepy.cli.options import Parser
from caffepy.errors import SnapshotError, one_line

_DESCRIPTION = """\
Read snapshots, of either format and of either Caffe's as well, and say of each in one line whether it is whole.

Snapshots of caffepy's hold their number of blobs and a CRC-32C; of others it is said that they can be read.

exit status: 0 all can be read; 2 one of them cannot, or is damaged"""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """The command's options."""
    parser = subparsers.add_parser("snapshot", help="check snapshots", description=_DESCRIPTION)
    parser.add_argument("action", choices=["verify"], help="what to do")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help=".caffemodel or .solverstate, also .h5")


def run(args: argparse.Namespace) -> int:
    """Print a line for each file; the status says whether all are good."""
    from caffepy.snapshot.files import describe_snapshot

    status = 0
    for path in args.files:
        try:
            print(one_line(f"{path}: {describe_snapshot(path)}"), flush=True)
        except SnapshotError as error:
            print(one_line(str(error)), flush=True)
            status = error.exit_status
    return status
