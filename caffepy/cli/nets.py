"""The net that `test`, `time` and `extract_features` run, on one device."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from caffepy.cli.devices import single_device
from caffepy.errors import ConfigError

if TYPE_CHECKING:
    from caffepy.layers import LayerContext
    from caffepy.net import Net
    from caffepy.proto.caffe_pb2 import NetParameter, NetState
    from caffepy.snapshot.caffemodel import TrainedLayers


@contextmanager
def net_setup(
    args: argparse.Namespace, phase: int, iterations: int
) -> Iterator[tuple[NetParameter, LayerContext, NetState]]:
    """Yield the parts of the net of --model, --level and --stage, on the device of --gpu; close the device afterwards.

    Args:
        args: the command line.
        phase: caffe_pb2.TRAIN or TEST.
        iterations: number of batches in the test.

    Raises:
        ConfigError: the net has no layers in this phase.
    """
    from caffepy.backend import create_backend
    from caffepy.config.paths import PathResolver
    from caffepy.layers import LayerContext

    param, state = net_and_state(args, phase)
    refuse_net_without_layers(args.model, param, state)
    backend = create_backend(single_device(args), args.threads, args.math)
    try:
        with backend.activate():
            context = LayerContext(backend, phase=phase, test_iter=iterations, resolve=PathResolver(args.model))
            yield param, context, state
    finally:
        backend.close()


@contextmanager
def open_net(args: argparse.Namespace, phase: int, iterations: int, weights: list[Path]) -> Iterator[Net]:
    """Yield the unfused net of `net_setup` with the weights of .caffemodel files; close it afterwards.

    Raises:
        ConfigError: the net has no layers in this phase.
        SnapshotError: a file is not a .caffemodel or does not fit the net.
    """
    from caffepy.net import Net

    with net_setup(args, phase, iterations) as (param, context, state):
        net = Net(param, context, state)
        try:
            for layers, origin in read_weights(weights):
                net.copy_trained_layers_from(layers, origin)
            yield net
        finally:
            net.close()


def net_and_state(args: argparse.Namespace, phase: int) -> tuple[NetParameter, NetState]:
    """Return the net of --model as read, and the NetState of --level and --stage."""
    from caffepy.config.filter import net_state
    from caffepy.config.load import read_net
    from caffepy.proto.caffe_pb2 import NetState

    param = read_net(args.model)
    return param, net_state(phase, param.state, NetState(level=args.level, stage=args.stage))


def refuse_net_without_layers(path: Path, param: NetParameter, state: NetState) -> None:
    """Check that include and exclude rules leave layers.

    Raises:
        ConfigError: no layers are left.
    """
    from caffepy.config.filter import filter_net
    from caffepy.proto.caffe_pb2 import Phase

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
    from caffepy.snapshot.caffemodel import read_caffemodel

    return ((read_caffemodel(path), str(path)) for path in files)
