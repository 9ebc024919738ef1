"""`caffepy.train` on one GPU and on two, captured and eager, and DataParallel over NCCL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import spawned
from training import solver_param, weights_of

import caffepy
from caffepy.distributed import spawn
from caffepy.training.solver import Solver

NET = """
layer { name: "data" type: "DummyData" top: "data" top: "target" dummy_data_param {
  shape { dim: [16, 5] } shape { dim: [16, 2] } data_filler { type: "gaussian" } data_filler { type: "uniform" } } }
layer { name: "ip1" type: "InnerProduct" bottom: "data" top: "ip1"
        inner_product_param { num_output: 8 weight_filler { type: "xavier" } } }
layer { name: "relu" type: "ReLU" bottom: "ip1" top: "ip1" }
layer { name: "ip2" type: "InnerProduct" bottom: "ip1" top: "ip2"
        inner_product_param { num_output: 2 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "EuclideanLoss" bottom: "ip2" bottom: "target" top: "loss" }
"""
SOLVER = (
    'base_lr: 0.05 lr_policy: "fixed" momentum: 0.9 max_iter: 40 random_seed: 3 snapshot_after_train: false '
    "test_iter: 2 test_interval: 10 "
)


def need_gpus(count: int) -> None:
    from caffepy.backend.cuda.device import device_count

    if device_count() < count:
        pytest.skip(f"needs {count} GPUs, {device_count()} are here")


def train(**options: Any) -> tuple[dict[str, np.ndarray], caffepy.TrainResult]:
    trained = caffepy.train(solver_param(SOLVER, NET), math="fp32", **options)
    with trained, trained.solver.backend.activate():
        return weights_of(trained.net), trained


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("devices", [[0], [0, 1]])
def test_gpus_train_as_the_cpu(devices: list[int], eager: bool) -> None:
    need_gpus(len(devices))
    heard: list[tuple[int, float]] = []

    def hear(solver: Solver) -> None:
        array = solver.net.parameters.data
        heard.append((solver.iteration, float(solver.backend.to_host(array).sum())))

    # DummyData makes a batch on each device.
    wanted, on_cpu = train(threads=1, cpu_solvers=len(devices))
    found, on_gpu = train(devices=devices, eager=eager, callbacks=hear)
    for name, values in wanted.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-3, atol=1e-5)
    assert [iteration for iteration, _ in heard] == list(range(1, 41))
    assert len({total for _, total in heard}) > 30
    assert list(on_gpu.scores) == list(on_cpu.scores) == [0, 10, 20, 30, 40]


@pytest.mark.parametrize("devices", [[0], [0, 1]])
def test_a_callback_stops_captured_training(devices: list[int]) -> None:
    need_gpus(len(devices))
    _, trained = train(devices=devices, callbacks=lambda solver: solver.iteration >= 20)
    assert trained.stopped_early
    assert 20 <= trained.iteration <= 24


def test_the_trained_solver_goes_on() -> None:
    with caffepy.train(solver_param(SOLVER, NET), devices=[0], max_iter=30, math="fp32") as trained:
        trained.solver.step(10)
        with trained.solver.backend.activate():
            found = weights_of(trained.net)
        assert "layers" in repr(trained.net)
    for name, values in train(devices=[0])[0].items():
        np.testing.assert_array_equal(found[name], values)


@pytest.mark.parametrize("eager", [False, True])
def test_spawned_solvers_train_on_gpus(tmp_path: Path, eager: bool) -> None:
    need_gpus(2)
    (tmp_path / "net.prototxt").write_text(NET.replace("16", "8"))
    (tmp_path / "solver4.prototxt").write_text(f'net: "{tmp_path}/net.prototxt" {SOLVER}')
    spawn(spawned.train, (str(tmp_path), 4, True, eager), nprocs=2)
    first, second = (np.load(tmp_path / f"rank{rank}.npz") for rank in range(2))
    for key, wanted in zip(first.files, train(threads=1)[0].values(), strict=True):
        np.testing.assert_array_equal(first[key], second[key])
        np.testing.assert_allclose(first[key], wanted, rtol=1e-3, atol=1e-5)
