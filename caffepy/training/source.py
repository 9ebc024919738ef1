"""What a program gives `caffepy.train`, a file, a message or a spec, as one SolverParameter."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

from google.protobuf.message import EncodeError

from caffepy.config.load import read_net, read_solver
from caffepy.config.upgrade import upgrade_net, upgrade_solver
from caffepy.errors import ConfigError
from caffepy.proto.caffe_pb2 import NetParameter, SolverParameter
from caffepy.registry import suggest

StrPath: TypeAlias = "str | PathLike[str]"
SolverSource: TypeAlias = "StrPath | SolverParameter | Mapping[str, Any]"
NetSource: TypeAlias = "StrPath | NetParameter | Any"
"""A file, a message, or what has `to_proto`, as pycaffe's NetSpec has."""

_NETS = ("net", "net_param", "train_net", "train_net_param")


def solver_of(source: SolverSource, net: NetSource | None = None) -> tuple[SolverParameter, Path | None]:
    """A solver with its net, upgraded, and the file that it comes from.

    Args:
        source: a prototxt's path, a message, or a mapping of the solver's fields.
        net: the net instead of the one that the solver names; None: the solver's.

    Raises:
        ConfigError: a file cannot be read, a field cannot be, or it is none of these.
    """
    path = Path(source) if isinstance(source, (str, PathLike)) else None
    if path is not None:
        param = read_solver(path)
    else:
        param = _message(source)
        upgrade_solver(param, "solver")
        _check_snapshots(param)
    if net is not None:
        for name in _NETS:
            param.ClearField(name)
        param.net_param.CopyFrom(_net_of(net))
    return param, path


def _message(source: Any) -> SolverParameter:
    """A message of this package's or of another schema's of that name, or of a mapping's fields."""
    if isinstance(source, Mapping):
        return _from_fields(source)
    known = "a solver is a prototxt's path, a SolverParameter or a mapping of fields"
    param: SolverParameter = _copied(source, SolverParameter, known)
    return param


def _from_fields(fields: Mapping[str, Any]) -> SolverParameter:
    param = SolverParameter()
    for name, value in fields.items():
        known = list(SolverParameter.DESCRIPTOR.fields_by_name)
        if name not in known:
            raise ConfigError(f"solver: unknown field '{name}'; {suggest(str(name), known)}")
        try:
            param.MergeFrom(SolverParameter(**{name: value}))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"solver: {name} is {value!r}: {error}; give it as a solver's prototxt does") from error
    return param


def _copied(source: Any, kind: Any, known: str) -> Any:
    descriptor = getattr(source, "DESCRIPTOR", None)
    if descriptor is None or descriptor.name != kind.DESCRIPTOR.name:
        raise ConfigError(f"{known}; {type(source).__name__} is none of these")
    try:
        return kind.FromString(source.SerializeToString())
    except EncodeError as error:
        raise ConfigError(f"{descriptor.name}: {error}") from error


def _net_of(net: Any) -> NetParameter:
    if isinstance(net, (str, PathLike)):
        return read_net(Path(net))
    message = net.to_proto() if callable(getattr(net, "to_proto", None)) else net
    param: NetParameter = _copied(message, NetParameter, "a net is a prototxt's path, a NetParameter or a NetSpec")
    upgrade_net(param, "net")
    return param


def _check_snapshots(param: SolverParameter) -> None:
    """Without a prefix nothing can be written: a solver that is no file writes a snapshot only if it says where."""
    if param.HasField("snapshot_prefix"):
        return
    if param.snapshot or (param.HasField("snapshot_after_train") and param.snapshot_after_train):
        raise ConfigError("solver: snapshots are wanted and snapshot_prefix is missing; add snapshot_prefix")
    param.snapshot_after_train = False
