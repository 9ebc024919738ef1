"""Commands on files of nets and snapshots: `caffepy draw_net`, `caffepy snapshot verify`, and Caffe's upgrade tools.

`draw_net` draws nets (Caffe's `python/draw_net.py`). `snapshot verify` checks that .caffemodel and .solverstate files
are complete and undamaged. The upgrade tools rewrite files of older versions, as Caffe's upgrade_net_proto_text and
related tools.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from caffepy.cli.options import Parser, add_positionals
from caffepy.errors import SnapshotError, one_line

# -- `caffepy draw_net` --------------------------------------------------------------------------------

_DRAW_NET = """\
Draw a net: layers as boxes with their parameters, in-place layers as rows of the preceding box, blobs as arrows with
their shapes where the prototxt gives them.

  caffepy draw_net deploy.prototxt net.svg
  caffepy draw_net train_val.prototxt net.png --rankdir TB --phase TRAIN

The file's suffix selects the format. svg, png and pdf need Graphviz (Debian: apt-get install graphviz); dot, gv and
raw are Graphviz source text."""


def add_parser_draw_net(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command and its options."""
    parser = subparsers.add_parser("draw_net", help="draw a net as SVG, PNG or PDF", description=_DRAW_NET)
    parser.add_argument("net", type=Path, metavar="NET.prototxt", help="the net")
    parser.add_argument("picture", type=Path, metavar="PICTURE", help="the file to write, e.g. net.svg")
    parser.add_argument(
        "--rankdir",
        type=str.upper,
        choices=("LR", "RL", "TB", "BT"),
        default="LR",
        help="direction: left to right (LR, default), RL, top to bottom (TB), BT",
    )
    parser.add_argument(
        "--phase", type=str.upper, choices=("TRAIN", "TEST", "ALL"), default="ALL", help="phase to draw (default: ALL)"
    )
    parser.add_argument("--display-lrm", action="store_true", help="show lr_mult, where it is not 0")


def run_draw_net(args: argparse.Namespace) -> int:
    """Draw the net and print the file's name.

    Raises:
        ConfigError: the net cannot be read or would be replaced, the file's suffix is unknown, or Graphviz is not
            installed.
        RunError: Graphviz fails, or the file cannot be written.
    """
    from caffepy.export.drawing import draw_net
    from caffepy.formats.load import read_net
    from caffepy.formats.proto import caffe_pb2
    from caffepy.utils.files import check_not_input

    check_not_input(args.picture, [args.net])
    phase = None if args.phase == "ALL" else caffe_pb2.Phase.Value(args.phase)
    draw_net(read_net(args.net), args.picture, args.rankdir, phase, rates=args.display_lrm)
    print(f"Drawing net to {args.picture}")
    return 0


# -- `caffepy snapshot` --------------------------------------------------------------------------------

_SNAPSHOT = """\
Read snapshots of caffepy, BVLC's or NVIDIA's Caffe in either format, and print one line for each file. Snapshots of
caffepy are checked by their number of blobs and CRC-32C; for others the line says only that they are readable.

exit status: 0 all files are readable; 2 a file is unreadable, damaged, or was changed after caffepy wrote it"""


def add_parser_snapshot(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command and its options."""
    parser = subparsers.add_parser("snapshot", help="check snapshots", description=_SNAPSHOT)
    parser.add_argument("action", choices=["verify"], help="the action")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help=".caffemodel or .solverstate, also .h5")


def run_snapshot(args: argparse.Namespace) -> int:
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


# -- Caffe's upgrade tools -----------------------------------------------------------------------------


def add_parser_upgrade_net_proto_text(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command and its options."""
    _add_parser(subparsers, "upgrade_net_proto_text", "a net's prototxt", " Comments are lost.")


def add_parser_upgrade_net_proto_binary(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command and its options."""
    _add_parser(subparsers, "upgrade_net_proto_binary", "a .caffemodel")


def add_parser_upgrade_solver_proto_text(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command and its options."""
    _add_parser(subparsers, "upgrade_solver_proto_text", "a solver's prototxt", " Comments are lost.")


def _add_parser(subparsers: argparse._SubParsersAction[Parser], name: str, what: str, note: str = "") -> None:
    parser = subparsers.add_parser(
        name,
        help=f"upgrade {what} to the current format",
        description=f"Write {what} of an older Caffe in the current format.{note}",
    )
    add_positionals(parser, (("OLD", Path, "the file to read"), ("NEW", Path, "the file to write")))


def run_upgrade_net_proto_text(args: argparse.Namespace) -> int:
    """Write the upgraded file and print whether it changed.

    Raises:
        UserError: the old file cannot be read or upgraded.
        RunError: the new file cannot be written.
    """
    from caffepy.formats.upgrade_files import upgrade_net_text

    return _upgrade(args, upgrade_net_text)


def run_upgrade_net_proto_binary(args: argparse.Namespace) -> int:
    """As `run_upgrade_net_proto_text`, for a .caffemodel."""
    from caffepy.formats.upgrade_files import upgrade_net_binary

    return _upgrade(args, upgrade_net_binary)


def run_upgrade_solver_proto_text(args: argparse.Namespace) -> int:
    """As `run_upgrade_net_proto_text`, for a solver."""
    from caffepy.formats.upgrade_files import upgrade_solver_text

    return _upgrade(args, upgrade_solver_text)


def _upgrade(args: argparse.Namespace, upgrade: Callable[[Path, Path], bool]) -> int:
    changed = upgrade(args.old, args.new)
    print(f"{args.new}: {'upgraded' if changed else 'already in the current format'}")
    return 0
