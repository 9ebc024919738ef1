"""`caffepy snapshot verify`: check that .caffemodel and .solverstate files are complete and undamaged."""

from __future__ import annotations

import argparse
from pathlib import Path

from caffepy.cli.options import Parser
from caffepy.errors import SnapshotError, one_line

_DESCRIPTION = """\
Read snapshots of caffepy, BVLC's or NVIDIA's Caffe in either format, and print one line for each file. Snapshots of
caffepy are checked by their number of blobs and CRC-32C; for others the line says only that they are readable.

exit status: 0 all files are readable; 2 a file is unreadable, damaged, or was changed after caffepy wrote it"""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command and its options."""
    parser = subparsers.add_parser("snapshot", help="check snapshots", description=_DESCRIPTION)
    parser.add_argument("action", choices=["verify"], help="the action")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help=".caffemodel or .solverstate, also .h5")


def run(args: argparse.Namespace) -> int:
    """Print a line for each file; return 0 if all are valid."""
    from caffepy.formats.snapshot_files import describe_snapshot

    status = 0
    for path in args.files:
        try:
            print(one_line(f"{path}: {describe_snapshot(path)}"), flush=True)
        except SnapshotError as error:
            print(one_line(str(error)), flush=True)
            status = error.exit_status
    return status
