"""An iteration put on the device call by call: its passes, the exchange of gradients, the update.

Owns what an iteration asks of the device; `CudaGraphRunner` captures these very calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from caffepy.net import debug
from caffepy.solvers.loss import finite_loss

if TYPE_CHECKING:
    from caffepy.solvers.base import Solver


class EagerIteration:
    """A solver's iterations, each call of which is made when it is due.

    Args:
        solver: whose iterations.
    """

    def __init__(self, solver: Solver) -> None:
        self.last_pass = True
        """Whether the present pass is the iteration's last, whose backward pass completes the gradients."""
        self._solver = solver

    def run(self, display: bool, read_loss: bool) -> None:
        """Make one iteration.

        Args:
            display: show loss, outputs and update.
            read_loss: enter the loss among those that are shown, and look whether it is finite.

        Raises:
            NonFiniteError: it is not.
        """
        solver = self._solver
        self._compute_gradients(read_loss)
        if display:
            solver.display.show_iteration()
        self._meet()
        self.exchange_gradients()
        self._finish_exchange()
        self._update_and_show(display)

    # -- the calls that are captured as well ---------------------------------------------------------

    def begin_pass(self, index: int) -> None:
        """Before each of an iteration's passes: where its random numbers begin, and that gradients start anew."""
        solver = self._solver
        solver.net.context.passes.on_device = solver.numbers.counter(index)
        if index == 0:
            solver.net.clear_param_diffs()
        self.last_pass = index == solver.param.iter_size - 1
        if self.last_pass and solver.callback.world_size > 1:
            solver.backend.copy(solver.numbers.flags, solver.net.parameters.flags[:2])

    def exchange_gradients(self) -> None:
        """Average gradients and requests over all devices, so that all act in the same iteration."""
        with self._solver.trace.span("exchange"):
            self._solver.callback.on_gradients_ready(self._solver)

    def update(self) -> None:
        """Change the parameters."""
        with self._solver.trace.span("update"):
            self._solver.updating.run(*self._solver.numbers.factors())

    # -- what only happens call by call --------------------------------------------------------------

    def _compute_gradients(self, read_loss: bool) -> None:
        solver, net, loss = self._solver, self._solver.net, 0.0
        for index in range(solver.param.iter_size):
            self.begin_pass(index)
            with solver.trace.span("forward"):
                net.forward()
            if read_loss:
                loss += finite_loss(solver)
            with solver.trace.span("backward"):
                net.backward()
        if read_loss:
            solver.losses.add(loss / solver.param.iter_size)
        if solver.backend.asynchronous:
            solver.backend.synchronize()
            net.raise_device_errors()

    def _meet(self) -> None:
        """Wait until all devices have computed: a pass may compile, tune and allocate, which can wait for whatever the
        process has put on any of its devices, an exchange included that this device has not joined.
        """
        if self._solver.callback.world_size > 1 and self._solver.backend.asynchronous:
            self._solver.callback.barrier()

    def _finish_exchange(self) -> None:
        """Wait for the averages, and note what any of the devices asked for."""
        solver = self._solver
        if solver.callback.world_size > 1:
            solver.callback.settle(solver.backend.synchronize)
            flags = solver.backend.to_host(solver.net.parameters.flags[:2])
            solver.requests.expect(lambda: flags)

    def _update_and_show(self, display: bool) -> None:
        solver, parameters = self._solver, self._solver.net.parameters
        before = solver.backend.to_host(parameters.data) if solver.net.debug_info else None
        self.update()
        if display or not solver.backend.asynchronous:
            solver.display.show_update(display)
        if before is not None:
            debug.log_update(parameters, before)
