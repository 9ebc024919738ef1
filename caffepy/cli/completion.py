"""`caffepy completion`: shell completion of commands, options and files, by shtab."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from caffepy.cli.options import Commands, Parser
from caffepy.utils.installation import MissingExtraError

SHELLS = ("bash", "zsh", "tcsh")

_DESCRIPTION = """\
Print a script that completes commands, options and files in a shell.

For bash:    caffepy completion bash > ~/.local/share/bash-completion/completions/caffepy
For zsh:     caffepy completion zsh > DIR/_caffepy, where DIR is a folder of $fpath
For tcsh:    caffepy completion tcsh > ~/.caffepy.csh, and source it in ~/.cshrc"""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command and its options."""
    parser = subparsers.add_parser("completion", help="print a completion script", description=_DESCRIPTION)
    parser.add_argument("shell", choices=SHELLS, help="the shell")


def run(args: argparse.Namespace) -> int:
    """Print the script.

    Raises:
        MissingExtraError: shtab is not installed.
    """
    try:
        import shtab
    except ImportError as error:
        raise MissingExtraError("shtab", "completion", "to complete commands in a shell") from error
    from caffepy.cli.main import build_parser

    parser = build_parser()
    for action in _actions(parser):
        kind = {"DIR": shtab.DIRECTORY, "FILE": shtab.FILE}.get(str(action.metavar))
        takes_path = getattr(action.type, "__name__", "") in ("Path", "file_name")
        if kind is not None or takes_path:
            action.complete = kind or shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, args.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The options and positional arguments of a parser and of its commands, which become visible to shtab."""
    for action in parser._actions:
        if isinstance(action, Commands):
            action.list_one_by_one()
            for command in action.choices.values():
                yield from _actions(command)
        else:
            yield action
