"""The options that all ranks train with."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_world import FakeWorld
from training import TINY, build_solver, solver_param

from caffepy.errors import ConfigError
from caffepy.training.consistency import agree_on_options
from caffepy.training.options import TrainOptions

OPTIONS = TrainOptions(solver_param('base_lr: 0.1 lr_policy: "fixed" max_iter: 3 snapshot_prefix: "run"'))


class RootsWorld(FakeWorld):
    """The second rank of two: the root broadcasts what it has."""

    def __init__(self, **roots: Any) -> None:
        super().__init__(2, 1)
        self.roots = roots

    def broadcast(self, value: Any) -> Any:
        if isinstance(value, dict):
            return value
        kind = "random_seed" if isinstance(value, int) else "weights" if isinstance(value, list) else "snapshot"
        return self.roots[kind]


def test_another_rank_takes_seed_snapshot_and_weights_of_the_root() -> None:
    options = replace(OPTIONS, snapshot=Path("own"), weights=[Path("own")])
    world = RootsWorld(random_seed=7, snapshot=Path("a"), weights=[Path("b")])
    agreed = agree_on_options(world, options)
    assert agreed.solver.random_seed == 7
    assert (agreed.snapshot, agreed.weights) == (Path("a"), [Path("b")])
    assert options.solver.random_seed == 1, "the caller's prototxt is left alone"


def test_a_seed_is_drawn_where_the_prototxt_has_none() -> None:
    options = replace(OPTIONS, solver=solver_param('base_lr: 0.1 lr_policy: "fixed" random_seed: -1'))
    seeds = {agree_on_options(FakeWorld(), options).solver.random_seed for _ in range(3)}
    assert len(seeds) == 3 and min(seeds) >= 0


def test_ranks_with_different_devices_are_refused() -> None:
    world = FakeWorld(2, answer=lambda rank, value: 2 if value == 1 and not isinstance(value, bool) else value)
    message = "rank 0 on h0 has 1 CPU solver, rank 1 on h1 has 2 CPU solvers; give every rank as many"
    with pytest.raises(ConfigError, match=f"ranks have different devices: {message}"):
        agree_on_options(world, OPTIONS)
    assert world.ended_together


def test_gpus_and_cpu_solvers_do_not_go_together() -> None:
    world = FakeWorld(2, answer=lambda rank, value: 1 if value is None else value)
    with pytest.raises(ConfigError, match="rank 0 on h0 has 1 CPU solver, rank 1 on h1 has 1 GPU; give every rank"):
        agree_on_options(world, OPTIONS)


def save(folder: Path) -> Path:
    """A snapshot of a solver with the prefix of OPTIONS."""
    with build_solver(f'base_lr: 0.1 lr_policy: "fixed" max_iter: 3 snapshot_prefix: "{folder}/run"', TINY) as solver:
        solver.step(1)
        return solver.snapshot()


def test_the_newest_snapshot_is_looked_for_on_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    options = replace(OPTIONS, resume_newest=True)
    with caplog.at_level(logging.INFO):
        assert agree_on_options(FakeWorld(), options).snapshot is None
    assert "no whole snapshot with the prefix run: training starts from the beginning" in caplog.text
    newest = save(tmp_path)
    assert agree_on_options(RootsWorld(random_seed=1, snapshot=None, weights=[]), options).snapshot is None
    found = agree_on_options(FakeWorld(), options).snapshot
    assert found is not None and found.resolve() == newest


@pytest.mark.parametrize(("age", "wanted"), [(-5.0, "run_iter_1.solverstate"), (5.0, "given.solverstate")])
def test_a_job_that_is_started_again_resumes_from_a_snapshot_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age: float, wanted: str
) -> None:
    """One of an older training with the same prefix is not its own."""
    monkeypatch.chdir(tmp_path)
    newest = save(tmp_path)
    options = replace(OPTIONS, snapshot=Path("given.solverstate"), resume_since=newest.stat().st_mtime + age)
    assert str(agree_on_options(FakeWorld(), options).snapshot) == wanted
    always = replace(options, snapshot=None, resume_newest=True)
    assert str(agree_on_options(FakeWorld(), always).snapshot) == newest.name
