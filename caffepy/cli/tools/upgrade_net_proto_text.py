"""`caffepy upgrade_net_proto_text`: a net's prototxt of an older Caffe in the current format."""

from __future__ import annotations

import argparse

from caffepy.cli.options import Parser
from caffepy.cli.tools.flags import add_files


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """The command's arguments."""
    parser = subparsers.add_parser(
        "upgrade_net_proto_text",
        help="bring a net's prototxt to the current format",
        description="Write a net's prototxt of an older Caffe in the current format. Comments are lost.",
    )
    add_files(parser)


def run(args: argparse.Namespace) -> int:
    """Write the file and print what became of it.

    Raises:
        UserError: the old file cannot be read or upgraded.
        RunError: the new one cannot be written.
    """
    from caffepy.snapshot.upgrade_files import upgrade_net_text

    changed = upgrade_net_text(args.old, args.new)
    print(f"{args.new}: {'upgraded' if changed else 'was in the current format already'}")
    return 0
