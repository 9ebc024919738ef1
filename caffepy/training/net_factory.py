"""Makes a solver's train net and test nets from the fields that name them (Caffe's InitTrainNet and InitTestNets)."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from caffepy.errors import CaffepyError, ConfigError, OutOfMemoryError
from caffepy.formats.dialect import Dialect, choose_dialect
from caffepy.formats.load import filter_net, net_state, read_net
from caffepy.formats.paths import PathResolver
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.layer import LayerContext, PassCounter
from caffepy.layers.python import PythonLayer
from caffepy.logs.trace import NO_TRACE, Tracer
from caffepy.net import Net
from caffepy.net.executor import ForwardExecutor, prepare_inference
from caffepy.net.memory_plan import (
    MemoryPlan,
    largest_batch,
    plan_memory,
    read_sample_shapes,
    sample_shapes,
    written_batch,
)
from caffepy.net.parameters import bucket_count
from caffepy.utils.files import working_folder

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
        context: what its nets share: device, shard, timeout; it finds the files that the solver names.
        fuse: compute groups of layers as one.
        share: whether `share_memory` will be called.
    """

    def __init__(
        self, param: caffe_pb2.SolverParameter, context: LayerContext, fuse: bool = False, share: bool = False
    ) -> None:
        self.param = param
        self.context = context
        self.fuse = fuse
        self.share = share
        self._dialect: Dialect | None = None
        self._made: list[tuple[Net, caffe_pb2.NetParameter, caffe_pb2.NetState]] = []

    def train_net(self, trace: Tracer = NO_TRACE) -> Net:
        """The net to train; `trace` takes the times of its layers.

        Raises:
            ConfigError: none is named, or more than one; it has no layers; its `reduce_buckets` is negative.
        """
        source, state = self._train_source()
        bucket_count(source.param)
        log.log(self._level, "Creating training net from %s", source.field)
        net = Net(source.param, self._context(source, state, 1), state, self.fuse, trace)
        self._made.append((net, source.param, state))
        if not net.nodes:
            raise ConfigError(
                f"solver: {source.field}: the net has no layers in the TRAIN phase; look at its include rules and at "
                "the solver's train_state"
            )
        if not any(node.need_backward and any(node.layer.propagate_to_params) for node in net.nodes):
            level = logging.WARNING if self._level >= logging.INFO else self._level
            log.log(level, "nothing is learned: no loss depends on a parameter whose lr_mult is not 0")
        return net

    def train_setup(self) -> tuple[caffe_pb2.NetParameter, LayerContext, caffe_pb2.NetState]:
        """What `train_net` makes its net of, for planning it.

        Raises:
            ConfigError: none is named, or more than one.
        """
        source, state = self._train_source()
        return source.param, self._context(source, state, 1), state

    def test_setups(self) -> list[tuple[caffe_pb2.NetParameter, LayerContext, caffe_pb2.NetState]]:
        """What `test_nets` makes its nets of.

        Raises:
            ConfigError: the numbers of test nets, test_iter and test_state do not agree.
        """
        setups = []
        for i, source in enumerate(self._test_sources()):
            state = self._test_state(source, i)
            setups.append((source.param, self._context(source, state, self.param.test_iter[i]), state))
        return setups

    def _train_source(self) -> tuple[NetSource, caffe_pb2.NetState]:
        fields = ("train_net_param", "train_net", "net_param", "net")
        given = [field for field in fields if self.param.HasField(field)]
        if len(given) != 1:
            raise ConfigError(
                f"solver: needs exactly one of {', '.join(fields)}; {' and '.join(given) or 'none'} is given"
            )
        source = self._sources(fields)[0]
        if self._dialect is None:
            self._dialect = choose_dialect([self.param, source.param], lambda *line: log.log(self._level, *line))
        return source, net_state(caffe_pb2.TRAIN, source.param.state, self.param.train_state)

    def test_executors(self, train_net: Net, eager: bool = False, lazily: bool = True) -> list[ForwardExecutor]:
        """The nets to test with, in Caffe's order; their layers use the train net's parameters.

        Args:
            train_net: the net that is trained.
            eager: as `ForwardExecutor` takes it; so is `lazily`.

        Raises:
            ConfigError: the numbers of test nets, test_iter and test_state do not agree.
        """
        sources = self._test_sources()
        executors = []
        for i, source in enumerate(sources):
            log.log(self._level, "Creating test net (#%d) specified by %s", i, source.field)
            state, param = self._test_state(source, i), caffe_pb2.NetParameter()
            param.CopyFrom(source.param)
            param.debug_info = self.param.debug_info
            context = self._context(source, state, self.param.test_iter[i])
            executor = prepare_inference(
                param, context, state, shared_with=train_net, fuse=self.fuse, share=False, eager=eager, lazily=lazily
            )
            self._made.append((executor.net, param, state))
            executors.append(executor)
        return executors

    def _test_state(self, source: NetSource, index: int) -> caffe_pb2.NetState:
        overrides = [self.param.test_state[index]] if self.param.test_state else []
        return net_state(caffe_pb2.TEST, source.param.state, *overrides)

    def spare_programs(self) -> None:
        """Share nothing on a CPU where layers are users' classes: a plan would make their objects a second time."""
        users = any(isinstance(layer, PythonLayer) for net, _, _ in self._made for layer in net.layers)
        if users and not self.context.backend.captures:
            self.share = False

    def share_memory(self) -> MemoryPlan:
        """Let all nets that were made keep their blobs in one arena, train and test nets at different times.

        Returns:
            The first net's plan.

        Raises:
            OutOfMemoryError: there is no memory for the arena.
        """
        plans = []
        for net, param, state in self._made:
            context = replace(net.context, sample_shapes=sample_shapes(net))
            plans.append(plan_memory(param, context, state, self.fuse))
        largest = max(plans, key=lambda plan: plan.arena)
        arena = largest.new_arena(self.context.backend)
        for plan, (net, _, _) in zip(plans, self._made, strict=True):
            plan.bind(net, arena)
        return plans[0]

    @property
    def _level(self) -> int:
        return logging.INFO if self.context.shard.rank == 0 else logging.DEBUG

    def _sources(self, fields: tuple[str, ...]) -> list[NetSource]:
        return [self._source(field, getattr(self.param, field)) for field in fields if self.param.HasField(field)]

    def _source(self, field: str, value: str | caffe_pb2.NetParameter) -> NetSource:
        if isinstance(value, str):
            path = self.context.resolve(value)
            if not os.path.exists(path):
                raise ConfigError(
                    f"solver: {field}: '{value}' does not exist (looked from {working_folder()} and beside the solver)"
                )
            return NetSource(read_net(path), f"{field} file: {path}", PathResolver(path))
        return NetSource(value, field, self.context.resolve)

    def _test_sources(self) -> list[NetSource]:
        param = self.param
        own = [self._source("test_net_param", p) for p in param.test_net_param]
        own += [self._source("test_net", p) for p in param.test_net]
        generic = self._sources(("net_param", "net"))
        missing = len(param.test_iter) - len(own)
        if missing < 0 or (missing > 0 and not generic):
            raise ConfigError(
                f"solver: {len(param.test_iter)} test_iter are given for {len(own)} test nets; give one for each"
            )
        if param.test_state and len(param.test_state) != len(param.test_iter):
            raise ConfigError(
                f"solver: {len(param.test_state)} test_state are given for {len(param.test_iter)} test nets; "
                "give none, or one for each"
            )
        return own + generic * missing

    def _context(self, source: NetSource, state: caffe_pb2.NetState, test_iter: int) -> LayerContext:
        return replace(
            self.context,
            phase=state.phase,
            seed=self.param.random_seed,
            passes=PassCounter(),
            test_iter=test_iter,
            iter_size=self.param.iter_size,
            max_iter=self.param.max_iter,
            resolve=source.resolve,
            dialect=self._dialect,
            net_number=len(self._made),
        )


