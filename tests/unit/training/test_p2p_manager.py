"""A training run of one process, from its start to the report, and the ways in which it ends.

Runs of several ranks, which fail, disagree or are interrupted, are in tests/parallel; what a process does with an error
is in test_failures.py.
"""

from __future__ import annotations

import logging
import signal
from pathlib import Path

import pytest
from fake_graph_backend import NET
from training import solver_param

from caffepy.errors import AbortedError, CaffepyError, ConfigError, RunError
from caffepy.training.options import TrainOptions
from caffepy.training.p2p_manager import P2PManager
from caffepy.training.solver import Solver

SOLVER = 'base_lr: 0.1 lr_policy: "fixed" random_seed: 3 snapshot_after_train: false '
FAULTY = """
import os, signal

class Faulty:
    objects = 0

    def setup(self, bottom, top):
        Faulty.objects += 1
        self.number, self.passes = Faulty.objects, 0
        if self.param_str == f"setup {self.number}":
            raise OSError("the disk is full")

    def reshape(self, bottom, top):
        top[0].reshape(*bottom[0].shape)

    def forward(self, bottom, top):
        self.passes += 1
        top[0].data[...] = bottom[0].data
        if self.passes == 3 and self.param_str == f"forward {self.number}":
            raise OSError("the disk is full")
        if self.passes == 3 and self.param_str == f"interrupt {self.number}":
            os.kill(os.getpid(), signal.SIGINT)

    def backward(self, top, propagate_down, bottom):
        pass
"""


def manager(solvers: int, net: str = NET, iterations: int = 5) -> P2PManager:
    param = solver_param(f"{SOLVER} max_iter: {iterations}", net)
    return P2PManager(TrainOptions(param, cpu_solvers=solvers, threads=1, timeout=300))


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The net with a Python layer that fails or interrupts, where and in which of its objects `%s` says."""
    (tmp_path / f"{tmp_path.name}.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(tmp_path)
    layer = 'layer { name: "faulty" type: "Python" bottom: "data" top: "same" python_param '
    layer += f'{{ module: "{tmp_path.name}" layer: "Faulty" param_str: "%s" }} }}'
    return NET.replace(
        'layer { name: "ip" type: "InnerProduct" bottom: "data"',
        layer + ' layer { name: "ip" type: "InnerProduct" bottom: "same"',
    )


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_options_that_are_wrong_end_the_run_before_anything_is_made() -> None:
    with pytest.raises(ConfigError, match="timeout: '0' is not a number of seconds"):
        P2PManager(lambda: TrainOptions(solver_param(SOLVER, NET), timeout=0)).run()


def test_a_run_goes_from_the_options_to_the_report(caplog: pytest.LogCaptureFixture) -> None:
    run = manager(2)
    assert run.iteration == 0
    with caplog.at_level(logging.INFO):
        run.run()
    assert run.iteration == 5
    lines = messages(caplog)
    assert [line.split(" on ")[0] for line in lines if line.startswith("Device ")] == [
        "Device 0: rank 0",
        "Device 1: rank 0",
    ]
    assert "Transport memory of one process between devices of all pairs" in lines
    settings = next(i for i, line in enumerate(lines) if line.startswith("Initializing solver from parameters, "))
    batch = next(i for i, line in enumerate(lines) if line.startswith("Batch: 6 per device, 12 per rank"))
    assert settings < lines.index("| snapshot_after_train: false") < batch < lines.index("Starting Optimization")
    assert lines[-1].startswith("Overall performance: ")


@pytest.mark.parametrize("solvers", [1, 2])
def test_a_device_that_fails_before_the_start_ends_the_run(
    faulty: str, solvers: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), pytest.raises(CaffepyError, match="faulty.*the disk is full"):
        manager(solvers, faulty % f"setup {solvers}").run()
    assert "Starting Optimization" not in messages(caplog)


@pytest.mark.parametrize(("solvers", "where"), [(1, ""), (2, "device CPU [01], iteration 2: .*")])
def test_a_device_that_fails_in_training_ends_the_run(
    faulty: str, solvers: int, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is raised once, and the caller prints it."""
    with pytest.raises(RunError, match=f"^{where}.*faulty.*the disk is full"):
        manager(solvers, faulty % f"forward {solvers}").run()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("solvers", [1, 2])
def test_an_interrupt_ends_training_without_an_error(faulty: str, solvers: int) -> None:
    before, run = signal.getsignal(signal.SIGINT), manager(solvers, faulty % f"interrupt {solvers}", 10**6)
    run.run()
    assert 2 < run.iteration < 10**6
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("solvers", [1, 2])
def test_a_run_that_was_aborted_without_a_failure_is_an_error(monkeypatch: pytest.MonkeyPatch, solvers: int) -> None:
    """A wait that ends for no known reason is not the end of training."""
    solve = Solver.solve

    def let_go(solver: Solver) -> None:
        solver.step(2)
        if solver.callback.is_root:
            raise AbortedError("another solver thread failed")
        solve(solver)

    monkeypatch.setattr(Solver, "solve", let_go)
    where = "device CPU 0, iteration 2: " if solvers > 1 else "^"
    text = r"training was stopped, and no device said why \(another solver thread failed\); go on from the last"
    with pytest.raises(RunError, match=where + text):
        manager(solvers).run()


@pytest.mark.parametrize("solvers", [1, 2])
def test_a_run_that_ends_early_is_an_error(monkeypatch: pytest.MonkeyPatch, solvers: int) -> None:
    monkeypatch.setattr(Solver, "solve", lambda solver: solver.step(3))
    with pytest.raises(RunError, match="training has ended before max_iter, and no device said why; go on from"):
        manager(solvers).run()
