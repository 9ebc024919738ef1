"""Nets that are only tested: how one is prepared, and its forward passes, captured once for the present shapes.

Solvers' tests, `caffepy test`, `caffepy.load` and pycaffe run their nets by it; `ShapeRunners` has one for each of the
last few shapes of the inputs.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from caffepy.backend import Array
from caffepy.backend.handles import DeviceScalars
from caffepy.errors import ConfigError, RunError, ShapeError
from caffepy.layers.core.base import Layer, LayerContext, PassCounter
from caffepy.net.capture import CAPTURE_ATTEMPTS, GraphSegments, Segment
from caffepy.net.fuse import FusedLayer
from caffepy.net.memory_plan import plan_memory, sample_shapes
from caffepy.net.net import Net
from caffepy.net.wiring import capture_blockers
from caffepy.proto import caffe_pb2
from caffepy.snapshot.caffemodel import TrainedLayers

log = logging.getLogger(__name__)


def prepare_inference(  # noqa: PLR0913 -- each caller needs some of them
    param: caffe_pb2.NetParameter,
    context: LayerContext,
    state: caffe_pb2.NetState | None = None,
    *,
    weights: Iterable[tuple[TrainedLayers, str]] = (),
    shared_with: Net | None = None,
    fuse: bool = True,
    share: bool = True,
    eager: bool = False,
    lazily: bool = True,
) -> ForwardRunner:
    """A net of the TEST phase, folded, with planned memory, that runs forward as graphs.

    On a GPU the weights that only folding reads leave the device before memory is taken for the blobs; those of
    `shared_with` leave it too, unless that net trains.

    Args:
        param: the net as read.
        context: of the TEST phase.
        state: as `Net` takes it.
        weights: what the parameters are copied from, in turn: (message, where it is from).
        shared_with: a net whose parameters are used.
        fuse: fold layers; the blobs between them are then not filled.
        share: let blobs that are never needed at the same time have the same memory.
        eager: never capture.
        lazily: as `ForwardRunner` takes it.

    Raises:
        ConfigError: layers, blobs or parameters do not fit together, or those of `shared_with` are others.
        ShapeError: shapes do not fit.
        SnapshotError: weights do not fit.
        OutOfMemoryError: there is no memory for the blobs.
    """
    net = Net(param, context, state, fuse)
    try:
        for layers, origin in weights:
            net.copy_trained_layers_from(layers, origin)
        offloads = net.backend.captures and (shared_with is None or shared_with.phase == caffe_pb2.TEST)
        if shared_with is not None:
            net.share_trained_layers_with(shared_with, follow=offloads)
        runner = ForwardRunner(net, eager, lazily)
        if offloads:
            runner.offload_to_host()
        if share:
            runner.share_memory(param, state, fuse)
        return runner
    except BaseException:
        net.close()
        raise


class ForwardRunner:
    """Runs a net forward: the first pass layer by layer, those behind it as graphs.

    On a CPU only nets whose inputs are given are captured, as far as their layers are `recordable`. Call
    `parameters_changed` whenever parameters have got other values.

    Args:
        net: of the TEST phase.
        eager: never capture.
        lazily: capture in the second pass; else only `capture` does.
    """

    def __init__(self, net: Net, eager: bool = False, lazily: bool = True) -> None:
        self.net = net
        self._lazily = lazily
        self._stale = True
        captures = _can_capture(net) and not eager and not net.debug_info
        self._attempts_left = CAPTURE_ATTEMPTS if captures else 0
        self._warm = False
        self._segments = GraphSegments(net.backend, [])
        self._random: DeviceScalars | None = None
        self.arena: Array | None = None
        """The memory that the blobs share, if `share_memory` was called; between passes nothing in it is needed."""

    @property
    def wanted(self) -> bool:
        """Whether passes are to be graphs: they can be as far as is known, and are asked for."""
        return self._attempts_left > 0

    @property
    def captured(self) -> bool:
        """Whether there are graphs of a pass."""
        return self._segments.captured

    def parameters_changed(self) -> None:
        """Let the next pass take the parameters' present values."""
        self._stale = True

    def forward(self) -> None:
        """One pass: eagerly the first time and after the data changed their shape, from then on as graphs."""
        self._refresh()
        observed = self.net.before_forward or self.net.after_forward  # by callbacks, which graphs do not call
        if self._lazily and not observed:
            self.capture()
        if self.captured and not observed and self._replay():
            return
        copying, self.net.folds_parameters = self.net.keeps_copies, False
        self.net.keeps_copies = False
        self.net.context.forward_only = True
        try:
            self.net.forward()
        finally:  # for callers that run the net without this object
            self.net.folds_parameters, self.net.keeps_copies = True, copying
            self.net.context.forward_only = False
        self._warm = True

    def offload_to_host(self) -> None:
        """Take the parameters' present values, and move to host memory the weights that passes do not read.

        Those were folded, or have copies in the dtype in which they are read. Only unflattened parameters move;
        biases and statistics are not worth the time. What a pass reads after all comes back in the first one.
        """
        net = self.net
        read = {b.source for layer in net.unfolded_layers() if layer.dtype == "float32" for b in layer.blobs}
        weights = dict.fromkeys(blob.source for layer in net.layers for blob in layer.blobs if len(blob.shape) > 1)
        leaving = net.parameters.offloadable(blob for blob in weights if blob not in read)
        self._refresh()
        for blob in leaving:
            blob.offload_to_host()

    def share_memory(self, param: caffe_pb2.NetParameter, state: caffe_pb2.NetState | None, fuse: bool) -> None:
        """Let blobs that are never needed at the same time have the same memory. Call before the first pass.

        Args:
            param: what the net was made of; so were `state` and `fuse`.

        Raises:
            OutOfMemoryError: there is no memory for the blobs.
        """
        net = self.net
        context = replace(net.context, passes=PassCounter(), sample_shapes=sample_shapes(net))
        plan = plan_memory(param, context, state, fuse, backward=False)
        self.arena = plan.new_arena(net.backend)
        plan.bind(net, self.arena)

    def _refresh(self) -> None:
        if self._stale:
            self.net.prepare()
            self._stale = False

    def capture(self) -> bool:
        """Make graphs of a pass like the last one, which ran eagerly; whether there are any now.

        Memory is allocated, which can wait for the work of other devices of the process: where these run at the same
        time, let all of them capture before one of them launches a collective.
        """
        if self.captured or not (self.wanted and self._warm):
            return self.captured
        net = self.net
        net.backend.trim()  # what tuning and compiling the first pass took
        segments = [
            Segment(node.layer.name, partial(net.forward_node, node), blocker)
            for node, blocker in zip(net.schedule, _blockers(net), strict=True)
        ]
        self._segments = GraphSegments(net.backend, segments)
        try:
            with self._capturing():
                self._segments.capture()
            self._attempts_left = CAPTURE_ATTEMPTS
        except RunError as error:
            self._not_captured(error)
        except BaseException:
            self.drop()  # the graphs of some segments only
            raise
        return self.captured

    def _not_captured(self, error: RunError) -> None:
        self.drop()
        self._attempts_left -= 1
        if not self.wanted:
            log.info("Passes of net '%s' are not captured into graphs: %s", self.net.name, error)

    @contextmanager
    def _capturing(self) -> Iterator[None]:
        """Let layers read the number of the pass from the device's memory, where it is another in each replay."""
        self.net.context.forward_only = True
        passes = self.net.context.passes
        if passes.uses_random:
            self._random = self.net.backend.device_scalars(1, 1)
            self._send_counter(self._random)
            passes.on_device = self._random.counters[0]
        try:
            yield
        finally:
            passes.on_device = None
            self.net.context.forward_only = False

    def stop_capturing(self) -> None:
        """Run eagerly from now on."""
        self._attempts_left = 0
        self.drop()

    def _replay(self) -> bool:
        """Launch the graphs; False where the data have another shape, and there are no graphs any more."""
        net = self.net
        number = net.context.passes.number
        net.prefetch_to_device(number)
        if net.shapes_changed():
            self.drop()
            return False
        if self._random is not None:
            self._send_counter(self._random)
        net.context.forward_only = True
        try:
            self._segments.run()
        finally:
            net.context.forward_only = False
        if not net.backend.asynchronous:
            net.raise_device_errors()
        net.release_batch(number)
        net.context.passes.number += 1
        return True

    def _send_counter(self, scalars: DeviceScalars) -> None:
        context = self.net.context
        number = context.passes.number
        scalars.send([0.0], [(number, context.first_sample(number) if context.first_sample else 0)])

    def drop(self) -> None:
        """Free the graphs."""
        self._segments.drop()
        self._warm = False
        self._random = None

    def close(self) -> None:
        """Free the graphs and close the net. Callable twice."""
        self.drop()
        self.net.close()


