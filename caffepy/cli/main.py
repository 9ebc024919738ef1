"""The program `caffepy`: runs a command and reports errors as one line and an exit status."""

from __future__ import annotations

import argparse
import errno
import importlib
import inspect
import io
import logging
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TextIO

from caffepy import as_caffe, version
from caffepy.cli.options import (
    TRACEBACK,
    Command,
    Commands,
    DialectOption,
    Parser,
    ReadsNets,
    add_options,
    import_plugin,
    normalise,
)
from caffepy.cli.output import log_to_stderr, raise_once, rank_prefix
from caffepy.distributed.processes.launcher import end_unless_left
from caffepy.errors import (
    INTERRUPTED,
    NO_THREADS,
    CaffepyError,
    ConfigError,
    InternalError,
    OptionError,
    OutOfMemoryError,
    RunError,
    lacks_memory,
    lacks_threads,
    one_line,
)
from caffepy.utils.files import open_closed_streams
from caffepy.utils.glog import ENDS
from caffepy.utils.options import from_values
from caffepy.utils.registry import suggest

logger = logging.getLogger(__name__)

GROUPS = {
    "training": ("train", "test", "test_detection", "time", "warm-up", "snapshot", "new", "models", "data"),
    "devices": ("device_query", "launch", "bench", "plan"),
    "predictions": ("classify", "detect", "extract_features"),
    "nets and logs": ("net", "deploy", "draw_net", "layer-stub", "parse_log", "plot_training_log"),
    "data sets": (
        "convert_imageset",
        "convert_annoset",
        "create_annoset",
        "compute_image_mean",
        "convert_mnist_data",
        "convert_mnist_siamese_data",
        "convert_cifar_data",
        "create_label_map",
        "get_image_size",
    ),
    "other formats": ("export", "quantize", "import"),
    "set-up": ("shims", "completion"),
    "old files": ("upgrade_net_proto_text", "upgrade_net_proto_binary", "upgrade_solver_proto_text"),
}
"""Commands by group, for `caffepy --help`."""
COMMANDS = tuple(name for names in GROUPS.values() for name in names)
MODULES = {
    "classify": "predict",
    "completion": "set_up",
    "detect": "predict",
    "draw_net": "files",
    "extract_features": "predict",
    "import": "export",
    "models": "new",
    "parse_log": "logs",
    "plot_training_log": "logs",
    "quantize": "export",
    "shims": "set_up",
    "snapshot": "files",
    "test_detection": "test",
    "time": "test",
    **dict.fromkeys(GROUPS["data sets"], "data"),
    **dict.fromkeys(GROUPS["old files"], "files"),
}
"""The modules of commands whose module has another name."""
WRITERS = {*MODULES, "data", "deploy", "export", "layer-stub", "new", "plan"} - {
    "completion",
    "snapshot",
    "test_detection",
    "time",
}
"""Commands that write files and do not handle signals themselves."""

ALIASES = {
    "train_net": ("train", ("--solver", "--snapshot")),
    "finetune_net": ("train", ("--solver", "--weights")),
    "test_net": ("test", ("--model", "--weights", "--iterations")),
    "net_speed_benchmark": ("time", ("--model", "--iterations")),
}
"""Caffe's older programs: the command that replaces each, and the options for their positional arguments:
``train_net solver.prototxt``, ``test_net net.prototxt net.caffemodel 100 GPU 0``."""

ABORTED = 128 + signal.SIGABRT
"""Exit status after an error of Caffe's programs, which abort, as shells have it."""
PIPE_CLOSED = 141
"""Exit status when the reader of the output has exited: 128 + SIGPIPE."""
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a full disk."""
PROTO = "CAFFEPY_PROTO"
"""The environment variable that names a fork's schema."""
NO_MEMORY = "out of memory: the process needs more than it can allocate; use a smaller batch_size or a smaller file"

_EPILOGUE = """\
Options may be spelled as for Caffe's tools: -solver x, -solver=x, --solver x, --solver=x.
'caffepy COMMAND --help' describes a command.

exit status: 0 done; 1 a failure while running; 2 wrong input or options; 70 a bug in caffepy;
130 interrupted"""


