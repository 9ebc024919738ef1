"""Processes that a program starts: `distributed.spawn`, and pycaffe's NCCL as BVLC's python/train.py uses it."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import spawned
from processes import program_environment

import caffepy
from caffepy.distributed import spawn
from caffepy.errors import RunError, UserError

NET = """
layer { name: "data" type: "HDF5Data" top: "data" top: "target"
        hdf5_data_param { source: "%(list)s" batch_size: %(n)d } }
layer { name: "ip1" type: "InnerProduct" bottom: "data" top: "ip1"
        inner_product_param { num_output: 6 weight_filler { type: "xavier" } } }
layer { name: "relu" type: "ReLU" bottom: "ip1" top: "ip1" }
layer { name: "ip2" type: "InnerProduct" bottom: "ip1" top: "ip2"
        inner_product_param { num_output: 2 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "EuclideanLoss" bottom: "ip2" bottom: "target" top: "loss" }
"""
SCRIPT = """
import sys
from multiprocessing import Process
import numpy as np
import caffe

def solve(proto, uid, rank, count):
    caffe.set_mode_cpu()
    caffe.set_solver_count(count)
    caffe.set_solver_rank(rank)
    caffe.set_multiprocess(True)
    solver = caffe.SGDSolver(proto)
    nccl = caffe.NCCL(solver, uid)
    nccl.bcast()
    solver.add_callback(nccl)
    if solver.param.layer_wise_reduce:
        solver.net.after_backward(nccl)
    solver.step(solver.param.max_iter)
    np.savez(f"nccl{rank}.npz", *[blob.data for blobs in solver.net.params.values() for blob in blobs])

if __name__ == "__main__":
    uid = caffe.NCCL.new_uid()
    caffe.init_log()
    processes = []
    for rank in range(2):
        process = Process(target=solve, args=(sys.argv[1], uid, rank, 2))
        process.daemon = True
        process.start()
        processes.append(process)
    for process in processes:
        process.join()
    sys.exit(max(process.exitcode for process in processes))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Solvers with batches of 4 and of 8 samples."""
    import h5py

    made = tmp_path_factory.mktemp("spawn")
    numbers = np.random.default_rng(5)
    with h5py.File(made / "data.h5", "w") as file:
        file["data"] = numbers.normal(size=(24, 5)).astype(np.float32)
        file["target"] = numbers.normal(size=(24, 2)).astype(np.float32)
    (made / "list.txt").write_text(f"{made}/data.h5\n")
    for batch in (4, 8):
        (made / f"net{batch}.prototxt").write_text(NET % {"list": made / "list.txt", "n": batch})
        (made / f"solver{batch}.prototxt").write_text(
            f'net: "{made}/net{batch}.prototxt" base_lr: 0.05 lr_policy: "fixed" momentum: 0.9 max_iter: 7 '
            "snapshot_after_train: false random_seed: 11 solver_mode: CPU layer_wise_reduce: true"
        )
    return made


@pytest.fixture(scope="module")
def whole(folder: Path) -> list[np.ndarray]:
    """The parameters that one process has learned from whole batches."""
    with caffepy.train(folder / "solver8.prototxt", threads=1) as trained:
        return [blob.host_data() for layer in trained.net.layers for blob in layer.blobs]


def assert_both_have(folder: Path, name: str, whole: list[np.ndarray]) -> None:
    first, second = (np.load(folder / f"{name}{rank}.npz") for rank in range(2))
    for key, wanted in zip(first.files, whole, strict=True):
        np.testing.assert_array_equal(first[key], second[key])
        np.testing.assert_allclose(first[key], wanted, rtol=1e-5, atol=1e-6)


def test_spawned_solvers_train_as_one(folder: Path, whole: list[np.ndarray]) -> None:
    spawn(spawned.train, args=(str(folder), 4), nprocs=2, join=True)
    assert_both_have(folder, "rank", whole)


def test_a_script_with_nccl_trains_as_one_process(folder: Path, whole: list[np.ndarray]) -> None:
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "caffepy.as_caffe", "train.py", str(folder / "solver4.prototxt")]
    ended = subprocess.run(
        command, cwd=folder, env=program_environment({}), timeout=300, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert_both_have(folder, "nccl", whole)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raise", r"^spawn: rank 1: ValueError: injected$"),
        ("kill", r"^spawn: rank 1 was ended by SIGKILL$"),
        ("exit", r"^spawn: rank 1 has ended with status 3 without an error message$"),
    ],
)
def test_a_process_that_fails_ends_all(how: str, text: str) -> None:
    start = time.monotonic()
    with pytest.raises(RunError, match=text) as caught:
        spawn(spawned.fail, (how,), 2)
    assert time.monotonic() - start < 300
    assert not multiprocessing.active_children()
    if how == "raise":
        assert "in fail" in str(caught.value.__cause__)


@pytest.mark.parametrize("count", [0, -1, "2", True])
def test_the_number_of_processes_is_checked(count: object) -> None:
    with pytest.raises(UserError, match="nprocs is .*; it must be an integer of 1 or more"):
        spawn(spawned.fail, (), count)  # type: ignore[arg-type]


def test_arguments_in_the_order_of_an_earlier_version_are_refused() -> None:
    with pytest.raises(UserError, match=r"args is a int; it must be a tuple: spawn\(fn, args=\(\), nprocs=1\)"):
        spawn(spawned.fail, 2, ("raise",))  # type: ignore[arg-type]
