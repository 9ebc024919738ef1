"""The program `caffepy`: finds the command, runs it and turns errors into one line and an exit status."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from caffepy import version
from caffepy.cli.log import log_to_stderr, rank_prefix
from caffepy.cli.options import Parser, normalise
from caffepy.errors import CaffepyError, ConfigError
from caffepy.registry import suggest

COMMANDS = ("train", "test", "time", "net", "plan", "device_query", "data", "snapshot", "launch", "bench")

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells give it: 128 + SIGINT."""
PIPE_CLOSED = 141
"""Exit status when the reader of the output went away: 128 + SIGPIPE."""

_EPILOGUE = """\
Options may be spelled as Caffe's tools took them: -solver x, -solver=x, --solver x, --solver=x.
'caffepy COMMAND --help' describes a command.

exit status: 0 done; 1 a failure while running; 2 a mistake in what was given; 130 interrupted"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return the exit status."""
    arguments = normalise(sys.argv[1:] if argv is None else argv)
    verbose = "--verbose" in arguments
    try:
        with log_to_stderr(verbose):
            return _run(arguments, verbose)
    except CaffepyError as error:
        return _report(str(error), error.exit_status, verbose)
    except KeyboardInterrupt:
        return _report("interrupted", INTERRUPTED, verbose)
    except SystemExit as leaving:  # --help and --version; a rank that leaves the message to the root
        return int(leaving.code or 0)
    except BrokenPipeError:
        # Python would flush the closed pipe once more at exit and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except Exception as error:  # the last resort: the user gets one line, and the traceback on request
        return _report(_describe(error, verbose), 1, verbose)


def _run(arguments: list[str], verbose: bool) -> int:
    parser = build_parser(arguments)
    args = parser.parse_strictly(arguments)
    if args.command is None:
        parser.print_help(sys.stderr)
        return ConfigError.exit_status
    args.verbose = verbose
    args.arguments = arguments
    status: int = importlib.import_module(f"caffepy.cli.{args.command}").run(args)
    sys.stdout.flush()
    return status


def build_parser(arguments: Sequence[str] = ()) -> Parser:
    """The parser; where `arguments` name a command, with that command alone, so that the others need no import.

    Raises:
        ConfigError: there is no such command.
    """
    parser = Parser(prog="caffepy", description="Train Caffe's nets from their prototxt files.", epilog=_EPILOGUE)
    parser.add_argument("--version", action="version", version=f"caffepy {version.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", prog="caffepy")
    for name in _commands(arguments):
        importlib.import_module(f"caffepy.cli.{name}").add_parser(subparsers)
    for command in (parser, *subparsers.choices.values()):
        command.set_defaults(parser=command)
        command.add_argument("--verbose", action="store_true", help="log of every rank, and more of it; tracebacks")
    return parser


def _commands(arguments: Sequence[str]) -> tuple[str, ...]:
    word = next((a for a in arguments if not a.startswith("-")), None)
    if word is None:
        return COMMANDS
    if word not in COMMANDS:
        raise ConfigError(f"unknown command '{word}'; {suggest(word, list(COMMANDS))}")
    return (word,)


def _report(message: str, status: int, verbose: bool) -> int:
    if verbose:
        traceback.print_exc()
    print(f"caffepy: error: {rank_prefix()}{message}", file=sys.stderr)
    return status


def _describe(error: Exception, verbose: bool) -> str:
    location = ""
    if frames := traceback.extract_tb(error.__traceback__):
        own = [f for f in frames if Path(f.filename).is_relative_to(Path(__file__).parents[1])] or frames
        location = f" at {own[-1].filename}:{own[-1].lineno}"
    hint = "" if verbose else "; run again with --verbose for the traceback"
    return f"{type(error).__name__}: {error}{location}{hint}"
