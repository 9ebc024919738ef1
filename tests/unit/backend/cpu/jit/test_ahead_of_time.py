"""Which kernels a net will call is foreseen by its own code, and processes share out their compilation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format

from caffepy.backend import foreseeing_on_cpu
from caffepy.backend.cpu.backend import CpuBackend
from caffepy.backend.cpu.jit import ahead_of_time
from caffepy.backend.cpu.jit.ahead_of_time import ForeseenKernels, compile_all
from caffepy.backend.cpu.jit.kernel import Floats, Int, kernel
from caffepy.backend.cpu.jit.recording import record
from caffepy.phases.kernel_processes import PROCESSES
from caffepy.proto import caffe_pb2
from caffepy.solvers import create_solver
from caffepy.solvers.nets.foreseen import run_described

NET = """
layer { name: "data" type: "DummyData" top: "data" top: "label"
  dummy_data_param { shape { dim: 4 dim: 1 dim: 12 dim: 12 } shape { dim: 4 }
    data_filler { type: "gaussian" std: 1 } data_filler { type: "constant" value: 1 } } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 6 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "norm" type: "BatchNorm" bottom: "conv" top: "norm" }
layer { name: "relu" type: "ReLU" bottom: "norm" top: "norm" }
layer { name: "pool" type: "Pooling" bottom: "norm" top: "pool" pooling_param { kernel_size: 2 stride: 2 } }
layer { name: "drop" type: "Dropout" bottom: "pool" top: "drop" }
layer { name: "ip" type: "InnerProduct" bottom: "drop" top: "ip"
  inner_product_param { num_output: 5 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""
SOLVER = "base_lr: 0.01 lr_policy: 'fixed' momentum: 0.9 max_iter: 1 snapshot_after_train: false random_seed: 3"


def solver_of(net: str, more: str = "") -> Any:
    param = text_format.Parse(f"{SOLVER} {more} net_param {{ {net} }}", caffe_pb2.SolverParameter())
    return create_solver(param, CpuBackend(2))


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What other processes are told of the nets that are made."""
    lines: list[str] = []
    monkeypatch.setattr(type(PROCESSES), "wanted", property(lambda self: True))
    monkeypatch.setattr(PROCESSES, "foresee", lines.append)
    monkeypatch.setattr(PROCESSES, "submit", lambda: None)
    return lines


@pytest.mark.parametrize("more", ["", "type: 'Adam'", "clip_gradients: 1", "regularization_type: 'L1'"])
def test_the_kernels_foreseen_are_those_that_an_iteration_calls(described: list[str], more: str):
    solver = solver_of(NET, more)
    called = {entry.name for entry, *_ in record(solver.solve).kept}
    foreseen = ForeseenKernels()
    for line in described:
        foreseen.note(lambda line=line: run_described(line))
    names = {name for name, _ in foreseen.jobs()} - {ahead_of_time.LOOP_NAME}
    assert called
    assert called <= names
    assert len(names - called) <= 2, "what a layer does on the host may differ"


def test_a_net_with_a_users_code_is_not_described(described: list[str]):
    with pytest.raises(Exception, match="no_such_module"):
        solver_of('layer { name: "own" type: "Python" top: "x" python_param { module: "no_such_module" layer: "L" } }')
    assert not described


def test_foreseeing_runs_nothing(described: list[str], monkeypatch: pytest.MonkeyPatch):
    solver_of(NET)
    monkeypatch.setattr(ahead_of_time.Entry, "address", property(lambda self: pytest.fail(f"{self.name} is compiled")))
    foreseen = ForeseenKernels()
    foreseen.note(lambda: run_described(described[0]))
    assert foreseen.entries


def test_memory_of_foreseen_arrays_is_not_touched():
    backend = foreseeing_on_cpu(1)
    matrix = backend.zeros((3, 4))
    backend.fill(matrix, 1.0)
    backend.copy(np.ones((3, 4), np.float32), matrix)
    backend.from_host(np.ones((3, 4), np.float32), matrix)
    assert not matrix.any()
    assert not backend.to_host(np.ones(3, np.float32)).any()


def test_what_goes_wrong_leaves_what_was_foreseen_until_then():
    def work() -> None:
        CpuBackend(1).pool_max_forward(*([None] * 4))  # type: ignore[arg-type]

    foreseen = ForeseenKernels()
    foreseen.note(work)
    assert foreseen.jobs() == []


@kernel
def _double(begin: Int, end: Int, x: Floats) -> None:
    for i in range(begin, end):
        x[i] = 2 * x[i]


@pytest.mark.parametrize(("items", "pays"), [(10, False), (1000, True)])
def test_a_kernel_that_may_pay_is_foreseen_where_this_work_alone_pays_for_it(items: int, pays: bool):
    answers: list[bool] = []
    ForeseenKernels().note(lambda: answers.append(_double.should_compile(items, compiling=100)))
    assert answers == [pays]
    assert "_compiled" not in _double.__dict__


SHARED = """
import os, sys
from caffepy.backend.cpu.jit.ahead_of_time import compile_all
folder, dying = sys.argv[1], sys.argv[2]

def job(name):
    def work():
        if name == dying:
            os._exit(9)
        with open(f"{folder}/{name}.{os.getpid()}", "x"):
            pass
        if name == "c":
            raise ValueError("no code")
    return name, work

def done(name):
    with open(f"{folder}/done", "a") as file:
        file.write(name)

if dying:  # the first fork takes it, as this process goes on when that has ended
    fork = os.fork
    def late():
        child = fork()
        if child:
            os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        return child
    os.fork = late
compile_all([job(name) for name in "abcdef"], 3, done)
print(len(os.listdir("/proc/self/task")))
"""


def shared(folder: Path, dying: str = "") -> set[str]:
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SHARED, str(folder), dying]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "1"
    return {path.name.partition(".")[0] for path in folder.iterdir() if path.name != "done"}


def test_processes_share_the_kernels_and_do_each_once(tmp_path: Path):
    assert shared(tmp_path) == set("abcdef")
    assert sorted((tmp_path / "done").read_text()) == sorted("abcdef")


def test_a_process_that_dies_takes_one_kernel_with_it(tmp_path: Path):
    assert shared(tmp_path, "a") == set("bcdef")
    assert sorted((tmp_path / "done").read_text()) == sorted("bcdef")


def test_a_process_with_threads_is_not_forked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ahead_of_time.os, "listdir", lambda path: ["1", "2"])
    monkeypatch.setattr(ahead_of_time.os, "fork", lambda: pytest.fail("forked"))
    order: list[str] = []
    compile_all([("a", lambda: order.append("compile a")), ("b", lambda: order.append("compile b"))], 4, order.append)
    assert order == ["compile a", "a", "compile b", "b"]


@pytest.mark.parametrize("kept", [0, 1])
def test_what_cannot_be_kept_is_not_compiled(monkeypatch: pytest.MonkeyPatch, kept: int):
    """A disk that is full after some kernels: who waits for the others has to compile them all the same."""
    done: list[str] = []
    monkeypatch.setattr(ahead_of_time, "can_keep", lambda: len(done) < kept)
    compile_all([(name, lambda: None) for name in "abc"], 1, done.append)
    assert done == ["a", "b", "c"][:kept]


def test_without_further_processes_one_does_all(monkeypatch: pytest.MonkeyPatch):
    def fork() -> int:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(ahead_of_time, "_may_fork", lambda: True)
    monkeypatch.setattr(ahead_of_time.os, "fork", fork)
    done: list[str] = []
    compile_all([(name, lambda: None) for name in "abc"], 3, done.append)
    assert done == ["a", "b", "c"]
