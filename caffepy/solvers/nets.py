"""Makes a solver's train net and test nets from the fields that name them (Caffe's InitTrainNet and InitTestNets)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from caffepy.backend.base import Backend
from caffepy.config.filter import net_state
from caffepy.config.load import read_net
from caffepy.config.paths import PathResolver
from caffepy.data.schedule import Shard
from caffepy.errors import ConfigError
from caffepy.layers.base import LayerContext
from caffepy.net import Net
from caffepy.proto import caffe_pb2

log = logging.getLogger(__name__)

Resolve = Callable[[str], Path]


@dataclass
class NetSource:
    """A net that a solver names.

    Args:
        param: the net as read.
        field: where it was named, for the log.
        resolve: finds the files that it names.
    """

    param: caffe_pb2.NetParameter
    field: str
    resolve: Resolve


class NetFactory:
    """Makes the nets of one solver on one device.

    Args:
        param: the solver.
        backend: the device.
        shard: its place among all devices.
        resolve: finds the files that the solver names.
        fuse: compute groups of layers as one.
    """

    def __init__(
        self,
        param: caffe_pb2.SolverParameter,
        backend: Backend,
        shard: Shard,
        resolve: Resolve,
        fuse: bool = False,
    ) -> None:
        self.param = param
        self.backend = backend
        self.shard = shard
        self.resolve = resolve
        self.fuse = fuse

    def train_net(self) -> Net:
        """The net to train.

        Raises:
            ConfigError: none is named, or more than one.
        """
        fields = ("train_net_param", "train_net", "net_param", "net")
        given = [field for field in fields if self.param.HasField(field)]
        if len(given) != 1:
            raise ConfigError(
                f"solver: needs exactly one of {', '.join(fields)}; {' and '.join(given) or 'none'} is given"
            )
        source = self._sources(fields)[0]
        log.log(self._level, "Creating training net from %s", source.field)
        state = net_state(caffe_pb2.TRAIN, source.param.state, self.param.train_state)
        return self._build(source, state, 1)

    def test_nets(self, train_net: Net) -> list[Net]:
        """The nets to test with, in Caffe's order; their layers use the train net's parameters.

        Raises:
            ConfigError: the numbers of test nets, test_iter and test_state do not agree.
        """
        sources = self._test_sources()
        nets = []
        for i, source in enumerate(sources):
            log.log(self._level, "Creating test net (#%d) specified by %s", i, source.field)
            overrides = [self.param.test_state[i]] if self.param.test_state else []
            state = net_state(caffe_pb2.TEST, source.param.state, *overrides)
            net = self._build(source, state, self.param.test_iter[i])
            net.debug_info = self.param.debug_info
            net.share_trained_layers_with(train_net)
            nets.append(net)
        return nets

    @property
    def _level(self) -> int:
        return logging.INFO if self.shard.rank == 0 else logging.DEBUG

    def _sources(self, fields: tuple[str, ...]) -> list[NetSource]:
        return [self._source(field, getattr(self.param, field)) for field in fields if self.param.HasField(field)]

    def _source(self, field: str, value: str | caffe_pb2.NetParameter) -> NetSource:
        if isinstance(value, str):
            path = self.resolve(value)
            return NetSource(read_net(path), f"{field} file: {path}", PathResolver(path))
        return NetSource(value, field, self.resolve)

    def _test_sources(self) -> list[NetSource]:
        param = self.param
        own = [self._source("test_net_param", p) for p in param.test_net_param]
        own += [self._source("test_net", p) for p in param.test_net]
        generic = self._sources(("net_param", "net"))
        left = len(param.test_iter) - len(own)
        if left < 0 or (left > 0 and not generic):
            raise ConfigError(
                f"solver: {len(param.test_iter)} test_iter are given for {len(own)} test nets; give one for each"
            )
        if param.test_state and len(param.test_state) != len(param.test_iter):
            raise ConfigError(
                f"solver: {len(param.test_state)} test_state are given for {len(param.test_iter)} test nets; "
                "give none, or one for each"
            )
        return own + generic * left

    def _build(self, source: NetSource, state: caffe_pb2.NetState, test_iter: int) -> Net:
        context = LayerContext(
            self.backend,
            phase=state.phase,
            seed=self.param.random_seed,
            shard=self.shard,
            test_iter=test_iter,
            iter_size=self.param.iter_size,
            resolve=source.resolve,
        )
        return Net(source.param, context, state, self.fuse)
