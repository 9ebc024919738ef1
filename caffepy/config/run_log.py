"""The text of solver and nets in a training's log, from which the training can be made again.

Every line has the log's own prefix, because Caffe's log parsers read the time of each line after the first iteration,
and a log goes on after a restart:

    I1121 11:29:00.123456 12345 run_log.py:40] Initializing solver from parameters, 57 lines of a file in /home/a:
    I1121 11:29:00.123460 12345 run_log.py:40] | base_lr: 0.01
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from google.protobuf import text_format

from caffepy.config.load import read_net
from caffepy.config.paths import PathResolver
from caffepy.config.text import parse_text
from caffepy.config.upgrade import upgrade_solver
from caffepy.errors import ConfigError
from caffepy.files import open_regular
from caffepy.proto.caffe_pb2 import SolverParameter

_PREFIX = r"[IWEF]\d{4} [\d:.]+ +\d+ \S+\] (?:\[rank \d+\] )?"
_HEAD = re.compile(rf"{_PREFIX}Initializing solver from parameters, (\d{{1,9}}) lines of a file in (.*):")
_LINE = re.compile(rf"{_PREFIX}\| (.*)")
_LONGEST_LINE = 1 << 24
"""Characters of a line of the log; longer ones are none of ours."""
_MAX_TEXT = 1 << 26
"""Characters within which the solver must end; the longest prototxt has a quarter of them."""


def describe_solver(param: SolverParameter, resolve: PathResolver) -> Iterator[str]:
    """The log's messages: a head, then each line of the solver's text with its nets in it.

    Raises:
        ConfigError: a net cannot be read.
    """
    lines = text_format.MessageToString(with_nets(param, resolve), as_utf8=True).splitlines()
    folder = (resolve.folder or Path()).absolute()
    yield f"Initializing solver from parameters, {len(lines)} lines of a file in {folder}:"
    for line in lines:
        yield f"| {line}"


def with_nets(param: SolverParameter, resolve: PathResolver) -> SolverParameter:
    """A solver that holds its nets instead of naming their files.

    Raises:
        ConfigError: a net cannot be read.
    """
    whole = SolverParameter()
    whole.CopyFrom(param)
    for name in ("net", "train_net"):
        if whole.HasField(name):
            getattr(whole, f"{name}_param").CopyFrom(read_net(resolve(getattr(whole, name))))
            whole.ClearField(name)
    for name in whole.test_net:
        whole.test_net_param.append(read_net(resolve(name)))
    del whole.test_net[:]
    return whole


def read_logged_solver(path: Path) -> tuple[SolverParameter, Path]:
    """The first solver in a log, with its nets, and the folder from which its paths count.

    Raises:
        ConfigError: the log cannot be read, holds none, or is cut off in it.
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
    head, lines, left = None, list[str](), _MAX_TEXT
    while line := log.readline(_LONGEST_LINE):
        left -= len(line)
        if left < 0:
            raise ConfigError(f"--from-log {path}: its solver does not end within the first {_MAX_TEXT} characters")
        if head is None:
            head = _HEAD.match(line)
        elif match := _LINE.match(line):
            lines.append(match[1])
        if head is not None and len(lines) == int(head[1]):
            return "\n".join(lines), Path(head[2])
    if head is None:
        raise ConfigError(f"--from-log {path}: it holds no solver; is it the log of a training of this version?")
    raise ConfigError(f"--from-log {path}: it is cut off within the solver: {len(lines)} of {head[1]} lines are there")
