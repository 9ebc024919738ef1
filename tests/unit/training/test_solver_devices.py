"""The training loop of one of two devices: requests, averages and statistics that both exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training import PLAIN, TESTED, TINY, build_solver

from caffepy.data.sharding import Shard
from caffepy.formats.caffemodel import read_weights
from caffepy.training.callback import Action
from caffepy.training.solver import Solver

NORMALISED = TINY.replace(
    'layer { name: "accuracy"',
    'layer { name: "bn" type: "BatchNorm" bottom: "ip" top: "ip" }\nlayer { name: "accuracy"',
)


class TwoDevices:
    """A callback that plays a second device which makes the same gradients and asks for `flags`."""

    is_root = True
    world_size = 2

    def __init__(self, flags: tuple[float, float]) -> None:
        self.flags = flags
        self.sums = 0
        self.solver: Solver

    def on_start(self) -> None:
        pass

    def on_clock_start(self) -> None:
        """Nothing is timed."""

    def on_iteration(self) -> None:
        """The other device keeps up."""

    def on_snapshot(self) -> None:
        """The other device has the same parameters."""

    def on_gradients_ready(self) -> None:
        flags = self.solver.net.parameters.flags
        flags[:2] = (flags[:2] + self.flags) / 2

    def capture_blocker(self) -> str | None:
        return "a test's"

    def wait_for_device(self, wait: Callable[[], None]) -> None:
        wait()

    def sum_over_devices(self, values: np.ndarray) -> np.ndarray:
        self.sums += 1
        return values * 2

    def min_over_devices(self, number: float, what: str) -> float:
        return number

    def barrier(self) -> None:
        pass


@contextmanager
def build_paired(text: str, net: str, *, callback: TwoDevices, **keywords: Any) -> Iterator[Solver]:
    """A solver whose callback holds it, as a solver thread does."""
    with build_solver(text, net, callback=callback, **keywords) as solver:
        callback.solver = solver
        yield solver


def test_another_devices_requests_travel_with_the_gradients(tmp_path: Path) -> None:
    text = PLAIN + f'snapshot_prefix: "{tmp_path}/x"'
    with build_paired(text, TINY, callback=TwoDevices((0, 1))) as solver:
        solver.step(1)
        assert not solver.stopped_early
    assert (tmp_path / "x_iter_1.solverstate").is_file()
    with build_paired(text, TINY, callback=TwoDevices((1, 0))) as solver:
        solver.step(3)
        assert solver.iteration == 1
        assert solver.stopped_early


def test_an_own_request_travels_with_the_gradients() -> None:
    asked = [Action.STOP]
    request = lambda: asked.pop() if asked else Action.NONE  # noqa: E731
    with build_paired(PLAIN, TINY, callback=TwoDevices((0, 0)), request=request) as solver:
        solver.step(3)
        assert solver.iteration == 1


def test_shown_numbers_are_averaged_over_devices(lines: Any) -> None:
    callback = TwoDevices((0, 0))
    with build_paired(PLAIN + "display: 1", TINY, callback=callback) as solver:
        lines()
        solver.step(1)
        loss = float(solver.net.blobs["loss"].host_data())
        assert callback.sums == 1
        assert f"    Train net output #0: loss = {loss:.6g} (* 1 = {loss:.6g} loss)" in lines()


def test_only_the_root_logs(lines: Any) -> None:
    callback = TwoDevices((0, 0))
    callback.is_root = False
    with build_paired(PLAIN + "display: 1", TINY, callback=callback, shard=Shard(rank=1, world_size=2)) as solver:
        lines()
        solver.solve()
        assert lines() == []


class Averaging(TwoDevices):
    """A callback whose other device's arrays hold 1 more than this one's; notes what was averaged."""

    def __init__(self) -> None:
        super().__init__((0, 0))
        self.averaged: list[int] = []

    def average_over_devices(self, arrays: Sequence[np.ndarray]) -> None:
        for array in arrays:
            self.averaged.append(array.size)
            array += 0.5


def statistics(solver: Solver) -> list[np.ndarray]:
    (norm,) = (layer for layer in solver.net.layers if layer.type == "BatchNorm")
    return [blob.host_data() for blob in norm.blobs]


def test_running_statistics_are_averaged_once_before_tests_and_snapshots(tmp_path: Path) -> None:
    callback = Averaging()
    text = TESTED + f'snapshot: 2 snapshot_prefix: "{tmp_path}/x"'
    with build_paired(text, NORMALISED, callback=callback) as solver:
        solver.step(1)
        assert callback.averaged == [], "all devices have the root's before the first iteration"
        solver.step(1)
        before = statistics(solver)
        assert callback.averaged == [64 + 2], "mean and variance, in one piece"
        solver.test_all()
        assert callback.averaged == [66], "they were averaged for the snapshot of this iteration"
        saved = read_weights(tmp_path / "x_iter_2.caffemodel").layer
        assert [list(blob.data) for layer in saved if layer.name == "bn" for blob in layer.blobs] == [
            values.reshape(-1).tolist() for values in before
        ]
        assert before[2] == pytest.approx(1.999)
        solver.step(1)
        solver.test_all()
        assert callback.averaged == [66, 66]
        for values, old in zip(statistics(solver)[:2], before[:2], strict=True):
            assert np.abs(values - 0.999 * old - 0.5).max() < 10  # they moved on from the averaged ones


@pytest.mark.parametrize(
    "net",
    [TINY, NORMALISED.replace('top: "ip" }\nlayer', 'top: "ip" batch_norm_param { use_global_stats: true } }\nlayer')],
)
def test_nothing_is_averaged_that_is_alike_on_all_devices(net: str) -> None:
    callback = Averaging()
    with build_paired(TESTED, net.replace("lr_mult: 2", "lr_mult: 0"), callback=callback) as solver:
        solver.step(3)
        assert callback.averaged == []


def test_the_loss_that_is_shown_last_leaves_the_tested_statistics_alone(lines: Any, tmp_path: Path) -> None:
    text = f'base_lr: 0.1 lr_policy: "fixed" max_iter: 4 display: 4 snapshot_prefix: "{tmp_path}/x" '
    with build_solver(text + "test_iter: 3 test_interval: 4 test_initialization: false", NORMALISED) as solver:
        lines()
        solver.solve()
        shown = lines()
        assert shown[-7].startswith("Iteration 4, loss = ")
        saved = read_weights(tmp_path / "x_iter_4.caffemodel").layer
        assert [list(blob.data) for layer in saved if layer.name == "bn" for blob in layer.blobs] == [
            values.reshape(-1).tolist() for values in statistics(solver)
        ]
