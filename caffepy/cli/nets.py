"""Opens the one net that `test` and `time` run: `time` layer by layer, `test` in the fastest way."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from caffepy.cli.devices import single_device
from caffepy.errors import ConfigError

if TYPE_CHECKING:
    from caffepy.net import Net
    from caffepy.proto.caffe_pb2 import NetParameter, NetState


@contextmanager
def open_net(
    args: argparse.Namespace, phase: int, iterations: int, fuse: bool = False, share: bool = False
) -> Iterator[Net]:
    """The net of --model with --level and --stage, on the device of --gpu; closed with its backend afterwards.

    Args:
        args: the command line.
        phase: caffe_pb2.TRAIN or TEST.
        iterations: batches in the whole test.
        fuse: compute groups of layers as one, unless the net's debug_info shows each.
        share: let blobs that are never needed at the same time have the same memory; with debug_info none do.

    Raises:
        ConfigError: the net has no layers in this phase.
    """
    from caffepy.backend import create_backend
    from caffepy.config.paths import PathResolver
    from caffepy.layers import LayerContext
    from caffepy.net import Net
    from caffepy.net.memory.plan import plan_memory, sample_shapes

    param, state = net_and_state(args, phase)
    refuse_net_without_layers(args.model, param, state)
    backend = create_backend(single_device(args), args.threads, args.math)
    try:
        with backend.activate():
            context = LayerContext(backend, phase=phase, test_iter=iterations, resolve=PathResolver(args.model))
            net = Net(param, context, state, fuse and not param.debug_info)
            try:
                if share and not param.debug_info:
                    context = replace(context, sample_shapes=sample_shapes(net))
                    plan = plan_memory(param, context, state, fuse, backward=False)
                    plan.bind(net, plan.new_arena(backend))
                yield net
            finally:
                net.close()
    finally:
        backend.close()


def net_and_state(args: argparse.Namespace, phase: int) -> tuple[NetParameter, NetState]:
    """The net of --model as read, and the state that --level and --stage choose."""
    from caffepy.config.filter import net_state
    from caffepy.config.load import read_net
    from caffepy.proto.caffe_pb2 import NetState

    param = read_net(args.model)
    return param, net_state(phase, param.state, NetState(level=args.level, stage=args.stage))


def refuse_net_without_layers(path: Path, param: NetParameter, state: NetState) -> None:
    """Check that include and exclude rules leave layers.

    Raises:
        ConfigError: they leave none.
    """
    from caffepy.config.filter import filter_net
    from caffepy.proto.caffe_pb2 import Phase

    if not filter_net(param, state).layer:
        raise ConfigError(
            f"{path}: the net has no layers in the {Phase.Name(state.phase)} phase; look at its include rules: they "
            "may ask for another phase, --level or --stage"
        )


def load_weights(net: Net, files: list[Path]) -> None:
    """Copy the weights of .caffemodel files into the net, the later ones over the earlier.

    Raises:
        SnapshotError: a file is none, or does not fit the net.
    """
    from caffepy.snapshot.caffemodel import read_caffemodel

    for path in files:
        net.copy_trained_layers_from(read_caffemodel(path), str(path))
