"""`caffepy draw_net`: drawings of nets (Caffe's `python/draw_net.py`)."""

from __future__ import annotations

import argparse
from pathlib import Path

from caffepy.cli.options import Parser

_DESCRIPTION = """\
Draw a net: layers as boxes with their parameters, in-place layers as rows of the preceding box, blobs as arrows with
their shapes where the prototxt gives them.

  caffepy draw_net deploy.prototxt net.svg
  caffepy draw_net train_val.prototxt net.png --rankdir TB --phase TRAIN

The file's suffix selects the format. svg, png and pdf need Graphviz (Debian: apt-get install graphviz); dot, gv and
raw are Graphviz source text."""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command and its options."""
    parser = subparsers.add_parser("draw_net", help="draw a net as SVG, PNG or PDF", description=_DESCRIPTION)
    parser.add_argument("net", type=Path, metavar="NET.prototxt", help="the net")
    parser.add_argument("picture", type=Path, metavar="PICTURE", help="the file to write, e.g. net.svg")
    parser.add_argument(
        "--rankdir", type=str.upper, choices=("LR", "RL", "TB", "BT"), default="LR",
        help="direction: left to right (LR, default), RL, top to bottom (TB), BT",
    )  # fmt: skip
    parser.add_argument(
        "--phase", type=str.upper, choices=("TRAIN", "TEST", "ALL"), default="ALL", help="phase to draw (default: ALL)"
    )
    parser.add_argument("--display-lrm", action="store_true", help="show lr_mult, where it is not 0")


def run(args: argparse.Namespace) -> int:
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
