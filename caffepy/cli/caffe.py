"""The program `caffe`: caffepy's commands with the flags, the log and the exit status of Caffe's programs.

    python -m caffepy.cli.caffe convert_imageset ARGUMENT...

is Caffe's program convert_imageset; `caffepy shims` writes files that do that.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
from collections.abc import Sequence

from caffepy import version
from caffepy.cli import main as command_line
from caffepy.cli.output import log_to_stderr

logger = logging.getLogger("caffepy.cli.caffe")  # also as __main__

ACTIONS = ("device_query", "test", "test_detection", "time", "train")
"""Caffe's commands; the messages about another one list them."""
_GLOG_FLAGS = {
    "alsologtostderr": False,
    "log_dir": True,
    "logtostderr": False,
    "minloglevel": True,
    "stderrthreshold": True,
    "v": True,
}
"""glog's flags, which every program of Caffe accepts, and whether the value may be the next word."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of Caffe's programs; an error aborts the process, as in Caffe.

    Args:
        argv: arguments of `caffe`, by default the process's own. The first may be another of Caffe's programs.

    Returns:
        The exit status: 0, 1 for a wrong option, 128 + the signal's number after a signal.
    """
    arguments = take_glog_flags(sys.argv[1:] if argv is None else argv)
    if any(argument in ("-version", "--version") for argument in arguments):
        print(f"caffe version {version.CAFFE_VERSION}")
        return 0
    if not arguments:
        return command_line.main(["--help"])
    words = [argument for argument in arguments if not argument.startswith("-")]
    known = {*command_line.COMMANDS, *command_line.ALIASES}
    action = next((word for word in words if word in known), None)
    if action is None and words:
        return _refuse(words[0])
    if action is not None:  # gflags finds the action behind flags too
        arguments.remove(action)
        arguments.insert(0, action)
    status = command_line.main(arguments, "caffe" if action in (*ACTIONS, None) else str(action))
    return _abort() if status == command_line.ABORTED else status


def take_glog_flags(arguments: Sequence[str]) -> list[str]:
    """Set the GLOG_ variables that glog's flags override, and return the other arguments."""
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        name, equals, value = word.lstrip("-").partition("=")
        if not word.startswith("-") or name not in _GLOG_FLAGS:
            rest.append(word)
            continue
        if not equals:
            value = next(words, "") if _GLOG_FLAGS[name] else "1"
        os.environ[f"GLOG_{name}"] = value
    return rest


def _refuse(word: str) -> int:
    with log_to_stderr(caffes="caffe"):
        logger.error("Available caffe actions:")
        for action in ACTIONS:
            logger.error("\t%s", action)
        logger.critical("Unknown action: %s", word)
    return _abort()


def _abort() -> int:
    """End the process as abort() does, without a core file."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    signal.signal(signal.SIGABRT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGABRT)
    return command_line.ABORTED


if __name__ == "__main__":
    sys.exit(main())
