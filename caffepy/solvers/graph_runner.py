"""Iterations as graphs: what is captured, how far the device may be behind the host, and what comes back."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

from caffepy.backend.handles import Event
from caffepy.errors import RunError
from caffepy.net.capture import GraphSegments, Segment

if TYPE_CHECKING:
    from caffepy.solvers.base import Solver

IN_FLIGHT = 3
"""Iterations that a device may be behind the host: enough to keep it busy, too few to run far ahead of a peer."""


class CudaGraphRunner:
    """A solver's iterations, captured once and replayed from then on; the host goes on while the device computes.

    Args:
        solver: whose iterations; its net is built.
    """

    def __init__(self, solver: Solver) -> None:
        self._solver = solver
        self._wanted = solver.backend.captures and not solver.engine.eager and not solver.param.debug_info
        self._program = GraphSegments(solver.backend, [])
        self._traced: GraphSegments | None = None
        self._losses_of_passes = solver.backend.zeros(())
        self._marks: deque[Event] = deque()
        self.behind = IN_FLIGHT - 1 if self._wanted else 0
        """How many iterations later than it was asked for something is known to all devices; alike on all of them."""
        self._agreed = range(0)
        """The passes for which no device's data change their form."""

    @property
    def captured(self) -> bool:
        """Whether there are graphs of an iteration."""
        return self._program.captured

    def capture(self) -> None:
        """Make graphs of an iteration that has just run eagerly, if the device can."""
        solver = self._solver
        if not self._wanted:
            return
        solver.backend.trim()  # what tuning and compiling the first iteration took
        problem = ""
        try:
            self._program = self._captured(solver.trace.paused())
        except RunError as error:
            problem = str(error)
        if self._all_captured(not problem):
            return
        self._wanted = False
        self.drop()
        solver.log("Iterations are not captured into graphs: %s", problem or "another device cannot capture them")

    def _all_captured(self, done: bool) -> bool:
        """Wait until all devices have captured; whether all could. Nothing is launched before that.

        To make a graph takes memory of the device, which can wait for whatever its process has put on any device, a
        launched exchange with this device included. And NCCL wants an exchange to be captured by all devices or by
        none, and the graphs that were captured together to be launched together.
        """
        return self._solver.callback.least(float(done), "the capture of all devices' graphs") > 0

    def _captured(self, tracing: AbstractContextManager[None]) -> GraphSegments:
        """Graphs of an iteration, captured within a `with` block that says what becomes of its spans.

        Raises:
            RunError: something cannot be captured.
        """
        program, passes = GraphSegments(self._solver.backend, self._steps()), self._solver.net.context.passes
        number = passes.number
        try:
            with tracing:
                program.capture()
        except BaseException:
            program.drop()
            raise
        finally:
            passes.number = number
        return program

    def _traced_program(self) -> GraphSegments:
        """Graphs of an iteration in which the device takes the time of every layer and bucket."""
        if self._traced is None:
            solver, net = self._solver, self._solver.net
            self._wait()
            places = 2 * (2 * len(net.schedule) * solver.param.iter_size + len(net.parameters.parameters) + 4)
            self._traced = self._captured(solver.trace.recording(solver.backend.device_timer(places), places))
            self._all_captured(True)  # a device that could not has raised
        return self._traced

    def _steps(self) -> list[Segment]:
        """All that an iteration asks of the device, in order: the very calls that run eagerly."""
        solver, net, eager = self._solver, self._solver.net, self._solver.eager
        steps = []
        for index in range(solver.param.iter_size):
            steps.append(Segment("the start of a pass", partial(eager.begin_pass, index)))
            for node in net.schedule:
                steps.append(Segment(node.layer.name, partial(net.forward_node, node), node.layer.capture_blocker()))
            if solver.param.iter_size > 1:
                steps.append(Segment("the loss", partial(net.add_loss, self._losses_of_passes, index > 0)))
            for node in reversed(net.schedule):
                reason = node.layer.capture_blocker() if node.need_backward else ""
                steps.append(Segment(node.layer.name, partial(net.backward_node, node), reason))
        steps.append(Segment("the exchange of gradients", eager.exchange_gradients, solver.callback.capture_blocker()))
        steps.append(Segment("the update", eager.update))
        return steps

    def run(self) -> bool:
        """Put an iteration on the device as graphs.

        Returns:
            Whether it was; False where the data of any device have another shape. Then no device has graphs any more,
            or anything left to do, so that all run the iteration eagerly and capture anew.
        """
        net, passes, trace = self._solver.net, self._solver.passes(), self._solver.trace
        program = self._traced_program() if trace.active else self._program
        for number in passes:
            net.prefetch_to_device(number)
        if self._data_changed(passes):
            self._wait()
            self.drop()
            return False
        with trace.span("iteration"):
            program.run()
        for number in passes:
            net.release_batch(number)
        net.context.passes.number = passes.stop
        self._keep_pace()
        if trace.active:
            self._solver.callback.settle(self._marks[-1].wait)
            trace.replayed()
        return True

    def _data_changed(self, passes: range) -> bool:
        """Whether the data of these passes, which were fed, have another form on any of the devices.

        Devices ask each other only where none knows its data: a batch of bytes is of one form in all its passes.
        """
        net, callback = self._solver.net, self._solver.callback
        changed = net.shapes_changed()
        if callback.world_size == 1:
            return changed
        if passes.start == self._agreed.start and passes.stop <= self._agreed.stop:
            if changed:
                raise RunError(
                    f"the data of pass {passes.start} have another shape than their layer announced; do not reshape a "
                    "net's inputs while several devices train"
                )
            self._agreed = self._agreed[len(passes) :]
            return False
        known = -1 if changed else net.shapes_known_until(passes.stop)
        until = callback.least(known, "the form of all devices' data")
        self._agreed = range(passes.stop, max(int(until), passes.stop))
        return until < 0

    def loss(self) -> float:
        """The loss of the iteration that was put on the device last; waits for it."""
        solver = self._solver
        solver.callback.settle(self._marks[-1].wait)
        if solver.param.iter_size == 1:
            return solver.net.loss()
        return float(solver.backend.to_host(self._losses_of_passes)) / solver.param.iter_size

    def _keep_pace(self) -> None:
        """Let the device be at most a few iterations behind, and note where it will say what was asked for."""
        solver = self._solver
        if solver.callback.world_size > 1:
            solver.requests.expect(solver.backend.copy_to_host_async(solver.net.parameters.flags[:2]).get)
        self._marks.append(solver.backend.record_event())
        if len(self._marks) >= IN_FLIGHT:
            solver.callback.settle(self._marks.popleft().wait)

    def settle(self) -> None:
        """Wait until the device has done all that it was asked for, and hear what was asked for in it.

        Called by all devices at the same point, or some would act on requests before the others.
        """
        self._wait()
        self._solver.requests.hear()

    def _wait(self) -> None:
        if self._marks:
            self._solver.callback.settle(self._marks[-1].wait)
            self._marks.clear()

    def drop(self) -> None:
        """Give the graphs back; communicators whose calls they hold can be destroyed only afterwards."""
        for program in (self._program, self._traced):
            if program is not None:
                program.drop()
        self._traced = None
