"""Forward passes of a net that is only tested: folded and captured once for the present shapes, then replayed.

On the CPU the calls of kernels are recorded instead of captured, and made again without Python between layers.
Solvers' tests, `caffepy test` and `caffepy.load` run their nets by it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np

from caffepy.backend import Array
from caffepy.backend.handles import DeviceScalars
from caffepy.blob import Blob
from caffepy.errors import DataError, RunError
from caffepy.layers.core.base import Layer
from caffepy.net.capture import CAPTURE_ATTEMPTS, GraphSegments, Segment
from caffepy.net.fusion.fused import FusedLayer
from caffepy.net.net import Net
from caffepy.net.wiring import Node, capture_blockers

log = logging.getLogger(__name__)

MAX_MOVES = 3
"""Passes in which tops may move before all later ones run layer by layer."""


class ForwardRunner:
    """Runs a net forward.

    Call `parameters_changed` whenever parameters have got other values.

    Args:
        net: of the TEST phase.
        eager: never capture.
        lazily: capture in the second pass; else only `capture` does.
    """

    def __init__(self, net: Net, eager: bool = False, lazily: bool = True) -> None:
        self.net = net
        self._lazily = lazily
        self._stale = True
        captures = net.backend.captures and not eager and not net.debug_info
        self._attempts_left = CAPTURE_ATTEMPTS if captures else 0
        self._warm = False
        self._segments = GraphSegments(net.backend, [])
        self._random: DeviceScalars | None = None
        recorded = can_record(net) and not eager and not net.debug_info
        self._recorded = RecordedPass(net) if recorded else None
        self.arena: Array | None = None
        """The memory of the net's blobs, which between passes holds nothing, where whoever made the runner says so."""

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
            if self._recorded is None or observed or not self._warm:
                self.net.forward()
            else:
                self._recorded.run()
        finally:  # for whoever runs the net without this object
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
        leaving = net.parameters.may_leave(blob for blob in weights if blob not in read)
        self._refresh()
        for blob in leaving:
            blob.offload_to_host()

    def _refresh(self) -> None:
        if self._stale:
            self.net.prepare()
            self._stale = False
            if self._recorded is not None:
                self._recorded.drop()

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
            for node, blocker in zip(net.schedule, capture_blockers(net.schedule), strict=True)
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
        if passes.draws:
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
        self._segments.run()
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
        if self._recorded is not None:
            self._recorded.drop()
        self._warm = False
        self._random = None

    def close(self) -> None:
        """Free the graphs and close the net. Callable twice."""
        self.drop()
        self.net.close()


def can_record(net: Net) -> bool:
    """Whether passes can be recorded: the device can do that, and all inputs are written to arrays that stay."""
    given = all(node.layer.type == "Input" for node in net.schedule if not node.bottoms)
    return given and net.backend.records and not net.backend.captures


def is_recorded(node: Node) -> bool:
    """Whether the layer, or each of those that were made one, is recordable and leaves no later pass anything."""
    layers = node.layer.members if isinstance(node.layer, FusedLayer) else [node.layer]
    return all(layer.recordable and not layer.running_statistics() for layer in layers)