@contextmanager
def suggest_batch_size_on_oom(factory: NetFactory, histories: int) -> Iterator[None]:
    """Let an out-of-memory error within a `with` block say which batch would fit.

    Args:
        factory: makes the nets of the solver that is built or run in the block.
        histories: values that the solver keeps for each parameter.

    Raises:
        OutOfMemoryError: with that advice.
    """
    try:
        yield
    except OutOfMemoryError as error:
        advice = _advice(factory, histories, error.available)
        raise error.advising(advice) if advice else error from error.__cause__


def _advice(factory: NetFactory, histories: int, available: int | None) -> str:
    """What to do; empty where nothing better than the error itself can be said."""
    if available is None:
        return ""
    try:
        param, context, state = factory.train_setup()
        written = written_batch(filter_net(param, state))
        if not written:
            return ""
        context = replace(context, sample_shapes=read_sample_shapes(param, context, state))
        batch_size = largest_batch(param, context, state, factory.fuse, factory.share, histories, available, written)
    except CaffepyError as error:  # the failure itself matters more
        log.debug("the largest batch that fits cannot be told: %s", error)
        return ""
    if not batch_size:
        return "not even batch_size 1 fits; use another GPU, or FLOAT16 (default_forward_type, default_backward_type)"
    return (
        f"the largest batch_size that fits is {batch_size} instead of {written}; iter_size makes up for smaller batches"
    )
