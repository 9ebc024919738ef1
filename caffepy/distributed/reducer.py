"""Averages gradients over all devices: in one all-reduce after the backward pass, or in buckets that overlap with it.

Gradients lie in the order in which the backward pass finishes them, so a bucket is a slice, and the last layers' bucket
is complete while the first layers' gradients are still being computed (Li et al., VLDB 2020; NVIDIA Caffe's
`reduce_buckets`). `Reducer` owns the start of each bucket's all-reduce and the wait for it; `P2PSync` has one for its
solver. On a GPU all of this happens while an iteration is captured, and is repeated in every replay.

Communication is the time from the start of an iteration's first all-reduce to the end of its last; exposed time is the
part in which the device has nothing left to compute. Without overlap with the backward pass, both are about the same.
Waiting for stragglers counts as communication. That the device computes more slowly during an all-reduce is in neither.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from caffepy.backend import Backend
from caffepy.distributed.communicators.communicator import Communicator, PendingCollective
from caffepy.layers.layer import Layer
from caffepy.logs.trace import Tracer
from caffepy.net import Net
from caffepy.net.fused_layers import FusedLayer
from caffepy.net.graph import Node
from caffepy.net.parameters import Parameter, ParameterBuffer


@dataclass(frozen=True)
class Bucket:
    """A slice of the flat gradients.

    Args:
        start: its first element.
        stop: one past its last.
        node: index in the net's schedule of the layer whose backward pass completes it.
    """

    start: int
    stop: int
    node: int


_LAST_BUCKET = 2**19
"""2 MiB, for which NCCL takes about 25 µs over NVLink: conv1 to res2 of ResNet-50, conv1 and conv2 of CaffeNet."""


def cut_buckets(net: Net, count: int) -> list[Bucket]:
    """About `count` buckets of about equal size (0: one for each parameter), in the order in which they are completed.

    Nothing is left to compute while the last bucket travels. If there are several, the first layers' gradients, at most
    `_LAST_BUCKET` numbers, are divided from a larger last bucket. A bucket ends at the end of a parameter; the last one
    also holds the flags. A parameter that several layers share is complete with the one that comes first in the net.
    """
    buffer = net.parameters
    learned = sorted((p for p in buffer.parameters if p.lr_mult != 0), key=lambda p: p.start)
    indices = _schedule_indices(net.schedule)
    groups: list[list[Parameter]] = [[]]
    for parameter in learned:
        if groups[-1] and (not count or (parameter.start - groups[-1][0].start) * count >= buffer.learned):
            groups.append([])
        groups[-1].append(parameter)
    if not learned:
        return [Bucket(buffer.learned, buffer.learned + ParameterBuffer.FLAGS, 0)]
    first_layers = [parameter for parameter in groups[-1] if buffer.learned - parameter.start <= _LAST_BUCKET]
    if count != 1 and 0 < len(first_layers) < len(groups[-1]):
        groups[-1:] = [groups[-1][: -len(first_layers)], first_layers]
    starts = [group[0].start for group in groups]
    stops = [*starts[1:], buffer.learned + ParameterBuffer.FLAGS]
    # All ranks start collectives in one order, so no bucket may be complete before those in front of it.
    buckets: list[Bucket] = []
    for start, stop, group in zip(starts, stops, groups, strict=True):
        node = min(indices[parameter.layer] for parameter in group)
        buckets.append(Bucket(start, stop, min(node, buckets[-1].node) if buckets else node))
    return buckets


def _schedule_indices(schedule: Sequence[Node]) -> dict[Layer, int]:
    """The index in the schedule of each layer, by itself or as a member of a group."""
    indices = {}
    for index, node in enumerate(schedule):
        for layer in node.layer.members if isinstance(node.layer, FusedLayer) else [node.layer]:
            indices[layer] = index
    return indices


_COMMUNICATION, _EXPOSED = 0, 1


class CommTimer:
    """Adds up what one device's exchanges took, on the device's own clock, captured or not.

    Args:
        backend: the device.
    """

    def __init__(self, backend: Backend) -> None:
        self._timer = backend.device_timer(2)
        self._begun = False

    def begin(self) -> None:
        """Start the clock with the first all-reduce of an iteration."""
        # Queued where gradients are computed. On an H200 with CUDA 13, kernels for the time beside the all-reduces on
        # the second stream made each kernel of all later graphs start 0.4 µs later, 2.4 % of ResNet-50's iteration.
        if not self._begun:
            self._timer.start(_COMMUNICATION)
        self._begun = True

    @contextmanager
    def exposed(self) -> Iterator[None]:
        """Count a `with` block in which the device only communicates, or waits until it has; it ends all exchanges."""
        self.begin()
        self._timer.start(_EXPOSED)
        try:
            yield
        finally:
            self._begun = False
        self._timer.stop(_EXPOSED)
        self._timer.stop(_COMMUNICATION)

    def reset(self) -> None:
        """Reset the times: the first iterations compile and plan."""
        self._timer.reset()

    def totals(self) -> tuple[float, float]:
        """Seconds of communication, and of those the exposed ones; synchronizes the device."""
        communication, exposed = self._timer.totals()
        return communication, exposed


_WHOLE = "the gradients' all-reduce"
"""What messages and the trace call it."""


class Reducer:
    """Reduces one device's gradients.

    Args:
        net: whose gradients.
        communicator: connects the devices.
        buckets: how many; 1: reduce everything after the backward pass; 0: see `cut_buckets`.
        may_start: asked in a backward pass whether it completes the gradients, and all-reduces may overlap with it.
        waiting: marks a `with` block that waits for all devices, given what for.
        trace: shows each bucket's all-reduce.
    """

    def __init__(
        self,
        net: Net,
        communicator: Communicator,
        buckets: int,
        may_start: Callable[[], bool],
        waiting: Callable[[str], AbstractContextManager[None]],
        trace: Tracer,
    ) -> None:
        self._net = net
        self._communicator = communicator
        self._may_start = may_start
        self.timer = CommTimer(net.backend)
        self._waiting = waiting
        self._trace = trace
        self._buckets: list[Bucket] = []
        self._pending: deque[PendingCollective] = deque()
        self._next_bucket = 0
        if communicator.asynchronous and (buckets != 1 or communicator.compresses):
            self._buckets = cut_buckets(net, buckets)
        if self.overlaps:
            self._node_indices = {id(node): index for index, node in enumerate(net.schedule)}
            net.after_backward.append(self._after_backward)

    @property
    def parts(self) -> int:
        """The number of buckets: each ends with a parameter, so there may be fewer than asked for."""
        return max(len(self._buckets), 1)

    @property
    def overlaps(self) -> bool:
        """Whether all-reduces start during the backward pass."""
        return len(self._buckets) > 1

    def describe(self) -> str:
        """The bucket that this device is waiting for, for the watchdog's message. Thread-safe."""
        completed = self._communicator.completed
        return _WHOLE if completed is None or not self.overlaps else self._name(completed % len(self._buckets) + 1)

    def finish(self) -> None:
        """Wait until all gradients are averages, or have the device wait. Called after the backward pass.

        Raises:
            AbortedError: another device failed.
            PeerError: the connection failed.
        """
        with self.timer.exposed():
            if not self._buckets:
                with self._waiting(_WHOLE):
                    self._communicator.all_reduce(self._net.parameters.reduced, average=True)
                return
            # Also the ones that were not begun during the backward pass, because it was not the last of the iteration
            # or ran eagerly.
            while self._next_bucket < len(self._buckets):
                self._start_next_bucket()
            # In the order in which they were begun, the same on all ranks.
            for number in range(1, len(self._buckets) + 1):
                with self._waiting(self._name(number)):
                    self._pending.popleft().synchronize()
            self._next_bucket = 0

    def _after_backward(self, node: Node) -> None:
        """Start the buckets that this layer's gradients complete, and poll the pending buckets."""
        if not self._may_start():
            return
        index = self._node_indices[id(node)]
        # MPI moves data only while it is called, and shared memory is added up in these calls.
        for work in self._pending:
            work.poll()
        # The last buckets wait for `finish`: nothing is left to compute while they are reduced.
        while index > 0 and self._next_bucket < len(self._buckets) and self._buckets[self._next_bucket].node >= index:
            self._start_next_bucket()

    def _start_next_bucket(self) -> None:
        bucket = self._buckets[self._next_bucket]
        self._next_bucket += 1
        part = self._net.parameters.diff[bucket.start : bucket.stop]
        self.timer.begin()
        timed = self._timed(f"bucket {self._next_bucket}", f"{part.nbytes / 2**20:.3g} MiB")
        # The threads of a process meet here, before any of them comes to `finish`.
        with self._waiting(f"the beginning of {self._name(self._next_bucket)}"):
            self._pending.append(self._communicator.all_reduce_async(part, timed))

    def _name(self, number: int) -> str:
        return f"part {number} of {len(self._buckets)} of {_WHOLE}" if self.overlaps else _WHOLE

    @contextmanager
    def _timed(self, row: str, size: str) -> Iterator[None]:
        """Trace a bucket's all-reduce, on a GPU by events on its current stream."""
        record_event = self._trace.record_timed_event
        start_event = None if record_event is None else record_event()
        start = time.perf_counter()
        yield
        if record_event is None:
            self._trace.add(row, size, start, time.perf_counter())
        else:
            self._trace.add_device(row, size, start_event, record_event())