def _can_capture(net: Net) -> bool:
    """Whether passes can be captured: on a CPU, whose data layers make new arrays, if all inputs are given."""
    given = all(node.layer.type == "Input" for node in net.schedule if not node.bottoms)
    return net.backend.captures or (net.backend.captures_inference and given)


def _blockers(net: Net) -> list[str | None]:
    """For each node of the schedule why it cannot be captured; None if it can."""
    blockers = capture_blockers(net.schedule)
    if net.backend.captures:
        return blockers
    recordable = [_is_recordable(node.layer) for node in net.schedule]
    return [b if known else "it does not run by kernels alone" for b, known in zip(blockers, recordable, strict=True)]


def _is_recordable(layer: Layer) -> bool:
    """Whether the layer, or each of those that were made one, is recordable and leaves no later pass anything."""
    layers = layer.members if isinstance(layer, FusedLayer) else [layer]
    return all(each.recordable and not each.running_statistics() for each in layers)


MAX_SHAPES = 4
"""Shapes of the inputs whose nets, with memory and graphs, are kept at the same time."""

Shapes = tuple[tuple[int, ...], ...]


class ShapeRunners:
    """Runners of nets that use the parameters of `net`.

    Args:
        net: of the TEST phase, with Input layers, as the prototxt has it.
        param: what it was made of, as read.
        state: with which its layers were chosen; None: as `Net` chooses them.
        eager: never capture CUDA graphs.
    """

    def __init__(
        self, net: Net, param: caffe_pb2.NetParameter, state: caffe_pb2.NetState | None = None, eager: bool = False
    ) -> None:
        self._net = net
        self._param = param
        self._state = state
        self._eager = eager
        self._written = {name: net.blobs[name].shape for name in net.inputs}
        self.kept: OrderedDict[Shapes, ForwardRunner] = OrderedDict()
        """By the inputs' shapes, the one used last at the end."""
        self._last: ForwardRunner | None = None

    def runner(self, shapes: Shapes) -> ForwardRunner:
        """The runner for these shapes of the inputs, in the net's order.

        Raises:
            ShapeError: the net has no parameters for them, or layers cannot take them.
        """
        runner = self.kept.get(shapes)
        if runner is None:
            runner = self._make(shapes)
            if len(self.kept) >= MAX_SHAPES:
                self.kept.popitem(last=False)[1].close()
            self.kept[shapes] = runner
        self.kept.move_to_end(shapes)
        if self._last is not runner:
            if self._last is not None:
                _hand_on_states(self._last.net, runner.net)
            self._last = runner
        return runner

    def parameters_changed(self) -> None:
        """Let all runners take the parameters' present values in their next passes."""
        for runner in self.kept.values():
            runner.parameters_changed()

    def close(self) -> None:
        """Free the device's memory. Idempotent."""
        for runner in self.kept.values():
            runner.close()
        self.kept.clear()
        self._last = None

    def _make(self, shapes: Shapes) -> ForwardRunner:
        context = replace(self._net.context, passes=PassCounter(), run_fillers=False)
        param = self._with_shapes(shapes)
        try:
            return prepare_inference(param, context, self._state, shared_with=self._net, eager=self._eager)
        except ConfigError as error:
            given = ", ".join(f"{name} {shape_text(s)}" for name, s in zip(self._written, shapes, strict=True))
            raise ShapeError(f"net '{param.name}' has no parameters for inputs of shape {given}: {error}") from error

    def _with_shapes(self, shapes: Shapes) -> caffe_pb2.NetParameter:
        """The net with other shapes of its inputs; Input layers of other phases and stages are left as they are."""
        wanted = dict(zip(self._written, shapes, strict=True))
        param = caffe_pb2.NetParameter()
        param.CopyFrom(self._param)
        for layer in param.layer:
            if layer.type == "Input" and all(top in wanted for top in layer.top):
                del layer.input_param.shape[:]
                for top in layer.top:
                    layer.input_param.shape.add(dim=wanted[top])
        return param


def _hand_on_states(source: Net, target: Net) -> None:
    """Give a net the states that another one's last pass left to the next pass; 0 where their shapes differ."""
    for old, new in zip(source.state(), target.state(), strict=True):
        if tuple(old.shape) == tuple(new.shape):
            target.backend.copy(old, new)
        else:
            target.backend.fill(new, 0)


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape as messages show it: ``2 x 3 x 6 x 6``."""
    return " x ".join(map(str, shape))
