"""Replayed iterations on a CPU that plays a capturing device: a graph runs its steps when it is launched."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_graph_backend import NET, FakeGraphBackend
from training import solver_param, weights_of

from caffepy.errors import NonFiniteError, RunError
from caffepy.logs.trace import Trace
from caffepy.training.callback import Action
from caffepy.training.graph_executor import IN_FLIGHT
from caffepy.training.schedule import CHECK_INTERVAL
from caffepy.training.solver import Solver, create_solver
from caffepy.utils.options import ExecutionOptions

SOLVER = 'base_lr: 0.1 lr_policy: "inv" gamma: 0.1 power: 0.75 momentum: 0.9 random_seed: 3 '


@contextmanager
def graph_solver(text: str = SOLVER, net: str = NET, eager: bool = False, **keywords: Any) -> Iterator[Solver]:
    backend = FakeGraphBackend()
    with backend.activate():
        solver = create_solver(solver_param(text, net), backend, engine=ExecutionOptions(eager=eager), **keywords)
        if isinstance(keywords.get("callback"), TwoDevices):
            keywords["callback"].solver = solver
        try:
            yield solver
        finally:
            solver.close()


def launches(solver: Solver) -> int:
    assert isinstance(solver.backend, FakeGraphBackend)
    return solver.backend.launches


def test_all_iterations_but_the_first_are_replayed_and_give_the_same() -> None:
    found = []
    for eager in (True, False):
        with graph_solver(eager=eager) as solver:
            solver.step(12)
            found.append(weights_of(solver.net))
            assert launches(solver) == (0 if eager else 11)
            assert (solver.iteration, solver.net.context.passes.number) == (12, 12)
    for name, values in found[0].items():
        np.testing.assert_array_equal(values, found[1][name])


def test_graphs_clear_the_updates_that_snapshot_diff_stores() -> None:
    """They would be the next iteration's gradients where no loss reaches a parameter."""
    aside = """
layer { name: "aside" type: "InnerProduct" bottom: "data" top: "aside"
  inner_product_param { num_output: 2 weight_filler { value: 0.5 } } }
layer { name: "silence" type: "Silence" bottom: "aside" }
"""
    found = []
    for stored in ("", "snapshot_diff: true"):
        with graph_solver(f"{SOLVER} weight_decay: 0.5 clip_gradients: 0.1 {stored}", NET + aside) as solver:
            solver.step(5)
            assert launches(solver) == 4
            found.append(weights_of(solver.net))
    for name, values in found[0].items():
        np.testing.assert_allclose(found[1][name], values, rtol=1e-6, err_msg=name)


FILTERED = """
layer { name: "data" type: "DummyData" top: "data" top: "label" top: "s" dummy_data_param {
  shape { dim: 6 dim: 5 } shape { dim: 6 } shape { dim: 6 } data_filler { type: "gaussian" }
  data_filler { type: "constant" value: 1 } data_filler { type: "gaussian" } } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip"
  inner_product_param { num_output: 8 weight_filler { type: "xavier" } } }
layer { name: "filter" type: "Filter" bottom: "ip" bottom: "label" bottom: "s" top: "some" top: "theirs" }
layer { name: "last" type: "InnerProduct" bottom: "some" top: "last"
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "last" bottom: "theirs" top: "loss"
  propagate_down: true propagate_down: false }
"""
"""Another number of samples reaches the last layers in every pass."""


def test_layers_behind_a_filter_are_not_replayed_and_all_give_the_same() -> None:
    found = []
    for eager in (True, False):
        with graph_solver(net=FILTERED, eager=eager) as solver:
            solver.step(8)
            found.append(weights_of(solver.net))
            # Three graphs in each of seven iterations: what lies before, between and after the segments of the host.
            assert launches(solver) == (0 if eager else 21)
    for name, values in found[0].items():
        np.testing.assert_array_equal(values, found[1][name])


def test_displays_show_the_loss_of_their_own_iteration(caplog: pytest.LogCaptureFixture) -> None:
    shown = []
    for eager in (True, False):
        caplog.clear()
        with graph_solver(SOLVER + "display: 2 average_loss: 3", eager=eager) as solver, caplog.at_level(logging.INFO):
            solver.step(7)
        lines = [r.getMessage() for r in caplog.records]
        shown.append([line.split("), ")[-1] for line in lines if line.startswith(("Iteration", "    Train"))])
    assert len(shown[0]) == 12
    assert shown[0] == shown[1]


def test_snapshots_hold_the_iteration_at_which_they_are_made(tmp_path: Path) -> None:
    text = SOLVER + f'snapshot: 5 snapshot_prefix: "{tmp_path}/x"'
    with graph_solver(text) as solver:
        solver.step(8)
        wanted = weights_of(solver.net)
    with graph_solver(text) as solver:
        solver.restore(tmp_path / "x_iter_5.solverstate")
        solver.step(3)
        for name, values in wanted.items():
            np.testing.assert_array_equal(values, weights_of(solver.net)[name])


