"""Iterations as CUDA graphs: what is captured, and how far the device may be behind the host."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

from caffepy.backend.types import Event
from caffepy.errors import RunError
from caffepy.logs.trace import Tracer
from caffepy.net import Net
from caffepy.net.executor import CAPTURE_ATTEMPTS, GraphSegments, Segment
from caffepy.net.graph import capture_blockers
from caffepy.training.callback import SolverCallback
from caffepy.training.display import RootLog
from caffepy.training.stop_requests import FLAGS, StopRequests

IN_FLIGHT = 3
"""Iterations that a device may be behind the host: enough to keep it busy, too few to run far ahead of a peer."""


class IterationSteps(Protocol):
    """What an iteration does besides its forward and backward passes; put on the device's stream without waiting."""

    def begin_pass(self, index: int) -> None:
        """Before each of an iteration's passes."""

    def exchange_gradients(self) -> None:
        """Behind the last pass."""

    def update_parameters(self) -> None:
        """At the end."""


class GraphExecutor:
    """A solver's iterations, captured once and replayed from then on; the host goes on while the device computes.

    Args:
        net: the train net.
        iter_size: passes of an iteration.
        steps: what an iteration does besides.
        callback: the other devices.
        requests: taken over from the other devices with the gradients.
        trace: takes the times of iterations.
        log: for lines that only the root shows.
        captures: whether to capture, where the backend can.
    """

    def __init__(
        self,
        net: Net,
        iter_size: int,
        steps: IterationSteps,
        callback: SolverCallback,
        requests: StopRequests,
        trace: Tracer,
        log: RootLog,
        captures: bool,
    ) -> None:
        self._net = net
        self._backend = net.backend
        self._iter_size = iter_size
        self._steps = steps
        self._callback = callback
        self._requests = requests
        self._trace = trace
        self._log = log
        captures = captures and net.backend.captures
        self._attempts_left = CAPTURE_ATTEMPTS if captures else 0
        self._segments = GraphSegments(net.backend, [])
        self._traced: GraphSegments | None = None
        self._losses_of_passes = net.backend.zeros(())
        self._events: deque[Event] = deque()
        self.behind = IN_FLIGHT - 1 if captures else 0
        """Iterations after which all devices know a request; the same number on all of them."""
        self._known_passes = range(0)
        """The passes in which no device's data change their shape or dtype."""
        net.graphs_outdated.append(self.drop)

    @property
    def captured(self) -> bool:
        """Whether there are graphs of an iteration."""
        return self._segments.captured

    def capture(self) -> None:
        """Make graphs of an iteration that has just run eagerly, where all devices can; else try behind another one."""
        if not self._attempts_left:
            return
        self._backend.trim()  # what tuning and compiling the first iteration took
        problem: str | None = None
        try:
            self._segments = self._captured(self._trace.paused())
        except RunError as error:
            problem = str(error)
        if self._all_captured(problem is None):
            self._attempts_left = CAPTURE_ATTEMPTS
            return
        self.drop()
        self._attempts_left -= 1
        if self._attempts_left:
            return
        self._log("Iterations are not captured into graphs: %s", problem or "another device cannot capture them")

    def _all_captured(self, done: bool) -> bool:
        """Wait until all devices have captured; whether all could. Nothing is launched before that."""
        # Making a graph allocates device memory, which can wait for all work of the process on any device, a launched
        # all-reduce with this device included. And NCCL requires that all devices or none capture an all-reduce, and
        # that graphs which were captured together are launched together.
        return self._callback.min_over_devices(float(done), "the capture of all devices' graphs") > 0

    def _captured(self, tracing: AbstractContextManager[None]) -> GraphSegments:
        """Graphs of an iteration, captured within `tracing`."""
        segments, passes = GraphSegments(self._backend, self._all_segments()), self._net.context.passes
        number = passes.number
        try:
            with tracing:
                segments.capture()
        except BaseException:
            segments.drop()
            raise
        finally:
            passes.number = number
        return segments

    def _traced_segments(self) -> GraphSegments:
        """Graphs of an iteration in which the device takes the time of every layer and bucket."""
        if self._traced is None:
            net = self._net
            self._wait_for_last()
            timestamps = 2 * (2 * len(net.schedule) * self._iter_size + len(net.parameters.parameters) + 4)
            self._traced = self._captured(self._trace.recording(self._backend.device_timer(timestamps), timestamps))
            self._all_captured(True)  # a device that could not has raised
        return self._traced

    def _all_segments(self) -> list[Segment]:
        """All calls of an iteration that put work on the device, in order; the same that run eagerly."""
        net, steps = self._net, self._steps
        segments, blockers = [], capture_blockers(net.schedule)
        for index in range(self._iter_size):
            segments.append(Segment("the start of a pass", partial(steps.begin_pass, index)))
            for node, blocker in zip(net.schedule, blockers, strict=True):
                segments.append(Segment(node.layer.name, partial(net.forward_node, node), blocker))
            if self._iter_size > 1:
                segments.append(Segment("the loss", partial(net.add_loss, self._losses_of_passes, index > 0)))
            for node, blocker in zip(net.schedule[::-1], blockers[::-1], strict=True):
                segments.append(
                    Segment(node.layer.name, partial(net.backward_node, node), blocker if node.need_backward else None)
                )
        blocker = self._callback.capture_blocker()
        segments.append(Segment("the exchange of gradients", steps.exchange_gradients, blocker))
        segments.append(Segment("the update", steps.update_parameters))
        return segments

    def run(self, passes: range) -> bool:
        """Put an iteration on the device as graphs; its data were fetched.

        Args:
            passes: the numbers of its forward passes.

        Returns:
            Whether it was; False where the data of any device have another shape. Then all devices are idle and have
            dropped their graphs: run the iteration eagerly and capture again.
        """
        net, trace = self._net, self._trace
        segments = self._traced_segments() if trace.active else self._segments
        if self._data_changed(passes):
            self._wait_for_last()
            self.drop()
            return False
        with trace.span("iteration"):
            segments.run()
        for number in passes:
            net.release_batch(number)
        net.context.passes.number = passes.stop
        self._keep_pace()
        if trace.active:
            self._callback.wait_for_device(self._events[-1].wait)
            trace.replayed()
        return True

    def _data_changed(self, passes: range) -> bool:
        """Whether the data of these passes, which were fed, have another shape or dtype on any of the devices."""
        # The devices exchange that only for passes whose data are not known yet: a block of images has one shape and
        # dtype in all its passes.
        net, callback = self._net, self._callback
        changed = net.shapes_changed()
        if callback.world_size == 1:
            return changed
        if passes.start == self._known_passes.start and passes.stop <= self._known_passes.stop:
            if changed:
                raise RunError(
                    f"the data of pass {passes.start} have another shape than their layer announced; do not reshape a "
                    "net's inputs while several devices train"
                )
            self._known_passes = self._known_passes[len(passes) :]
            return False
        known = -1 if changed else net.shapes_known_until(passes.stop)
        until = callback.min_over_devices(known, "the form of all devices' data")
        self._known_passes = range(passes.stop, max(int(until), passes.stop))
        return until < 0

    def loss(self) -> float:
        """The loss of the iteration that was put on the device last; waits for it."""
        self._callback.wait_for_device(self._events[-1].wait)
        if self._iter_size == 1:
            return self._net.loss()
        return float(self._backend.to_host(self._losses_of_passes)) / self._iter_size

    def _keep_pace(self) -> None:
        """Copy the averaged requests to the host; wait until the device is less than `IN_FLIGHT` iterations behind."""
        if self._callback.world_size > 1:
            flags = self._net.parameters.flags[: len(FLAGS)]
            self._requests.expect(self._backend.copy_to_host_async(flags).get)
        self._events.append(self._backend.record_event())
        if len(self._events) >= IN_FLIGHT:
            self._callback.wait_for_device(self._events.popleft().wait)

    def stop_capturing(self) -> None:
        """Run iterations eagerly from now on."""
        self._attempts_left = 0
        self.drain()
        self.drop()

    def drain(self) -> None:
        """Wait until the device is idle, and take over the requests of all its iterations.

        Called by all devices at the same point, or some would act on requests before the others.
        """
        self._wait_for_last()
        self._requests.receive()

    def _wait_for_last(self) -> None:
        if self._events:
            self._callback.wait_for_device(self._events[-1].wait)
            self._events.clear()

    def drop(self) -> None:
        """Free the graphs; communicators whose calls they hold can be destroyed only afterwards."""
        for segments in (self._segments, self._traced):
            if segments is not None:
                segments.drop()
        self._traced = None
