"""What all ranks must have alike: options, solver, nets and data before training, and the parameters of replicas.

Ranks compare descriptions with the root's, and the first field that differs is named. Paths, device numbers and folders
may differ from host to host and are not compared; the content of the files is. The random seed, and the snapshot and
weights to start from, are the root's.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from caffepy import version
from caffepy.distributed.placement import assign_gpus
from caffepy.distributed.processes.world import World
from caffepy.errors import ConfigError
from caffepy.formats.dialect import VARIABLE as DIALECT
from caffepy.formats.paths import PathResolver, is_path
from caffepy.formats.proto.caffe_pb2 import LayerParameter, SolverParameter, SolverState
from caffepy.formats.proto.schemas import VARIABLE as PROTO
from caffepy.formats.proto.schemas import fork_schema
from caffepy.formats.snapshot_files import newest_snapshot
from caffepy.layers.input.prefetching import PrefetchingLayer
from caffepy.layers.layer import Layer
from caffepy.net import Net
from caffepy.training.options import TrainOptions
from caffepy.training.solver import Solver
from caffepy.utils.options import option_values

logger = logging.getLogger(__name__)


Description: TypeAlias = "dict[str, str]"
"""A rank's fields, as messages call them, and their values; compared in this order."""

_OF_THE_ROOT = frozenset({"random_seed"})
_OF_THE_HOST = frozenset({"device_id", "device_ids", "solver_mode"})
_NETS = frozenset({"net_param", "train_net_param", "test_net_param"})
"""Compared as the nets that became of them."""
_NOT_GIVEN = "not given"
_LONG_LIST = 32
"""Longer lists of numbers are compared by a hash."""


@dataclass(frozen=True)
class FieldMismatch:
    """The first field in which a rank differs from the root."""

    field: str
    roots: str
    other: str

    def sentence(self, root: str, rank: str) -> str:
        """``base_lr is 0.01 on rank 0 on a and 0.001 on rank 1 on b``, given what the two ranks are called."""
        return f"{self.field} is {self.roots} on {root} and {self.other} on {rank}"


def first_difference(roots: Description, other: Description) -> FieldMismatch | None:
    """The first field, in the root's order, that differs or is missing on the other rank; else one that only it has."""
    for field in (*roots, *(field for field in other if field not in roots)):
        mine, theirs = (description.get(field, _NOT_GIVEN) for description in (roots, other))
        if mine != theirs:
            return FieldMismatch(field, mine, theirs)
    return None


def check_alike(world: World, description: Description) -> None:
    """Compare the ranks' descriptions with the root's; called by the main thread of all ranks.

    Raises:
        ConfigError: the first difference of the first rank that has one; on the root, see `World.raise_on_all`.
    """
    differences = world.all_gather(first_difference(world.broadcast(description), description))
    for rank, difference in enumerate(differences):
        if difference is not None:
            sentence = difference.sentence(world.name(0), world.name(rank))
            advice = "all ranks must train alike: give them the same files and options"
            world.raise_on_all(ConfigError(f"{sentence}; {advice}"))


def agree_on_start(world: World, solver: Solver) -> SolverState | None:
    """What the root has restored, for all ranks; called by the main thread of all ranks with one of their solvers.

    Raises:
        ConfigError: ranks have read different files under the same name; on the root, see `World.raise_on_all`.
    """
    if world.size > 1:
        check_alike(world, world.run_on_all(lambda: describe_nets(solver)))
    read = solver.snapshots.restored
    restored = world.broadcast(None if read is None else read.SerializeToString())
    return None if restored is None else SolverState.FromString(restored)


# -- what is compared ----------------------------------------------------------------------------------


def describe_run(options: TrainOptions) -> Description:
    """Versions, options and the solver's fields: what is known before any net is built."""
    described = {"caffepy's version": version.__version__, "NumPy's version": np.__version__}
    if options.devices is not None:
        from caffepy.distributed.nccl_info import nccl_version

        described["NCCL's version"] = str(nccl_version())
    return described | describe_options(options) | describe_solver(options.solver)


def describe_options(options: TrainOptions) -> Description:
    """All options except options declared `per_rank`."""
    described = {"--trace": "given" if options.trace is not None else _NOT_GIVEN}
    described[f"--dialect or {DIALECT}"] = os.environ.get(DIALECT, "").strip().lower() or _NOT_GIVEN
    schema = fork_schema()
    described[f"--proto or {PROTO}"] = _NOT_GIVEN if schema is None else f"a file with hash {schema.digest}"
    described["the program"] = "caffepy.train" if options.keeps_trained else "caffepy train"
    alike = ((one.flags[-1], value) for one, value in option_values(options) if not one.per_rank)
    return described | {flag: _option_text(value) for flag, value in alike}


def _option_text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, range):
        return f"{value.start}:{value.stop}"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return ",".join(map(str, value)) or _NOT_GIVEN
    return _NOT_GIVEN if value is None else str(value)


def describe_solver(param: SolverParameter) -> Description:
    """The solver's fields, without its nets."""
    return dict(_flatten(param, skipped=_NETS | _OF_THE_ROOT | _OF_THE_HOST))


def describe_nets(solver: Solver) -> Description:
    """The solver's nets, layer by layer, and the data that they read."""
    described = {"the number of test nets": str(len(solver.test_nets))}
    nets = [("the train net", solver.net)]
    nets += [(f"test net {index}", net) for index, net in enumerate(solver.test_nets)]
    for name, net in nets:
        described.update(_describe_net(name, net))
    for name, net in nets:
        described.update(_describe_data(name, net))
    described["the number of parameters"] = str(solver.net.parameters.size)
    described["the batch of a device"] = str(solver.performance.batch)
    return described


