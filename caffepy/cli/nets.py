"""Nets that commands run on one device: the device of --gpu, --cpu and the solver's mode, and shapes of records."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from caffepy.distributed.processes.launcher import find_launcher
from caffepy.errors import ConfigError, DataError, DeviceError
from caffepy.training.devices import check_gpus
from caffepy.utils.installation import MissingExtraError

if TYPE_CHECKING:
    from caffepy.cli.options import GpuOptions, NetDeviceOptions, StateOptions
    from caffepy.formats.caffemodel import TrainedLayers
    from caffepy.formats.proto import caffe_pb2
    from caffepy.formats.proto.caffe_pb2 import NetParameter, NetState, SolverParameter
    from caffepy.layers import LayerContext
    from caffepy.net import Net


logger = logging.getLogger(__name__)


def shares_gpus(args: GpuOptions, gpu_mode: bool) -> bool:
    """Return whether the ranks of a host divide all visible GPUs, because none are named.

    Args:
        args: the options of the command line.
        gpu_mode: whether the solver's `solver_mode` is GPU.
    """
    launcher = find_launcher()
    return launcher is not None and launcher.size != 1 and gpu_mode and args.gpus is None and not args.cpu


def train_devices(args: GpuOptions, gpu_mode: bool, solver: SolverParameter, origin: str) -> list[int] | None:
    """Return the GPUs for training, which the ranks of a host divide, or None for the CPU.

    Args:
        args: the options of the command line.
        gpu_mode: whether the solver's `solver_mode` is GPU; used if the command line names no device.
        solver: whose `device_id` or list of them counts if the command line names no device.
        origin: the solver's file, for messages.

    Raises:
        DeviceError, MissingExtraError: a requested GPU is unavailable. There is no silent fallback to the CPU.
    """
    if args.cpu or (args.gpus is None and not gpu_mode):
        return None
    if args.gpus is not None:
        return check_gpus(args.gpus)
    try:
        named = list(solver.device_ids) or [solver.device_id]
        return check_gpus("all" if shares_gpus(args, gpu_mode) else named)
    except (DeviceError, MissingExtraError) as error:
        raise DeviceError(
            f"{origin} is for a GPU (solver_mode: GPU, also the default; --cpu trains on the CPU instead): {error}"
        ) from error


def single_device(args: GpuOptions) -> int | None:
    """Return the device of `test` and `time`: the first GPU named, else None for the CPU, as in Caffe.

    Raises:
        DeviceError, MissingExtraError: the GPU is unavailable.
    """
    if args.gpus is None:
        logger.info("Use CPU.")
        return None
    devices = check_gpus(args.gpus)
    if len(devices) > 1:
        logger.warning("this command runs on one device; of GPUs %s it takes %d", devices, devices[0])
    logger.info("Use GPU with device ID %d", devices[0])
    return devices[0]


@contextmanager
def net_setup(
    path: Path, args: NetDeviceOptions, phase: int, iterations: int
) -> Iterator[tuple[NetParameter, LayerContext, NetState]]:
    """Yield the parts of a net for --level and --stage, on the device of --gpu; close the device afterwards.

    Raises:
        ConfigError: the net has no layers in this phase.
    """
    from caffepy.backend import create_backend
    from caffepy.formats.paths import PathResolver
    from caffepy.layers import LayerContext

    param, state = net_and_state(path, args, phase)
    refuse_net_without_layers(path, param, state)
    backend = create_backend(single_device(args), args.threads, args.math)
    try:
        with backend.activate():
            context = LayerContext(backend, phase=phase, test_iter=iterations, resolve=PathResolver(path))
            yield param, context, state
    finally:
        backend.close()


@contextmanager
def open_net(path: Path, args: NetDeviceOptions, phase: int, iterations: int, weights: list[Path]) -> Iterator[Net]:
    """Yield the unfused net of `net_setup` with the weights of .caffemodel files; close it afterwards.

    Raises:
        ConfigError: the net has no layers in this phase.
        SnapshotError: a file is not a .caffemodel or does not fit the net.
    """
    from caffepy.net import Net

    with net_setup(path, args, phase, iterations) as (param, context, state):
        net = Net(param, context, state)
        try:
            for layers, origin in read_weights(weights):
                net.copy_trained_layers_from(layers, origin)
            yield net
        finally:
            net.close()


def net_and_state(path: Path, args: StateOptions, phase: int) -> tuple[NetParameter, NetState]:
    """Return a net as read, and the NetState of --level and --stage."""
    from caffepy.formats.load import net_state, read_net
    from caffepy.formats.proto.caffe_pb2 import NetState

    param = read_net(path)
    return param, net_state(phase, param.state, NetState(level=args.level, stage=args.stage))


def refuse_net_without_layers(path: Path, param: NetParameter, state: NetState) -> None:
    """Check that include and exclude rules leave layers.

    Raises:
        ConfigError: no layers are left.
    """
    from caffepy.formats.load import filter_net
    from caffepy.formats.proto.caffe_pb2 import Phase

    if not filter_net(param, state).layer:
        raise ConfigError(
            f"{path}: the net has no layers in the {Phase.Name(state.phase)} phase; check whether its include rules "
            "need another phase, --level or --stage"
        )


def read_weights(files: list[Path]) -> Iterator[tuple[TrainedLayers, str]]:
    """Yield the layers of .caffemodel files with the file's name; later files override earlier ones.

    Raises:
        SnapshotError: a file is not a .caffemodel.
    """
    from caffepy.formats.caffemodel import read_caffemodel

    return ((read_caffemodel(path), str(path)) for path in files)


def record_shapes(
    param: caffe_pb2.NetParameter,
    context: LayerContext,
    state: caffe_pb2.NetState,
    given: tuple[int, ...] | None,
    say: Callable[[str], object],
) -> dict[str, tuple[int, ...]]:
    """Return the shape of one record by top of a data layer: as given, from the data, or from the layer's fields.

    Args:
        param: the net.
        context: gives paths and dialect.
        state: selects the layers.
        given: the value of --shape.
        say: reports missing data.

    Raises:
        DataError: the data are missing and the prototxt does not give their shape.
    """
    from caffepy.formats.dialect import Dialect, choose_dialect
    from caffepy.formats.load import filter_net
    from caffepy.formats.proto import caffe_pb2
    from caffepy.net.memory_plan import read_sample_shapes
    from caffepy.net.record_shape import label_shapes

    dialect = context.dialect or choose_dialect([param], lambda *line: None)
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in filter_net(param, state).layer:
        if layer.bottom:
            continue
        if given is not None:
            shapes |= zip(layer.top, [given, *label_shapes(layer, given)], strict=False)
            continue
        try:
            single = caffe_pb2.NetParameter(layer=[layer])
            shapes |= read_sample_shapes(single, replace(context, dialect=dialect), state)
        except DataError as error:
            told = _told_shape(layer, error, dialect is Dialect.NVIDIA, say)
            shapes |= zip(layer.top, [told, *label_shapes(layer, told)], strict=False)
    return shapes


def _told_shape(
    layer: caffe_pb2.LayerParameter, error: DataError, nvidia: bool, say: Callable[[str], object]
) -> tuple[int, ...]:
    """Return the shape of a layer's crops or resized images, for missing data."""
    from caffepy.net.record_shape import told_shape

    told = told_shape(layer, nvidia)
    if told is None:
        raise DataError(f"{error}; or give the shape of one record, e.g. --shape 3,224,224") from error
    shape, fields = told
    text = ",".join(map(str, shape))
    say(f"layer '{layer.name}': its data are missing; using --shape {text}, from {fields}")
    return shape