def test_a_loss_that_is_not_finite_is_noticed_in_time() -> None:
    with graph_solver() as solver:
        solver.step(2)
        solver.backend.fill(solver.net.parameters.data, np.nan)
        where = r"in another forward pass the first layer whose output is not finite is 'ip \+ relu' \(Inner"
        with pytest.raises(NonFiniteError, match=f"the loss is nan; {where}.* its parameters are not finite either"):
            solver.step(CHECK_INTERVAL + 1)
        assert solver.iteration <= CHECK_INTERVAL + 2


def test_skipped_updates_are_counted_in_replays_and_too_many_end_training(caplog: pytest.LogCaptureFixture) -> None:
    net = "global_grad_scale: 1e38 " + NET.replace('top: "loss" }', 'top: "loss" loss_weight: 1e4 }')
    with graph_solver(SOLVER + "display: 10", net, max_skipped=35) as solver, caplog.at_level(logging.INFO):
        with pytest.raises(NonFiniteError, match=r"iteration 40: 35 updates in a row .* layer '(ip|last)'"):
            solver.step(100)
        assert launches(solver) == 40
    shown = [r.getMessage().split(" since")[0] for r in caplog.records if "skipped" in r.getMessage()]
    assert shown == ["Iteration 0, 1 update skipped"] + [f"Iteration {n}, 10 updates skipped" for n in (10, 20, 30, 40)]


def test_no_snapshot_is_made_of_nonsense(tmp_path: Path) -> None:
    with graph_solver(SOLVER + f'snapshot_prefix: "{tmp_path}/x"') as solver:
        solver.step(2)
        solver.backend.fill(solver.net.parameters.data, np.nan)
        solver.step(1)
        with pytest.raises(NonFiniteError, match="the loss is nan"):
            solver.snapshot()
        assert not list(tmp_path.iterdir())


def test_another_shape_is_run_eagerly_once_and_captured_anew() -> None:
    with graph_solver() as solver:
        solver.step(3)
        before = launches(solver)
        solver.net.blobs["data"].reshape((4, 5))
        solver.net.blobs["label"].reshape((4,))
        solver.step(3)
        assert launches(solver) - before == 2
        assert solver.net.blobs["ip"].shape == (4, 8)
        assert solver.net.context.passes.number == 6


def test_what_cannot_be_captured_is_said_and_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    with graph_solver() as solver, caplog.at_level(logging.INFO):

        def refuse(*works: Callable[[], None]) -> Any:
            raise RunError("a layer waits for the device")

        solver.backend.capture = refuse  # type: ignore[method-assign]
        solver.step(4)
        assert solver.iteration == 4
    lines = [r.getMessage() for r in caplog.records if "not captured" in r.getMessage()]
    assert lines == ["Iterations are not captured into graphs: a layer waits for the device"]


def refuse_once(backend: FakeGraphBackend) -> None:
    """Let a backend refuse what is to be captured first, as a GPU does where it would have to allocate memory."""
    capture, errors = backend.capture, [RunError("device memory was asked for")]

    def refusing(*works: Callable[[], None]) -> Any:
        if errors:
            raise errors.pop()
        return capture(*works)

    backend.capture = refusing  # type: ignore[method-assign]


def test_what_could_not_be_captured_is_tried_again_behind_another_iteration(caplog: pytest.LogCaptureFixture) -> None:
    with graph_solver(eager=True) as solver:
        solver.step(8)
        wanted = weights_of(solver.net)
    with graph_solver() as solver, caplog.at_level(logging.INFO):
        assert isinstance(solver.backend, FakeGraphBackend)
        refuse_once(solver.backend)
        solver.step(8)
        assert launches(solver) == 6
        for name, values in wanted.items():
            np.testing.assert_array_equal(values, weights_of(solver.net)[name])
    assert "not captured" not in caplog.text


class Capturing(FakeGraphBackend):
    """Runs work when it is captured too, which leaves its spans in a trace."""

    def capture(self, *works: Callable[[], None]) -> Any:
        for work in works:
            work()
        return super().capture(*works)


def test_a_trace_shows_the_layers_of_replayed_iterations() -> None:
    trace, backend = Trace(range(3, 6)), Capturing()
    with backend.activate():
        solver = create_solver(solver_param(SOLVER, NET), backend, trace=trace)
        solver.step(8)
        solver.close()
    found = [span for span in trace.spans() if span.row.startswith("device: ")]
    layers = [node.layer.name for node in solver.net.schedule]
    assert {span.iteration for span in found} == {3, 4, 5}
    for iteration in (3, 4, 5):
        own = [span for span in found if span.iteration == iteration]
        assert [span.name for span in own if span.row == "device: forward"] == layers
        assert [span.name for span in own if span.row == "device: backward"] == layers[:0:-1]
        assert [span.row for span in own][-2:] == ["device: exchange", "device: update"]
        assert all(span.start <= span.end for span in own)