def _describe_net(name: str, net: Net) -> Description:
    described = {f"{field} of {name}": value for field, value in _flatten(net.param, skipped={"layer", "layers"})}
    titles = _titles(net.param.layer)
    for index, (layer, title) in enumerate(zip(net.param.layer, titles, strict=True)):
        described[f"layer {index} of {name}"] = f"'{layer.name}' ({layer.type})"
        for field, value in _flatten(layer, skipped={"name", "type"}):
            described[f"{field} of {title} of {name}"] = value
    return described


def _describe_data(name: str, net: Net) -> Description:
    return {
        f"{field} of {title} of {name}": value
        for layer, title in zip(net.layers, _titles(net.layers), strict=True)
        if isinstance(layer, PrefetchingLayer)
        for field, value in layer.fingerprint().items()
    }


def _titles(layers: Iterable[LayerParameter | Layer]) -> list[str]:
    """What layers are called, with their numbers where one before them has the same name."""
    seen, titles = set[str](), []
    for index, layer in enumerate(layers):
        titles.append(f"layer '{layer.name}'" + (f" (layer {index})" if layer.name in seen else ""))
        seen.add(layer.name)
    return titles


# -- messages as fields and values -----------------------------------------------------------------------


def _flatten(message: Message, prefix: str = "", skipped: Iterable[str] = ()) -> Iterator[tuple[str, str]]:
    """The fields that are set, by path, with their values; without paths and the names in `skipped`."""
    for field, value in message.ListFields():
        if is_path(field) or field.name in skipped:
            continue
        path = prefix + field.name
        repeated = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
        if field.message_type is None:
            yield path, _list_text(field, value) if repeated else _value_text(field, value)
        elif repeated:
            for index, part in enumerate(value):
                yield from _flatten_part(part, f"{path}[{index}]")
        else:
            yield from _flatten_part(value, path)


def _flatten_part(message: Message, path: str) -> Iterator[tuple[str, str]]:
    """A field that is a message; its presence counts even if it is empty."""
    yield path, "given"
    yield from _flatten(message, f"{path}.")


def _list_text(field: FieldDescriptor, values: Any) -> str:
    if len(values) <= _LONG_LIST:
        return ", ".join(_value_text(field, value) for value in values)
    content = "\n".join(_value_text(field, value) for value in values)
    return f"{len(values)} values with hash {hashlib.blake2b(content.encode(), digest_size=6).hexdigest()}"


def _value_text(field: FieldDescriptor, value: Any) -> str:
    """A value as a prototxt has it; float32 numbers with the digits that tell them apart."""
    if field.enum_type is not None:
        number = field.enum_type.values_by_number.get(value)
        return str(value) if number is None else str(number.name)
    if field.cpp_type == FieldDescriptor.CPPTYPE_FLOAT:
        return str(np.float32(value)).removesuffix(".0")
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return "true" if value else "false"
    return f"'{value}'" if isinstance(value, str) else str(value)


def agree_on_options(world: World, options: TrainOptions) -> TrainOptions:
    """Compare the ranks' options; called by the main thread of all ranks.

    Returns:
        This rank's options with its part of the GPUs, and with random seed, snapshot and weights of the root.

    Raises:
        ConfigError: the ranks' options do not go together; on the root, see `World.raise_on_all`.
    """
    options = replace(options, devices=assign_gpus(world, options.devices, named=not options.share_gpus))
    _compare_device_counts(world, options)
    if world.size > 1:
        check_alike(world, world.run_on_all(lambda: describe_run(options)))
    solver = SolverParameter()
    solver.CopyFrom(options.solver)
    if solver.random_seed < 0:
        solver.random_seed = secrets.randbelow(1 << 31)
    solver.random_seed = world.broadcast(solver.random_seed)
    snapshot = world.run_on_all(lambda: _start_snapshot(options) if world.rank == 0 else None)
    return replace(options, solver=solver, snapshot=world.broadcast(snapshot), weights=world.broadcast(options.weights))


def _compare_device_counts(world: World, options: TrainOptions) -> None:
    gpus = world.all_gather(None if options.devices is None else len(options.devices))
    counts = world.all_gather(len(options.local_devices))
    for rank in range(1, world.size):
        if gpus[rank] != gpus[0] or counts[rank] != counts[0]:
            error = ConfigError(
                f"ranks have different devices: {world.name(0)} has {_count(gpus[0], counts[0])}, "
                f"{world.name(rank)} has {_count(gpus[rank], counts[rank])}; give every rank as many"
            )
            world.raise_on_all(error)


def _count(gpus: int | None, devices: int) -> str:
    kind = "CPU solver" if gpus is None else "GPU"
    return f"{devices} {kind}{'s' if devices != 1 else ''}"


def _start_snapshot(options: TrainOptions) -> Path | None:
    """The snapshot to resume from; for the root."""
    since = options.resume_since
    if not options.resume_newest and since is None:
        return options.snapshot
    prefix = (options.resolve or PathResolver(None)).output(options.solver.snapshot_prefix)
    newest = newest_snapshot(prefix)
    if not options.resume_newest and (newest is None or newest.stat().st_mtime < (since or 0)):
        logger.info("no whole snapshot of this job with the prefix %s: it begins again as at first", prefix)
        return options.snapshot
    if newest is None:
        logger.info("no whole snapshot with the prefix %s: training starts from the beginning", prefix)
    return newest
