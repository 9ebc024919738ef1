"""What falls due at the ends of epochs, and how long an epoch is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from process_groups import raise_first, run_tcp
from training import build_solver

from caffepy.distributed import DistributedDataParallel, ProcessGroup
from caffepy.errors import ConfigError
from caffepy.pycaffe.device import mode
from caffepy.pycaffe.solver import SGDSolver
from caffepy.training.solver import Solver

RECORDS = 40
SOLVER = """base_lr: 0.1 lr_policy: "fixed" max_iter: 25 test_iter: 1 test_interval: 1000 test_initialization: false
    test_and_snapshot_last_epochs: 3 """
NET = """
layer { name: "data" type: "HDF5Data" top: "data" top: "label"
  hdf5_data_param { source: "%s" batch_size: 4 } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 3 } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""


class Noting:
    """A callback of a solver that notes after which iterations it tests."""

    def __init__(self, tested: list[int]) -> None:
        self._tested = tested

    def after_test(self, solver: Solver, scores: Any) -> None:
        self._tested.append(solver.iteration)


@pytest.fixture
def net(tmp_path: Path) -> str:
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["data"] = np.zeros((RECORDS, 2), np.float32)
        file["label"] = np.zeros(RECORDS, np.float32)
    (tmp_path / "list.txt").write_text(f"{tmp_path}/data.h5\n")
    return NET % (tmp_path / "list.txt")


def test_nvidias_display_has_the_epochs(net: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with build_solver(
        SOLVER.replace("3 ", "0 ") + "min_lr: 0 iter_size: 2 display: 6 snapshot_after_train: false", net
    ) as solver:
        solver.step(7)
    shown = [record.getMessage() for record in caplog.records if " iter/s, " in record.getMessage()]
    assert [line.split(" iter), ")[1].split(", loss")[0] for line in shown] == ["0/5ep", "1.2/5ep"]


def test_tests_and_snapshots_at_the_ends_of_the_last_epochs(
    net: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with build_solver(SOLVER + f'iter_size: 1 snapshot_prefix: "{tmp_path}/x"', net) as solver:
        solver.solve()
    tested = [record.getMessage() for record in caplog.records if "Testing net" in record.getMessage()]
    assert tested == [f"Iteration {i}, Testing net (#0)" for i in (5, 15, 25)]  # 10 iterations an epoch
    assert sorted(path.name for path in tmp_path.glob("*.solverstate")) == [
        f"x_iter_{i}.solverstate" for i in (15, 25, 5)
    ]


def test_an_epoch_is_shorter_where_processes_divide_the_records(net: str, tmp_path: Path) -> None:
    def work(group: ProcessGroup) -> list[int]:
        tested: list[int] = []
        with build_solver(SOLVER + f'snapshot_prefix: "{tmp_path}/x"', net) as solver:
            solver.add_callback(Noting(tested))
            DistributedDataParallel(solver, process_group=group)
            solver.solve()
        return tested

    assert raise_first(run_tcp(2, work, timeout=300)) == [[15, 20, 25]] * 2  # 5 iterations an epoch


@pytest.mark.parametrize(("rank", "wanted"), [(0, [15, 20, 25]), (1, [])])
def test_processes_of_pycaffe_count_the_records_of_all(
    net: str, rank: int, wanted: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("solver_count", 2), ("solver_rank", rank), ("multiprocess", True)):
        monkeypatch.setattr(mode, name, value)
    (tmp_path / "net.prototxt").write_text(net)
    path = tmp_path / "solver.prototxt"
    path.write_text(
        SOLVER + f'snapshot_after_train: false snapshot_prefix: "{tmp_path}/x" net: "{tmp_path}/net.prototxt"'
    )
    solver, tested = SGDSolver(path), list[int]()
    solver.solver.add_callback(Noting(tested))
    solver.solve()
    assert tested == wanted
    assert len(list(tmp_path.glob("*.solverstate"))) == len(wanted)


def test_a_net_without_records_has_no_epochs() -> None:
    dummy = """
        layer { name: "data" type: "DummyData" top: "data" top: "label"
          dummy_data_param { shape { dim: 4 dim: 2 } shape { dim: 4 } } }
        layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 3 } }
        layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }"""
    with (
        pytest.raises(ConfigError, match="test_and_snapshot_last_epochs needs a data layer that knows how many"),
        build_solver(SOLVER, dummy),
    ):
        pass