class TwoDevices:
    """A callback that plays a second device, which asks for a stop or a snapshot in one of its iterations."""

    is_root = True
    world_size = 2

    def __init__(self, stop_at: int, snapshot_at: int = -1) -> None:
        self.stop_at = stop_at
        self.snapshot_at = snapshot_at
        self.changing: set[int] = set()
        """The iterations in which its data have another shape than before."""
        self.captures = True
        self.iteration = 0
        self.meetings: list[int] = []
        self.solver_launches: Callable[[], int] = lambda: 0
        self.solver: Solver

    def on_start(self) -> None:
        """The other device has the same weights."""

    def on_clock_start(self) -> None:
        """Nothing is timed."""

    def on_iteration(self) -> None:
        """The other device keeps up."""

    def on_snapshot(self) -> None:
        """The other device has the same parameters."""

    def on_gradients_ready(self) -> None:
        flags, iteration = self.solver.net.parameters.flags, self.solver.iteration
        flags[0] = (flags[0] + (iteration == self.stop_at)) / 2
        flags[1] = (flags[1] + (iteration == self.snapshot_at)) / 2
        self.iteration = iteration + 1

    def capture_blocker(self) -> str | None:
        return "it meets the other device"

    def wait_for_device(self, wait: Callable[[], None]) -> None:
        wait()

    def sum_over_devices(self, values: np.ndarray) -> np.ndarray:
        return values * 2

    def min_over_devices(self, number: float, what: str) -> float:
        if "capture" in what:
            self.meetings.append(self.solver_launches())
            return min(number, float(self.captures))
        return -1 if self.iteration in self.changing else number

    def barrier(self) -> None:
        """The other device is never late."""


def test_requests_are_known_as_many_iterations_later_as_the_device_may_be_behind() -> None:
    with graph_solver(callback=TwoDevices(4)) as solver:
        solver.step(30)
        assert solver.stopped_early
        assert solver.iteration == 4 + IN_FLIGHT


def test_devices_meet_after_every_capture() -> None:
    callback = TwoDevices(-1)
    with graph_solver(callback=callback) as solver:
        callback.solver_launches = lambda: launches(solver)
        solver.step(3)
        # This device's data alone may change their shape.
        solver.net.blobs["data"].reshape((4, 5))
        solver.net.blobs["label"].reshape((4,))
        solver.step(5)
        assert callback.meetings == [0, 2 * 2]
        assert launches(solver) == 2 * (2 + 4)


def test_a_device_captures_anew_where_anothers_data_have_another_shape() -> None:
    callback = TwoDevices(-1)
    with graph_solver(callback=callback) as solver:
        callback.solver_launches = lambda: launches(solver)
        callback.changing = {3, 4}
        solver.step(8)
        assert callback.meetings == [0, 2 * 2, 2 * 2]
        assert launches(solver) == 2 * (2 + 3)


def test_nobody_replays_where_one_device_cannot_capture(caplog: pytest.LogCaptureFixture) -> None:
    callback = TwoDevices(-1)
    callback.captures = False
    with graph_solver(callback=callback) as solver, caplog.at_level(logging.INFO):
        solver.step(4)
        assert launches(solver) == 0
    lines = [r.getMessage() for r in caplog.records if "not captured" in r.getMessage()]
    assert lines == ["Iterations are not captured into graphs: another device cannot capture them"]


def test_requests_of_several_iterations_in_flight_are_all_acted_on(tmp_path: Path) -> None:
    """The last iterations' answers are received together, at the end of a step: a stop, and then a snapshot."""
    with graph_solver(SOLVER + f'snapshot_prefix: "{tmp_path}/x"', callback=TwoDevices(8, snapshot_at=9)) as solver:
        solver.step(10)
        assert solver.stopped_early
        assert (tmp_path / "x_iter_10.solverstate").is_file()


def test_a_request_in_flight_outlives_a_change_of_shape() -> None:
    callback = TwoDevices(4)
    callback.changing = {5}
    with graph_solver(callback=callback) as solver:
        solver.step(30)
        assert solver.stopped_early
        assert solver.iteration == 4 + IN_FLIGHT, "as late as on a device that replays"


@pytest.mark.parametrize("changing", range(1, 8))
def test_eager_iterations_act_on_requests_as_late_as_replayed_ones(changing: int) -> None:
    callback = TwoDevices(4)
    callback.changing = {changing}
    with graph_solver(callback=callback) as solver:
        solver.step(30)
        assert solver.iteration == 4 + IN_FLIGHT


def test_an_own_request_is_acted_on_as_well() -> None:
    asked = iter([Action.NONE, Action.NONE, Action.STOP])
    with graph_solver(callback=TwoDevices(-1), request=lambda: next(asked, Action.NONE)) as solver:
        solver.step(30)
        assert solver.stopped_early
        # Not at once, or the other device would go on alone.
        assert solver.iteration == 2 + IN_FLIGHT


def test_the_end_of_a_step_receives_what_was_asked_last() -> None:
    with graph_solver(callback=TwoDevices(9)) as solver:
        solver.step(10)
        assert solver.iteration == 10
        assert solver.stopped_early
