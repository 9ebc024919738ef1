"""An iteration put on the device call by call: its passes, the exchange of gradients, the update."""

from __future__ import annotations

from caffepy.net import debug
from caffepy.solvers.io.display import Display
from caffepy.solvers.iteration import IterationSteps
from caffepy.solvers.loss_check import LossCheck
from caffepy.solvers.requests import FLAGS
from caffepy.solvers.train_state import TrainState


class EagerIteration:
    """Runs iterations without graphs."""

    def __init__(self, state: TrainState, steps: IterationSteps, display: Display, loss_check: LossCheck) -> None:
        self._state = state
        self._steps = steps
        self._display = display
        self._loss_check = loss_check

    def run(self, display: bool, read_loss: bool) -> None:
        """Make one iteration; its data were fetched.

        Args:
            display: show loss, outputs and update.
            read_loss: add the loss to those that are shown, and check that it is finite.

        Raises:
            NonFiniteError: it is not.
        """
        self._compute_gradients(read_loss)
        if display:
            self._display.show_iteration()
        self._wait_for_peers()
        self._steps.exchange_gradients()
        self._finish_exchange()
        self._update_and_show(display)

    def _compute_gradients(self, read_loss: bool) -> None:
        state, net, loss = self._state, self._state.net, 0.0
        for index in range(state.param.iter_size):
            self._steps.begin_pass(index)
            with state.trace.span("forward"):
                net.forward()
            if read_loss:
                loss += self._loss_check.read()
            with state.trace.span("backward"):
                net.backward()
        if read_loss:
            state.losses.add(loss / state.param.iter_size)
        if state.backend.asynchronous:
            state.backend.synchronize()
            net.raise_device_errors()

    def _wait_for_peers(self) -> None:
        """Wait until all devices have made their passes.

        A pass may compile, tune and allocate, which can wait for all work of the process on any of its devices, an
        all-reduce included that this device has not joined.
        """
        if self._state.callback.world_size > 1 and self._state.backend.asynchronous:
            self._state.callback.barrier()

    def _finish_exchange(self) -> None:
        """Wait for the averages, and hand the averaged requests to `Requests`."""
        state = self._state
        if state.callback.world_size > 1:
            state.callback.wait_for_device(state.backend.synchronize)
            flags = state.backend.to_host(state.net.parameters.flags[: len(FLAGS)])
            state.requests.expect(lambda: flags)

    def _update_and_show(self, display: bool) -> None:
        state, parameters = self._state, self._state.net.parameters
        before = state.backend.to_host(parameters.data) if state.net.debug_info else None
        self._steps.update()
        if display or not state.backend.asynchronous:
            self._display.show_update(display)
        if before is not None:
            debug.log_update(parameters, before)
