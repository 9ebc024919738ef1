"""Upgrade of files of older Caffes, as Caffe's upgrade_net_proto_text and related tools."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from google.protobuf import text_format
from google.protobuf.message import Message

from caffepy.formats.binary import MAX_BYTES, convert_errors, read_message
from caffepy.formats.caffemodel import read_weights
from caffepy.formats.load import read_prototxt
from caffepy.formats.proto.caffe_pb2 import NetParameter, SolverParameter
from caffepy.formats.upgrade import upgrade_net, upgrade_solver
from caffepy.utils.files import atomic_write, read_regular

log = logging.getLogger(__name__)
T = TypeVar("T", bound=Message)


def upgrade_net_text(source: Path, target: Path) -> bool:
    """Write the net of a prototxt in the current format. Comments are lost.

    Returns:
        Whether anything changed.

    Raises:
        ConfigError: the source is absent, not a net, or cannot be upgraded.
        RunError: the target cannot be written.
    """
    return _upgrade_text("net", NetParameter(), upgrade_net, source, target)


def upgrade_solver_text(source: Path, target: Path) -> bool:
    """Write the solver of a prototxt in the current format; like `upgrade_net_text`."""
    return _upgrade_text("solver", SolverParameter(), upgrade_solver, source, target)


def upgrade_net_binary(source: Path, target: Path) -> bool:
    """Write the net and weights of a .caffemodel in the current format.

    Returns:
        Whether anything changed.

    Raises:
        SnapshotError: the source is absent, damaged or not a .caffemodel.
        RunError: the target cannot be written.
    """
    with convert_errors(str(source)):
        before = read_message(source, NetParameter, inline_arrays=True).message
    after = read_weights(source)
    changed = after != before
    after.ClearField("crc32c")  # the checksum of the source file
    after.ClearField("blob_count")
    _write(target, after.SerializeToString() if changed else read_regular(source, MAX_BYTES))
    _report(changed, source, target)
    return changed


def _upgrade_text(kind: str, empty: T, upgrade: Callable[[T, str], object], source: Path, target: Path) -> bool:
    before = read_prototxt(source, kind, empty)
    after = type(before)()
    after.CopyFrom(before)
    upgrade(after, str(source))
    changed = before != after
    _write(target, text_format.MessageToString(after, as_utf8=True).encode())
    _report(changed, source, target)
    return changed


def _write(path: Path, content: bytes) -> None:
    with atomic_write(path) as file:
        file.write(content)


def _report(changed: bool, source: Path, target: Path) -> None:
    if not changed:
        log.info("File already in latest proto format: %s", source)
    log.info("Wrote upgraded proto to %s", target)
