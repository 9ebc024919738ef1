"""Caffe's tools that upgrade files of older versions."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from caffepy.cli.options import Parser, add_positionals


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
