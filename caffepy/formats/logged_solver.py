"""The solver and its nets in a training log, so that the run can be reproduced from the log (`--from-log`).

Every line has the log's prefix, because Caffe's log parsers expect a time in each line after the first iteration,
and a log continues after a restart:

    I1121 11:29:00.123456 12345 run_log.py:40] Initializing solver from parameters, 57 lines of a file in /home/a:
    I1121 11:29:00.123460 12345 run_log.py:40] | base_lr: 0.01
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from google.protobuf import text_format

from caffepy.errors import ConfigError
from caffepy.formats.load import read_net
from caffepy.formats.paths import PathResolver, path_fields
from caffepy.formats.proto.caffe_pb2 import NetParameter, SolverParameter
from caffepy.formats.prototxt import parse_text
from caffepy.formats.upgrade import upgrade_solver
from caffepy.utils.files import open_regular

_PREFIX = r"[IWEF]\d{4} [\d:.]+ +\d+ \S+\] (?:\[rank \d+\] )?"
_HEADER = re.compile(rf"{_PREFIX}Initializing solver from parameters, (\d{{1,9}}) lines of a file in (.*):")
_LINE = re.compile(rf"{_PREFIX}\| (.*)")
_MAX_LINE = 1 << 24
"""Maximum length of a log line; caffepy writes no longer ones."""
_MAX_TEXT = 1 << 26
"""Maximum characters before the solver's end; four times the longest prototxt."""


def describe_solver(param: SolverParameter, resolve: PathResolver) -> Iterator[str]:
    """Yield the log messages: a header, then the lines of the solver's text with its nets inlined.

    Raises:
        ConfigError: a net cannot be read.
    """
    lines = text_format.MessageToString(inline_nets(param, resolve), as_utf8=True).splitlines()
    folder = (resolve.folder or Path()).absolute()
    yield f"Initializing solver from parameters, {len(lines)} lines of a file in {folder}:"
    for line in lines:
        yield f"| {line}"


def inline_nets(
    param: SolverParameter, resolve: PathResolver, read: Callable[[Path], NetParameter] = read_net
) -> SolverParameter:
    """Return a copy of a solver whose nets are inlined instead of named by file.

    Args:
        param: the solver.
        resolve: finds the files that it names.
        read: reads a net's file.

    Raises:
        ConfigError: a net cannot be read.
    """
    result = SolverParameter()
    result.CopyFrom(param)
    for name in ("net", "train_net"):
        if result.HasField(name):
            getattr(result, f"{name}_param").CopyFrom(read(resolve(getattr(result, name))))
            result.ClearField(name)
    for name in result.test_net:
        result.test_net_param.append(read(resolve(name)))
    del result.test_net[:]
    return result


def read_movable_net(path: Path) -> NetParameter:
    """Read a net and name the files that lie beside its prototxt so that they are found from the working directory.

    Raises:
        ConfigError: the net cannot be read.
    """
    param, resolve = read_net(path), PathResolver(path)
    for message, field in path_fields(param):
        name = getattr(message, field.name)
        if isinstance(name, str) and not field.name.endswith("prefix"):  # prefixes are of output files
            setattr(message, field.name, str(resolve(name)))
    return param


def read_logged_solver(path: Path) -> tuple[SolverParameter, Path]:
    """Read the first solver in a log, with its nets, and the base folder of its relative paths.

    Raises:
        ConfigError: the log cannot be read, has no solver, or ends within the solver.
    """
    try:
        with open_regular(path) as file, io.TextIOWrapper(file, encoding="utf-8", errors="replace") as log:
            text, folder = _find_solver(log, path)
    except FileNotFoundError as error:
        raise ConfigError(f"--from-log {path}: there is no such file") from error
    except OSError as error:
        raise ConfigError(f"--from-log {path}: cannot be read: {error.strerror}") from error
    param = parse_text(text, SolverParameter(), f"the solver in {path}")
    upgrade_solver(param, str(path))
    return param, folder


def _find_solver(log: TextIO, path: Path) -> tuple[str, Path]:
    header, lines, remaining = None, list[str](), _MAX_TEXT
    while line := log.readline(_MAX_LINE):
        remaining -= len(line)
        if remaining < 0:
            raise ConfigError(f"--from-log {path}: its solver does not end within the first {_MAX_TEXT} characters")
        if header is None:
            header = _HEADER.match(line)
        elif match := _LINE.match(line):
            lines.append(match[1])
        if header is not None and len(lines) == int(header[1]):
            return "\n".join(lines), Path(header[2])
    if header is None:
        raise ConfigError(f"--from-log {path}: it contains no solver; is it the log of a training run of this version?")
    raise ConfigError(f"--from-log {path}: it ends within the solver: it has {len(lines)} of {header[1]} lines")
