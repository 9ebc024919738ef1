"""--overfit-batches: training takes its first batches over and over, on any number of devices."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from training import solver_param

import caffepy
from caffepy.data.sharding import Shard, TrainSchedule
from caffepy.training.solver import Solver

RECORDS, BATCH = 20, 4
NET = """
layer { name: "data" type: "HDF5Data" top: "data" top: "label" hdf5_data_param { source: "list.txt" batch_size: 4 } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 1 } }
layer { name: "loss" type: "EuclideanLoss" bottom: "ip" bottom: "label" top: "loss" }
"""


@given(
    devices=st.integers(1, 4),
    size=st.integers(1, 9),
    batches=st.integers(1, 5),
    start=st.integers(0, 50),
    number=st.integers(0, 40),
)
def test_passes_repeat_and_divide_the_batch(devices: int, size: int, batches: int, start: int, number: int) -> None:
    shards = [Shard(rank, devices, devices, overfit_batches=batches) for rank in range(devices)]
    schedules = [TrainSchedule(shard, size, start) for shard in shards]
    firsts = [schedule.first_sample(number) for schedule in schedules]
    whole = shards[0].global_batch(size)
    assert all(0 <= first < batches * whole for first in firsts)
    assert firsts == [schedule.first_sample(number + batches) for schedule in schedules]
    assert np.diff(firsts).tolist() == [schedules[0].count] * (devices - 1)
    # A snapshot's position goes on, so that training without the option continues with further samples.
    assert schedules[0].position(number) == start + number * whole


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    with h5py.File("data.h5", "w") as file:
        file["data"] = np.arange(RECORDS, dtype=np.float32)[:, None]
        file["label"] = np.zeros((RECORDS, 1), np.float32)
    Path("list.txt").write_text("data.h5\n")
    return tmp_path


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("devices", [1, 2])
def test_the_first_device_reads_its_part_of_the_first_batches(folder: Path, batches: int, devices: int) -> None:
    seen: list[list[float]] = []

    def look(solver: Solver) -> None:
        seen.append(solver.net.blobs["data"].host_data().ravel().tolist())

    param = solver_param('base_lr: 0 lr_policy: "fixed" max_iter: 7 snapshot_after_train: false', NET)
    settings = {"threads": 1, "cpu_solvers": devices, "callbacks": look, "share": False}
    caffepy.train(param, overfit_batches=batches, **settings).close()
    expected = [[BATCH * (number % batches) + i for i in range(BATCH // devices)] for number in range(7)]
    assert seen == expected
