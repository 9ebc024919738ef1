"""Reads nets and solvers from prototxt files, and filters a net's layers by phase, level and stage."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.message import Message

from caffepy.errors import ConfigError
from caffepy.formats.ignore import ignored_fields
from caffepy.formats.paths import is_folder
from caffepy.formats.proto.caffe_pb2 import (
    LayerParameter,
    NetParameter,
    NetState,
    NetStateRule,
    Phase,
    SolverParameter,
    V1LayerParameter,
)
from caffepy.formats.prototxt import decode_text, parse_text
from caffepy.formats.upgrade import upgrade_net, upgrade_solver
from caffepy.utils.files import read_input

log = logging.getLogger(__name__)
M = TypeVar("M", bound=Message)

MAX_TEXT_BYTES = 2**24
"""Size limit of a prototxt; the largest nets have a few hundred kB."""

_MAX_CACHED_BYTES = 2**20
"""Size limit of a prototxt whose parsed message is cached."""

_DEVICES = re.compile(
    r"""#[^\n]*|"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'?|[{}]|\bdevice_id(?P<value>\s*:\s*(?:\[[^][]*\]|-?\d+))"""
)
"""Comments, strings, braces, and device_id with its value. An open string or list ends the match, so that the search
takes linear time."""


def read_net(path: Path | str, ignore_fields: Collection[str] = ()) -> NetParameter:
    """Read a net from a prototxt and upgrade it to the current format.

    Args:
        path: the file.
        ignore_fields: fields that are left out, as ``PoolingParameter.dilation``; "all": each that the schema lacks.
            They join those of CAFFEPY_IGNORE_FIELDS. The log names them.

    Raises:
        ConfigError: the file is absent, not a net, or cannot be upgraded.
    """
    param = read_prototxt(path, "net", NetParameter(), frozenset(ignore_fields))
    upgrade_net(param, str(path))
    return param


def read_solver(path: Path | str) -> SolverParameter:
    """Read a solver from a prototxt, upgrade it, and complete ``snapshot_prefix`` as Caffe does.

    Without a prefix, snapshots are named after the solver's prototxt, in its folder. If the prefix is a folder, the
    prototxt's name is appended.

    Raises:
        ConfigError: the file is absent, not a solver, or cannot be upgraded.
    """
    param = read_prototxt(path, "solver", SolverParameter())
    upgrade_solver(param, str(path))
    complete_snapshot_prefix(param, Path(path))
    return param


def read_prototxt(path: Path | str, kind: str, message: M, ignored: frozenset[str] = frozenset()) -> M:
    """Merge the text of a prototxt into `message` without upgrading, and return it.

    Args:
        path: the file.
        kind: "net" or "solver", for messages.
        message: the message to fill.
        ignored: as `parse_text` takes it.

    Raises:
        ConfigError: the file is absent or not a prototxt of this message type.
    """
    advice = f"a {kind}'s prototxt is shorter; give the text definition"
    text = decode_text(read_input(path, kind, ConfigError, MAX_TEXT_BYTES, advice), str(path))
    if isinstance(message, SolverParameter):
        text = name_devices(text)
    if len(text) > _MAX_CACHED_BYTES:
        return parse_text(text, message, str(path), ignored)
    message_type: Any = type(message)
    message.MergeFrom(_parse_cached(text, message_type, str(path), ignored_fields(ignored)))
    return message


def name_devices(text: str) -> str:
    """Write `device_ids` for the `device_id` of a solver that gives several, as TSN's Caffe lets it."""
    found, depth = list[re.Match[str]](), 0
    for match in _DEVICES.finditer(text):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if match["value"] and depth == 0:
            found.append(match)
    if len(found) < 2 and not any("[" in match["value"] for match in found):
        return text
    parts, end = list[str](), 0
    for match in found:
        parts += [text[end : match.start()], "device_ids"]
        end = match.start("value")
    return "".join([*parts, text[end:]])


@lru_cache(maxsize=8)
def _parse_cached(text: str, message_type: Any, origin: str, ignored: frozenset[str]) -> Any:
    """Parse text into a new message, which callers must not modify."""
    # A run reads the same net several times, and protobuf's Python parser takes 40 ms for ResNet-50.
    return parse_text(text, message_type(), origin, ignored)


def complete_snapshot_prefix(param: SolverParameter, path: Path) -> None:
    """Name snapshots after the solver's file where `snapshot_prefix` is missing or a folder; see `read_solver`."""
    if not param.HasField("snapshot_prefix"):
        param.snapshot_prefix = _check_utf8(str(path.with_suffix("")), path)
        log.info("snapshot_prefix is not given; snapshots will be named %s_iter_N", param.snapshot_prefix)
    elif is_folder(param.snapshot_prefix):
        param.snapshot_prefix = _check_utf8(str(Path(param.snapshot_prefix) / path.stem), path)
        log.info("snapshot_prefix is a folder; snapshots will be named %s_iter_N", param.snapshot_prefix)


def _check_utf8(prefix: str, path: Path) -> str:
    """Check that a prefix made from the solver's path is valid UTF-8."""
    try:
        prefix.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{path}: this path is not UTF-8; rename the file, or give snapshot_prefix") from None
    return prefix


def net_state(phase: int, *overrides: NetState) -> NetState:
    """Return the state for building a net: `phase`, then each of `overrides` merged in.

    A solver passes the net's ``state`` and then its ``train_state`` or ``test_state``, so the latter wins. Stages
    accumulate.
    """
    state = NetState(phase=Phase.Name(phase))
    for override in overrides:
        state.MergeFrom(override)
    return state


def filter_net(param: NetParameter, state: NetState) -> NetParameter:
    """Return a copy of `param` with the layers that `state` includes, each with its ``phase`` set.

    As Caffe's ``Net::FilterNet`` and ``Net::StateMeetsRule``: a layer without ``include`` rules is included unless one
    of its ``exclude`` rules holds; with ``include`` rules it is included if one of them holds.

    Raises:
        ConfigError: a layer has both ``include`` and ``exclude`` rules.
    """
    filtered = NetParameter()
    for field, value in param.ListFields():
        if field.name != "layer":
            filtered.MergeFrom(NetParameter(**{field.name: value}))
    filtered.state.CopyFrom(state)
    for layer in param.layer:
        if not is_included(layer, state):
            continue
        included = filtered.layer.add()
        included.CopyFrom(layer)
        if not included.HasField("phase"):
            included.phase = state.phase
    return filtered


def is_included(layer: LayerParameter | V1LayerParameter, state: NetState) -> bool:
    """Return whether a net in `state` includes `layer`.

    Raises:
        ConfigError: the layer has both ``include`` and ``exclude`` rules.
    """
    if layer.include and layer.exclude:
        raise ConfigError(f"layer '{layer.name}' has both include and exclude rules; keep one kind")
    if layer.include:
        return any(meets_rule(state, rule) for rule in layer.include)
    return not any(meets_rule(state, rule) for rule in layer.exclude)


def meets_rule(state: NetState, rule: NetStateRule) -> bool:
    """Return whether all conditions of `rule` hold in `state`; an empty rule always holds."""
    if rule.HasField("phase") and rule.phase != state.phase:
        return False
    if rule.HasField("min_level") and state.level < rule.min_level:
        return False
    if rule.HasField("max_level") and state.level > rule.max_level:
        return False
    stages = set(state.stage)
    return stages.issuperset(rule.stage) and stages.isdisjoint(rule.not_stage)
