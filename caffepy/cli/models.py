"""`caffepy models`: the nets and solvers that come with caffepy, as a list and as copies."""

from __future__ import annotations

import argparse
from pathlib import Path

from caffepy.cli.options import Parser, add_overwrite_flag
from caffepy.errors import ConfigError

_DESCRIPTION = """\
List the models that come with caffepy, or copy their nets, solvers and READMEs.

  caffepy models list
  caffepy models copy lenet
  caffepy models copy alexnet caffenet --to nets

The README of a model says what its solver trains on and where weights are."""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command and its options."""
    parser = subparsers.add_parser("models", help="list or copy the models of caffepy", description=_DESCRIPTION)
    parser.add_argument("action", choices=["list", "copy"], help="the action")
    parser.add_argument("names", nargs="*", metavar="NAME", help="for copy: the models")
    parser.add_argument(
        "--to", type=Path, default=Path("models"), metavar="DIR", help="copy to DIR/NAME (default: models/NAME)"
    )
    add_overwrite_flag(parser, "replace files with other contents")


def run(args: argparse.Namespace) -> int:
    """Print a table of the models, or copy some and print the files.

    Raises:
        ConfigError: a model is unknown or missing, or files with other contents exist.
        RunError: a file cannot be written.
    """
    from caffepy.scaffold.model_files import copy_model, list_models

    if args.action == "list":
        if args.names:
            raise ConfigError(f"models list takes no name; 'caffepy models copy {args.names[0]}' copies a model")
        models = list_models()
        width = max(len(model.name) for model in models)
        for model in models:
            print(f"{model.name:{width}}  {model.net}; {model.data}")
        return 0
    if not args.names:
        raise ConfigError("models copy: name a model; 'caffepy models list' lists them")
    for name in args.names:
        for path in copy_model(name, args.to, args.overwrite):
            print(path)
    return 0
