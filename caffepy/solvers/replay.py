"""Iterations as graphs: what is captured, how far the device may be behind the host, and what comes back."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

from caffepy.backend.protocols import Fetch, Mark
from caffepy.errors import RunError
from caffepy.net.capture import Program, Step

if TYPE_CHECKING:
    from caffepy.solvers.base import Solver

IN_FLIGHT = 3
"""Iterations that a device may be behind the host: enough to keep it busy, too few to run far ahead of a peer."""


class Replay:
    """A solver's iterations, captured once and replayed from then on; the host goes on while the device computes.

    Args:
        solver: whose iterations; its net is built.
    """

    def __init__(self, solver: Solver) -> None:
        self._solver = solver
        self._wanted = solver.backend.captures and not solver.engine.eager and not solver.param.debug_info
        self._program = Program(solver.backend, [])
        self._traced: Program | None = None
        self._losses_of_passes = solver.backend.zeros(())
        self._marks: deque[Mark] = deque()
        self._answers: deque[Fetch] = deque()
        self._met: set[str] = set()

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
        try:
            self._program = self._captured(solver.trace.paused())
        except RunError as error:
            self._wanted = False
            solver.log("Iterations are not captured into graphs: %s", error)
        self._meet("first capture")

    def _meet(self, occasion: str) -> None:
        """Wait until all devices have captured, the first time: to make a graph takes memory of the device.

        That can wait for whatever its process has put on any device, a launched exchange with this device included.
        """
        if occasion not in self._met:
            self._met.add(occasion)
            self._solver.callback.barrier()

    def _captured(self, tracing: AbstractContextManager[None]) -> Program:
        """Graphs of an iteration, captured within a `with` block that says what becomes of its spans.

        Raises:
            RunError: something cannot be captured.
        """
        program, passes = Program(self._solver.backend, self._steps()), self._solver.net.context.passes
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

    def _traced_program(self) -> Program:
        """Graphs of an iteration in which the device takes the time of every layer and bucket."""
        if self._traced is None:
            solver, net = self._solver, self._solver.net
            self.settle()
            places = 2 * (2 * len(net.schedule) * solver.param.iter_size + len(net.parameters.parameters) + 4)
            self._traced = self._captured(solver.trace.recording(solver.backend.stopwatch(places), places))
            self._meet("first trace")
        return self._traced

    def _steps(self) -> list[Step]:
        """All that an iteration asks of the device, in order: the very calls that run eagerly."""
        solver, net, eager = self._solver, self._solver.net, self._solver.eager
        steps = []
        for index in range(solver.param.iter_size):
            steps.append(Step("the start of a pass", partial(eager.begin_pass, index)))
            for node in net.schedule:
                steps.append(Step(node.layer.name, partial(net.forward_node, node), node.layer.not_captured()))
            if solver.param.iter_size > 1:
                steps.append(Step("the loss", partial(net.add_loss, self._losses_of_passes, index > 0)))
            for node in reversed(net.schedule):
                reason = node.layer.not_captured() if node.need_backward else ""
                steps.append(Step(node.layer.name, partial(net.backward_node, node), reason))
        steps.append(Step("the exchange of gradients", eager.exchange_gradients, solver.callback.not_captured()))
        steps.append(Step("the update", eager.update))
        return steps

    def run(self) -> bool:
        """Put an iteration on the device as graphs.

        Returns:
            Whether it was; False where the data have another shape. Then there are no graphs any more and the device
            has nothing left to do, so that the iteration can run eagerly and be captured anew.
        """
        net, passes, trace = self._solver.net, self._solver.passes(), self._solver.trace
        program = self._traced_program() if trace.active else self._program
        for number in passes:
            net.feed(number)
        if net.changed_shapes():
            self.drop()
            self.settle()
            return False
        with trace.span("iteration"):
            program.run()
        for number in passes:
            net.consumed(number)
        net.context.passes.number = passes.stop
        self._keep_pace()
        if trace.active:
            self._solver.callback.settle(self._marks[-1].wait)
            trace.replayed()
        return True

    def loss(self) -> float:
        """The loss of the iteration that was put on the device last; waits for it."""
        solver = self._solver
        solver.callback.settle(self._marks[-1].wait)
        if solver.param.iter_size == 1:
            return solver.net.loss()
        return float(solver.backend.to_host(self._losses_of_passes)) / solver.param.iter_size

    def _keep_pace(self) -> None:
        """Let the device be at most a few iterations behind, and hear what was asked for in the one it finished."""
        solver, several = self._solver, self._solver.callback.world_size > 1
        if several:
            self._answers.append(solver.backend.fetch(solver.net.parameters.flags[:2]))
        self._marks.append(solver.backend.mark())
        if len(self._marks) >= IN_FLIGHT:
            solver.callback.settle(self._marks.popleft().wait)
            if several:
                solver.requests.hear(self._answers.popleft().get())

    def settle(self) -> None:
        """Wait until the device has done all that it was asked for, and hear what was asked for in it."""
        if self._marks:
            self._solver.callback.settle(self._marks[-1].wait)
            self._marks.clear()
            for answer in self._answers:
                flags = answer.get()
                if flags.any():
                    self._solver.requests.hear(flags)
            self._answers.clear()

    def drop(self) -> None:
        """Give the graphs back; communicators whose calls they hold can be destroyed only afterwards."""
        for program in (self._program, self._traced):
            if program is not None:
                program.drop()
        self._traced = None
