"""`caffepy parse_log`: a training's log as CSV (Caffe's `tools/extra/parse_log.py`)."""

from __future__ import annotations

import argparse
from pathlib import Path

from caffepy.cli.options import Parser
from caffepy.errors import ConfigError

_DESCRIPTION = """\
Write what a training's log says of its iterations as <log>.train and <log>.test: CSV with the columns NumIters,
Seconds, LearningRate and the net's outputs. Logs of BVLC's Caffe, NVIDIA's and caffepy's are understood.

  caffepy train --solver solver.prototxt 2>&1 | tee train.log
  caffepy parse_log train.log ."""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """The command's options."""
    parser = subparsers.add_parser("parse_log", help="a training's log as CSV", description=_DESCRIPTION)
    parser.add_argument("log", type=Path, metavar="LOG", help="the log")
    parser.add_argument(
        "folder", type=Path, nargs="?", default=Path(), metavar="FOLDER", help="where to put the tables (default: here)"
    )
    parser.add_argument("--delimiter", default=",", metavar="C", help="character between columns (default: a comma)")
    parser.add_argument("--latest", action="store_true", help="without iterations that were made again after a restart")


def run(args: argparse.Namespace) -> int:
    """Write the tables and print their names.

    Raises:
        ConfigError: the delimiter is not one character.
        DataError: the log cannot be read or is none.
        RunError: a table cannot be written.
    """
    from caffepy.logs import read_log, write_tables

    delimiter = args.delimiter.replace("\\t", "\t")
    if len(delimiter) != 1 or delimiter in '\r\n"':
        raise ConfigError(f"--delimiter is one character, such as ',' or '\\t', not '{args.delimiter}'")
    log = read_log(args.log)
    chosen = log.latest() if args.latest else log
    for path, rows in zip(write_tables(chosen, args.folder, delimiter), filter(None, (chosen.train, chosen.test)),
                          strict=True):  # fmt: skip
        print(f"{path}: {len(rows)} rows")
    return 0