class RecordedPass:
    """A forward pass that is recorded the second time.

    The first time each layer that may be recorded is tried (`RecordingTrial`): one whose kernel calls, made again, give
    other numbers than the layer itself is called in each pass. That is tried again where shapes change: other kernels
    run then. A layer that gives its top other memory in later passes ends a pass that was recorded: the layers behind
    it were recorded for the old.

    Args:
        net: as `can_record` wants it; it has run once before.
    """

    def __init__(self, net: Net) -> None:
        self._net = net
        self._calls: list[Callable[[], None]] = []
        self._tried: list[bool] = []
        self._tops: dict[int, list[Array]] = {}
        self._moved: int | None = None
        self._moves = 0
        noting = [node for node in net.schedule if is_recorded(node) and not isinstance(node.layer, FusedLayer)]
        self._checked = [n for n in noting if type(n.layer).raise_device_errors is not Layer.raise_device_errors]

    def run(self) -> None:
        """One pass."""
        if not self._tried or self._net.shapes_changed():
            self._try()
        elif not self._calls:
            self._record()
        else:
            self._replay()
        self._raise_device_errors()
        self._net.context.passes.number += 1

    def _raise_device_errors(self) -> None:
        """What kernels noted that were called without their layer."""
        for node in self._checked:
            node.layer.raise_device_errors()

    def drop(self) -> None:
        """Let the next pass be recorded."""
        self._calls = []

    def _try(self) -> None:
        self.drop()
        self._tried = [self._try_node(node) for node in self._net.schedule]

    def _try_node(self, node: Node) -> bool:
        """Run a node; whether it may be recorded."""
        if not (is_recorded(node) and node.bottoms):
            self._net.forward_node(node)
            return is_recorded(node)
        fits = RecordingTrial(self._net, node).run()
        if not fits:
            log.warning(
                "layer '%s' (%s) does not compute by kernels alone, and is called in each pass: this is a mistake in "
                "caffepy that costs time, not in the net: please report it with the net's prototxt",
                node.layer.name, node.layer.type,
            )  # fmt: skip
        return fits

    def _replay(self) -> None:
        for call in self._calls:
            call()
            if self._moved is not None:
                self._finish(self._moved)
                return

    def _finish(self, moved: int) -> None:
        """Run the nodes behind the one whose tops moved."""
        self._moves, self._moved = self._moves + 1, None
        self.drop()
        for node in self._net.schedule[moved + 1 :]:
            self._net.forward_node(node)

    def _record(self) -> None:
        net = self._net
        self._tops.clear()
        works = [partial(self._forward, index) for index in range(len(net.schedule))]
        for recorded, group in groupby(enumerate(works), key=lambda pair: self._tried[pair[0]]):
            calls = [work for _, work in group]
            if recorded and self._moves < MAX_MOVES:
                with deferring_errors(net.schedule):
                    self._calls += net.backend.record(calls)
            else:
                for call in calls:
                    call()
                self._calls += calls
        net.backend.trim()  # what compiling, trials and folding took

    def _forward(self, index: int) -> None:
        """Run a node, and see whether its tops are where they were when the pass was recorded."""
        node = self._net.schedule[index]
        self._net.forward_node(node)
        tops = [top.data for top in node.tops]
        before = self._tops.setdefault(index, tops)
        if have_moved(tops, before) and self._moves < MAX_MOVES:
            self._moved = index


@contextmanager
def deferring_errors(nodes: Sequence[Node]) -> Iterator[None]:
    """Leave errors that kernels note for later: to look for them is host work."""
    for node in nodes:
        node.defers_device_errors = True
    try:
        yield
    finally:
        for node in nodes:
            node.defers_device_errors = False


def have_moved(arrays: Sequence[Array], before: Sequence[Array]) -> bool:
    """Whether any of the host arrays is other memory than before; a new view of the same is not."""

    def memory(array: Array) -> tuple[Any, ...]:
        return array.ctypes.data, array.shape, array.strides

    return any(new is not old and memory(new) != memory(old) for new, old in zip(arrays, before, strict=True))


class RecordingTrial:
    """A node's pass, and whether its kernel calls alone, made again on other numbers, give what the layer gives.

    They do not where host arrays that are made or filled in each pass take part: their kernels would read old numbers.
    Tried where it costs two more runs of each layer once; a check in each pass would cost what recording saves.

    Args:
        net: whose node it is.
        node: with bottoms whose numbers may be any.
    """

    def __init__(self, net: Net, node: Node) -> None:
        self._net = net
        self._node = node

    def run(self) -> bool:
        """Run the node on the numbers that its bottoms have; whether it may be recorded."""
        net, node = self._net, self._node
        given = [bottom.host_data() for bottom in node.bottoms]
        work = partial(net.forward_node, node)
        with deferring_errors([node]):
            calls = net.backend.record([work])
        node.layer.raise_device_errors()  # before other numbers are taken for indices
        if calls == [work]:
            return True  # the backend knows that it is not kernels alone
        tops, results = [top.data for top in node.tops], [top.host_data() for top in node.tops]
        with deferring_errors([node]):
            self._run(calls)
            found = [top.host_data() for top in node.tops]
            self._run([work])
        moved = have_moved([top.data for top in node.tops], tops)
        alike = all(same_numbers(one, top.data) for one, top in zip(found, node.tops, strict=True))
        self._write(node.bottoms, given)
        self._write(node.tops, results)
        with suppress(DataError):
            node.layer.raise_device_errors()  # which forgets what was wrong with those
        return alike and not moved

    def _run(self, calls: list[Callable[[], None]]) -> None:
        """Make the calls with other numbers in the bottoms."""
        self._write(self._node.bottoms, (np.resize(_OTHERS, bottom.shape) for bottom in self._node.bottoms))
        for call in calls:
            call()

    def _write(self, blobs: Sequence[Blob], values: Iterable[Any]) -> None:
        for blob, numbers in zip(blobs, values, strict=True):
            self._net.backend.from_host(numbers, blob.data)


def same_numbers(one: Any, other: Any) -> bool:
    """Whether two host arrays are equal, NaN where the other is; np.array_equal would copy what is no NaN."""
    same = one.shape == other.shape and (one == other) | (np.isnan(one) & np.isnan(other))
    return bool(np.all(same))


_OTHERS = np.random.default_rng(4099).uniform(-1.5, 1.5, 4099).astype(np.float32)
"""What bottoms are filled with, over and over."""
