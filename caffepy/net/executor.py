"""Inference nets: preparation, and forward passes that are captured in graphs for the current shapes.

Used by solvers' tests, `caffepy test`, `caffepy.load` and pycaffe. `ShapeExecutors` keeps an executor for each of the
most recent input shapes. Segments that cannot be captured run eagerly between the graphs; captured and eager runs call
the same functions.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

from caffepy.backend import Array, Backend
from caffepy.backend.types import DeviceScalars
from caffepy.errors import ConfigError, RunError, ShapeError
from caffepy.formats.caffemodel import TrainedLayers
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.layer import Layer, LayerContext, PassCounter
from caffepy.net.fused_layers import FusedLayer
from caffepy.net.graph import capture_blockers
from caffepy.net.memory_plan import plan_memory, sample_shapes
from caffepy.net.net import Net

log = logging.getLogger(__name__)

CAPTURE_ATTEMPTS = 2
"""Passes that run eagerly before capturing is given up.

The first pass also tunes kernels and allocates workspaces in another order and in other sizes than later passes. Memory
cannot be allocated during capture, so a second eager pass allocates the missing workspaces.
"""


@dataclass(frozen=True)
class Segment:
    """One call of the work to capture.

    Args:
        name: for messages.
        run: does the work on the backend's stream.
        blocker: why it cannot be captured; None if it can.
    """

    name: str
    run: Callable[[], None]
    blocker: str | None = None


class GraphSegments:
    """Segments that run in order, eagerly or as captured graphs.

    Args:
        backend: the segments run on its stream.
        segments: the work.
    """

    def __init__(self, backend: Backend, segments: Sequence[Segment]) -> None:
        self._backend = backend
        self._segments = list(segments)
        self._calls: list[Callable[[], None]] = []

    @property
    def captured(self) -> bool:
        """Whether `run` replays graphs."""
        return bool(self._calls)

    def capture(self) -> None:
        """Capture the segments in graphs without running them. They must have run eagerly before."""
        self.drop()
        for captured, segments in groupby(self._segments, key=lambda segment: segment.blocker is None):
            group = list(segments)
            if captured:
                graph = self._backend.capture(*(segment.run for segment in group))
                self._calls.append(graph.launch)
            else:
                for segment in group:
                    log.debug("%s runs outside of the captured graphs: %s", segment.name, segment.blocker)
                self._calls += [segment.run for segment in group]

    def run(self) -> None:
        """Run all segments once."""
        if not self.captured:
            _run(self._segments)
            return
        for call in self._calls:
            call()

    def drop(self) -> None:
        """Free the graphs. Call before destroying communicators whose calls the graphs contain."""
        self._calls.clear()


def _run(segments: Sequence[Segment]) -> None:
    for segment in segments:
        segment.run()


def prepare_inference(
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
) -> ForwardExecutor:
    """Return an executor for a folded TEST net with planned memory.

    On a GPU, weights used only for folding are offloaded to the host before blobs are allocated, including the weights
    of `shared_with` unless that net trains.

    Args:
        param: the net as read.
        context: a context of the TEST phase.
        state: as `Net` takes it.
        weights: sources of the parameters, applied in order: (message, origin).
        shared_with: a net whose parameters this net uses.
        fuse: fold layers; the blobs between them are then not filled.
        share: let blobs that are never live at the same time share memory.
        eager: never capture.
        lazily: as `ForwardExecutor` takes it.

    Raises:
        ConfigError: layers, blobs or parameters do not fit together, or the parameters of `shared_with` differ.
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
        executor = ForwardExecutor(net, eager, lazily)
        if offloads:
            executor.offload_to_host()
        if share:
            executor.share_memory(param, state, fuse)
        return executor
    except BaseException:
        net.close()
        raise


