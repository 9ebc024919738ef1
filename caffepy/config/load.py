"""Reading nets and solvers from prototxt files."""

from __future__ import annotations

import logging
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.message import Message

from caffepy.config.paths import is_folder
from caffepy.config.text import decode_text, parse_text
from caffepy.config.upgrade import upgrade_net, upgrade_solver
from caffepy.errors import ConfigError
from caffepy.files import read_input
from caffepy.proto.caffe_pb2 import NetParameter, SolverParameter

log = logging.getLogger(__name__)
M = TypeVar("M", bound=Message)

MAX_TEXT_BYTES = 2**24
"""Longest prototxt; the largest nets have a few hundred kB."""

_MAX_REMEMBERED = 2**20
"""Longest prototxt whose message is remembered."""


def read_net(path: Path | str) -> NetParameter:
    """The net that a prototxt describes, upgraded to the current format.

    Raises:
        ConfigError: the file is absent, not a net's prototxt, or cannot be upgraded.
    """
    param = read_prototxt(path, "net", NetParameter())
    upgrade_net(param, str(path))
    return param


def read_solver(path: Path | str) -> SolverParameter:
    """The solver that a prototxt describes, upgraded, with ``snapshot_prefix`` filled in as Caffe does.

    Without a prefix snapshots go beside the solver's prototxt, under its name; a prefix that is a folder
    gets that name appended.

    Raises:
        ConfigError: the file is absent, not a solver's prototxt, or cannot be upgraded.
    """
    param = read_prototxt(path, "solver", SolverParameter())
    upgrade_solver(param, str(path))
    _complete_snapshot_prefix(param, Path(path))
    return param


def read_prototxt(path: Path | str, kind: str, message: M) -> M:
    """Merges the text in a file, which is a `kind`, into `message` and returns it as it was written.

    Raises:
        ConfigError: the file is absent or no prototxt of such a message.
    """
    advice = f"no {kind}'s prototxt is that long; give the text definition"
    text = decode_text(read_input(path, kind, ConfigError, MAX_TEXT_BYTES, advice), str(path))
    if len(text) > _MAX_REMEMBERED:
        return parse_text(text, message, str(path))
    new: Any = type(message)
    message.MergeFrom(_parsed(text, new, str(path)))
    return message


@lru_cache(maxsize=8)
def _parsed(text: str, new: Any, origin: str) -> Any:
    """`parse_text` into a new message, which must not be changed: a training reads its net for each device and purpose.

    Python's reader of protobuf text takes 40 ms for ResNet-50.
    """
    return parse_text(text, new(), origin)


def _complete_snapshot_prefix(param: SolverParameter, path: Path) -> None:
    if not param.HasField("snapshot_prefix"):
        param.snapshot_prefix = _as_text(str(path.with_suffix("")), path)
        log.info("snapshot_prefix is not given; snapshots will be named %s_iter_N", param.snapshot_prefix)
    elif is_folder(param.snapshot_prefix):
        param.snapshot_prefix = _as_text(str(Path(param.snapshot_prefix) / path.stem), path)
        log.info("snapshot_prefix is a folder; snapshots will be named %s_iter_N", param.snapshot_prefix)


def _as_text(prefix: str, path: Path) -> str:
    """A prefix made of the solver's path, which may hold bytes that no text can."""
    try:
        prefix.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{path}: this path is not UTF-8; rename the file, or give snapshot_prefix") from None
    return prefix