class Ended(KeyboardInterrupt):
    """A signal asked the process to end. Handlers of KeyboardInterrupt clean up."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number


def main(argv: Sequence[str] | None = None, caffes: str = "") -> int:
    """Run the command line `argv` (default: the process's own) and return the exit status.

    Args:
        argv: the command and its arguments.
        caffes: the name of Caffe's program that this process replaces. Errors are then glog's lines, and the status is
            `ABORTED`, or 1 for an option that Caffe would refuse. "": caffepy.
    """
    open_closed_streams()
    arguments = expand(normalise(sys.argv[1:] if argv is None else argv))
    as_caffe.install(force=True)  # modules of Python layers import caffe
    try:
        with log_to_stderr("--verbose" in arguments, caffes):
            status = _main(arguments, caffes)
    finally:
        _drop_unwritten_log()
    end_unless_left(status or RunError.exit_status)
    return status


def _main(arguments: list[str], caffes: str) -> int:
    verbose = "--verbose" in arguments
    traced = verbose or "--traceback" in arguments or bool(os.environ.get(TRACEBACK))
    try:
        _print_anything()
        return _run(arguments, verbose)
    except OptionError as error:
        if caffes:
            return _report(str(error), RunError.exit_status, traced, logging.ERROR)
        return _report(str(error), error.exit_status, traced)
    except CaffepyError as error:
        return _report(str(error), ABORTED if caffes else error.exit_status, traced)
    except Ended as ended:
        return _report(f"ended by {ended}", ended.status, traced)
    except KeyboardInterrupt:
        return _report("interrupted", INTERRUPTED, traced)
    except SystemExit as leaving:  # --help, --version, or a rank whose error the root reports
        status = int(leaving.code or 0)
        return ABORTED if caffes and status else status
    except BrokenPipeError:
        _discard(sys.stdout)
        return PIPE_CLOSED
    except Exception as error:
        status = _unforeseen(error, traced)
        return ABORTED if caffes else status


def _run(arguments: list[str], verbose: bool) -> int:
    try:
        command = parse(arguments)
        if isinstance(command, ReadsNets):
            _extend(command)
    except ConfigError as error:
        if _command_word(arguments) in (set(COMMANDS) - {"train"}):
            raise  # other commands run independently on each rank
        raise_once(error)
    if command is None:
        build_parser().print_help(sys.stderr)
        return ConfigError.exit_status
    command.verbose = verbose
    signals = _ended_in_order() if _command_word(arguments) in WRITERS else nullcontext()
    dialect = command.dialect if isinstance(command, DialectOption) else None
    with _dialect(dialect), _reading_nets(command), signals:
        status = command.run()
    sys.stdout.flush()
    return status


def parse(arguments: Sequence[str]) -> Command | None:
    """Return the command of a command line in `normalise`'s spelling; None if it names none.

    Raises:
        ConfigError: the command is unknown.
        OptionError: as of `Parser.parse_strictly`.
    """
    given = build_parser(arguments).parse_strictly(arguments)
    if given.command is None:
        return None
    command = from_values(command_class(given.command), vars(given))
    command.arguments = list(arguments)
    return command


def _extend(command: ReadsNets) -> None:
    """Register the fork's schema of --proto and import the modules of --plugin."""
    if command.proto is not None:
        os.environ.pop(PROTO, None)  # the option overrides the variable, which is read by the import
        from caffepy.formats.proto.schemas import register_proto

        register_proto(command.proto)
    for plugin in command.plugins:
        import_plugin(plugin)


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Raise `Ended` on SIGTERM and SIGHUP, so that temporary files are removed."""
    # Signals ignored by the parent process, for example under nohup, stay ignored.

    def end(number: int, frame: object) -> None:
        for other in numbers:  # job managers send several signals; Ctrl-C still works on a hang
            signal.signal(other, signal.SIG_IGN)
        raise Ended(number)

    alone = threading.current_thread() is threading.main_thread()  # only the main thread can set handlers
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if alone and signal.getsignal(n) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _dialect(name: str | None) -> AbstractContextManager[None]:
    """Return a context manager that applies --dialect, if given."""
    if name is None:
        return nullcontext()
    from caffepy.formats.dialect import override_dialect

    return override_dialect(name)


@contextmanager
def _reading_nets(command: Command) -> Iterator[None]:
    """Apply --ignore-fields and --alias, if given."""
    with ExitStack() as stack:
        if isinstance(command, ReadsNets) and command.ignore_fields is not None:
            from caffepy.formats.ignore import ignoring

            stack.enter_context(ignoring(command.ignore_fields))
        if isinstance(command, ReadsNets) and command.alias is not None:
            from caffepy.formats.alias import aliasing

            stack.enter_context(aliasing(command.alias))
        yield


def build_parser(arguments: Sequence[str] = ()) -> Parser:
    """Return the parser; if `arguments` name a command, only with that command, to avoid importing the others.

    If they are options alone, as ``--help``, its commands have no options.

    Raises:
        ConfigError: the command is unknown.
    """
    parser = Parser(
        prog="caffepy",
        usage="%(prog)s [-h] [--version] COMMAND ...",
        description="Train Caffe's nets from their prototxt files.",
    )
    parser.add_argument("--version", action="version", version=f"caffepy {version.__version__}")
    subparsers = parser.add_subparsers(
        dest="command", metavar="COMMAND", prog="caffepy", action=Commands, help=argparse.SUPPRESS
    )
    assert isinstance(subparsers, Commands)
    for name in _commands(arguments):
        cls = command_class(name)
        summary, _, description = inspect.cleandoc(cls.__doc__ or "").partition("\n\n")
        summary = summary[:1].lower() + summary[1:].removesuffix(".")
        command = subparsers.add_parser(name, help=summary, description=description)
        command.set_defaults(parser=command)
        if not arguments or _command_word(arguments) is not None:
            add_options(command, cls)
    parser.epilog = f"{subparsers.listing(GROUPS)}\n\n{_EPILOGUE}"
    add_options(parser, Command)
    parser.set_defaults(parser=parser)
    return parser


def command_class(command: str) -> type[Command]:
    """Return the class of a command: ``draw_net`` is `DrawNetCommand`."""
    module = importlib.import_module(f"caffepy.cli.{MODULES.get(command, command.replace('-', '_'))}")
    name = "".join(word.capitalize() for word in re.split("[-_]", command))
    found: type[Command] = getattr(module, f"{name}Command")
    return found


def _command_word(arguments: Sequence[str]) -> str | None:
    return next((a for a in arguments if not a.startswith("-")), None)


def _commands(arguments: Sequence[str]) -> tuple[str, ...]:
    word = _command_word(arguments)
    if word is None:
        return () if arguments[:1] == ["--version"] else COMMANDS  # which ends before it needs them
    if word not in COMMANDS:
        known = suggest(word, [*COMMANDS, *ALIASES])
        raise ConfigError(f"unknown command '{word}'; {known} 'caffepy --help' lists them")
    return (word,)


def _discard(stream: TextIO) -> None:
    """Redirect a stream to the null device: otherwise Python flushes it again at exit and reports an error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _drop_unwritten_log() -> None:
    """Discard an unwritable log: a full disk is no failure, but Python's flush at exit would give status 120."""
    with suppress(ValueError):  # closed
        try:
            sys.stderr.flush()
        except OSError:
            _discard(sys.stderr)


def _print_anything() -> None:
    """Print characters outside stdout's encoding as escapes."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors != "backslashreplace":
        sys.stdout.reconfigure(errors="backslashreplace")


def _report(message: str, status: int, traced: bool, level: int = logging.CRITICAL) -> int:
    logger.log(level, "%s%s", rank_prefix(), one_line(message), exc_info=traced, extra=ENDS)
    return status


def _unforeseen(error: Exception, traced: bool) -> int:
    """Report an unexpected exception: one line, and the traceback on request."""
    if isinstance(error, OSError) and error.errno in NO_SPACE and error.filename is None:
        _discard(sys.stdout)
        return _report(f"the output cannot be written: {error.strerror}", RunError.exit_status, traced)
    if lacks_memory(error):
        return _report(NO_MEMORY, OutOfMemoryError.exit_status, traced)
    if isinstance(error, (ImportError, OSError)) and re.search(r"\.so\b", str(error)):
        found = f"a library cannot be loaded: {error}; raise the memory limit (ulimit -v), or install the library again"
        return _report(found, RunError.exit_status, traced)
    if lacks_threads(error):
        return _report(NO_THREADS, RunError.exit_status, traced)
    return _report(_describe(error, traced), InternalError.exit_status, traced)


def _describe(error: Exception, traced: bool) -> str:
    location = ""
    if frames := traceback.extract_tb(error.__traceback__):
        own = [f for f in frames if Path(f.filename).is_relative_to(Path(__file__).parents[1])] or frames
        location = f" at {own[-1].filename}:{own[-1].lineno}"
    output = "this output" if traced else "the output of the same command with --traceback"
    return (
        f"{type(error).__name__}: {error}{location}; this is a bug in caffepy, not in your input: please report "
        f"it to the developers with {output}"
    )


# -- programs of older Caffe versions --------------------------------------------------------------------


def expand(arguments: Sequence[str]) -> list[str]:
    """Return a command line with an older program's name and positional arguments replaced by command and options."""
    if not arguments or arguments[0] not in ALIASES:
        return list(arguments)
    command, options = ALIASES[arguments[0]]
    rest = list(arguments[1:])
    end = next((index for index, word in enumerate(rest) if word.startswith("-")), len(rest))
    words, device = _device(rest[:end])
    named = [part for pair in zip(options, words, strict=False) for part in pair]
    return [command, *named, *words[len(options) :], *device, *rest[end:]]


def _device(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the words before ``CPU`` or ``GPU``, and the equivalent device option."""
    at = next((index for index, word in enumerate(words) if word in ("CPU", "GPU")), len(words))
    if at == len(words):
        return words, []
    number = (words[at + 1 :] or ["0"])[0]
    return words[:at], ["--cpu"] if words[at] == "CPU" else ["--gpu", number]