class ForwardExecutor:
    """Runs a net forward: the first pass eagerly, later passes as captured graphs.

    On a CPU, only nets without data layers are captured, and only their `recordable` layers. Call `parameters_changed`
    after changing parameters.

    Args:
        net: of the TEST phase.
        eager: never capture.
        lazily: capture in the second pass; otherwise capture only in `capture`.
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
        """The arena of the blobs after `share_memory`. Its contents are not needed between passes."""

    @property
    def wanted(self) -> bool:
        """Whether capture is enabled and not known to be impossible."""
        return self._attempts_left > 0

    @property
    def captured(self) -> bool:
        """Whether a pass has been captured."""
        return self._segments.captured

    def parameters_changed(self) -> None:
        """Make the next pass use the parameters' current values."""
        self._stale = True

    def forward(self) -> None:
        """Run one pass: eagerly at first and after a shape change, otherwise as graphs."""
        self._refresh()
        observed = self.net.before_forward or self.net.after_forward  # graphs do not call the callbacks
        if self._lazily and not observed:
            self.capture()
        if self.captured and not observed and self._replay():
            return
        copying, self.net.folds_parameters = self.net.keeps_copies, False
        self.net.keeps_copies = False
        self.net.context.forward_only = True
        try:
            self.net.forward()
        finally:  # callers may also run the net directly
            self.net.folds_parameters, self.net.keeps_copies = True, copying
            self.net.context.forward_only = False
        self._warm = True

    def offload_to_host(self) -> None:
        """Fold the current parameters, then move weights that passes do not read to host memory.

        These weights are folded or have copies in another dtype. Only unflattened parameters move; biases and
        statistics are too small to be worth it. An offloaded parameter that a pass does read returns to the device in
        that pass.
        """
        net = self.net
        read = {b.source for layer in net.unfolded_layers() if layer.dtype == "float32" for b in layer.blobs}
        weights = dict.fromkeys(blob.source for layer in net.layers for blob in layer.blobs if len(blob.shape) > 1)
        leaving = net.parameters.offloadable(blob for blob in weights if blob not in read)
        self._refresh()
        for blob in leaving:
            blob.offload_to_host()

    def share_memory(self, param: caffe_pb2.NetParameter, state: caffe_pb2.NetState | None, fuse: bool) -> None:
        """Let blobs that are never live at the same time share memory. Call before the first pass.

        Args:
            param: the net's message; `param`, `state` and `fuse` must be those of the net's constructor.

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
        """Capture a pass with the shapes of the last eager pass; return whether capture succeeded.

        Capture allocates memory, which can wait for other devices of the process. If these run concurrently, let all of
            them capture before any launches a collective.
        """
        if self.captured or not (self.wanted and self._warm):
            return self.captured
        net = self.net
        net.backend.trim()  # memory of tuning and compilation
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
            self.drop()  # some segments may have been captured
            raise
        return self.captured

    def _not_captured(self, error: RunError) -> None:
        self.drop()
        self._attempts_left -= 1
        if not self.wanted:
            log.info("Passes of net '%s' are not captured into graphs: %s", self.net.name, error)

    @contextmanager
    def _capturing(self) -> Iterator[None]:
        """Make layers read the pass number from device memory, so that each replay can change it."""
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
        """Launch the graphs; if the shapes have changed, drop the graphs and return False."""
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
        """Free the graphs and close the net. Idempotent."""
        self.drop()
        self.net.close()


def _can_capture(net: Net) -> bool:
    """Return whether passes can be captured; not on a CPU with data layers, which allocate new arrays."""
    given = all(node.layer.type == "Input" for node in net.schedule if not node.bottoms)
    return net.backend.captures or (net.backend.captures_inference and given)


def _blockers(net: Net) -> list[str | None]:
    """Return for each node of the schedule why it cannot be captured, or None."""
    blockers = capture_blockers(net.schedule)
    if net.backend.captures:
        return blockers
    recordable = [_is_recordable(node.layer) for node in net.schedule]
    return [b if known else "it does not run by kernels alone" for b, known in zip(blockers, recordable, strict=True)]


def _is_recordable(layer: Layer) -> bool:
    """Return whether the layer (or each member of a fused layer) is recordable and has no state."""
    layers = layer.members if isinstance(layer, FusedLayer) else [layer]
    return all(each.recordable and not each.running_statistics() for each in layers)


@contextmanager
def preserve_running_stats(net: Net) -> Iterator[None]:
    """Restore the running statistics and states after a forward pass of the train net that is no part of training."""
    arrays = [*net.statistics(), *net.state()]
    saved = [net.backend.zeros(tuple(array.shape)) for array in arrays]
    for array, before in zip(arrays, saved, strict=True):
        net.backend.copy(array, before)
    yield
    for array, before in zip(arrays, saved, strict=True):
        net.backend.copy(before, array)


MAX_SHAPES = 4
"""The number of input shapes whose nets, memory and graphs are kept."""

Shapes = tuple[tuple[int, ...], ...]


class ShapeExecutors:
    """A cache of executors by input shape; their nets use the parameters of `net`.

    Args:
        net: an unfused TEST net with Input layers.
        param: its message as read.
        state: the NetState that selected its layers; None: as in `Net`.
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
        self.kept: OrderedDict[Shapes, ForwardExecutor] = OrderedDict()
        """By input shapes, the most recently used last."""
        self._last: ForwardExecutor | None = None

    def executor(self, shapes: Shapes) -> ForwardExecutor:
        """Return the executor for these input shapes, given in the net's order.

        Raises:
            ShapeError: the parameters or layers do not fit these shapes.
        """
        executor = self.kept.get(shapes)
        if executor is None:
            executor = self._make(shapes)
            if len(self.kept) >= MAX_SHAPES:
                self.kept.popitem(last=False)[1].close()
            self.kept[shapes] = executor
        self.kept.move_to_end(shapes)
        if self._last is not executor:
            if self._last is not None:
                _hand_on_states(self._last.net, executor.net)
            self._last = executor
        return executor

    def parameters_changed(self) -> None:
        """Make all executors use the parameters' current values in their next passes."""
        for executor in self.kept.values():
            executor.parameters_changed()

    def close(self) -> None:
        """Free the device's memory. Idempotent."""
        for executor in self.kept.values():
            executor.close()
        self.kept.clear()
        self._last = None

    def _make(self, shapes: Shapes) -> ForwardExecutor:
        context = replace(self._net.context, passes=PassCounter(), run_fillers=False)
        param = self._with_shapes(shapes)
        try:
            return prepare_inference(param, context, self._state, shared_with=self._net, eager=self._eager)
        except ConfigError as error:
            given = ", ".join(f"{name} {shape_text(s)}" for name, s in zip(self._written, shapes, strict=True))
            raise ShapeError(f"net '{param.name}' has no parameters for inputs of shape {given}: {error}") from error

    def _with_shapes(self, shapes: Shapes) -> caffe_pb2.NetParameter:
        """Return the net with these input shapes; Input layers of other phases and stages are unchanged."""
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
    """Copy recurrent state from one net to another; states of different shapes become 0."""
    for old, new in zip(source.state(), target.state(), strict=True):
        if tuple(old.shape) == tuple(new.shape):
            target.backend.copy(old, new)
        else:
            target.backend.fill(new, 0)


def shape_text(shape: tuple[int, ...]) -> str:
    """Format a shape for messages: ``2 x 3 x 6 x 6``."""
    return " x ".join(map(str, shape))
