"""NCCL objects of ranks that are threads of the test: the parameters and gradients that they exchange."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from process_groups import raise_first, run_threads

from caffepy.errors import UserError
from caffepy.pycaffe import solver as nccl
from caffepy.pycaffe.solver import NCCL, SGDSolver, has_nccl

NET = """
layer { name: "data" type: "DummyData" top: "data" top: "label" dummy_data_param {
  shape { dim: [4, 3] } shape { dim: 4 } data_filler { type: "gaussian" } data_filler { type: "constant" } } }
layer { name: "ip1" type: "InnerProduct" bottom: "data" top: "ip1"
        inner_product_param { num_output: 5 weight_filler { type: "xavier" } } }
layer { name: "relu1" type: "ReLU" bottom: "ip1" top: "ip1" }
layer { name: "ip2" type: "InnerProduct" bottom: "ip1" top: "ip2"
        inner_product_param { num_output: 2 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip2" bottom: "label" top: "loss" }
"""
RANKS = 2


class _Modes(threading.local):
    """The modes of processes, each a thread here."""

    gpu, solver_count, solver_rank = False, RANKS, 0


@pytest.fixture
def solver_file(tmp_path):
    (tmp_path / "net.prototxt").write_text(NET)
    path = tmp_path / "solver.prototxt"
    path.write_text(
        f'net: "{tmp_path}/net.prototxt" base_lr: 0.1 lr_policy: "fixed" max_iter: 3 random_seed: 5 '
        "snapshot_after_train: false "
    )
    return path


def run_ranks(monkeypatch, solver_file, action, settings=""):
    """What `action` returns for each rank's solver and NCCL object; solvers are made one after the other."""
    modes = _Modes()
    solver_file.write_text(solver_file.read_text() + settings)
    solvers = [SGDSolver(solver_file) for _ in range(RANKS)]
    uid = NCCL.new_uid()

    def work(rank):
        modes.solver_rank = rank
        end = NCCL(solvers[rank], uid)
        try:
            return action(rank, solvers[rank], end)
        finally:
            end._group.destroy()

    with monkeypatch.context() as patch:
        patch.setattr(nccl, "mode", modes)
        return raise_first(run_threads(RANKS, work))


def parameters(solver):
    return [blob.data.copy() for blobs in solver.net.params.values() for blob in blobs]


def gradients(solver):
    return [blob.diff.copy() for blobs in solver.net.params.values() for blob in blobs]


def test_bcast_gives_the_parameters_of_rank_0(monkeypatch, solver_file):
    def action(rank, solver, end):
        for blob in (blob for blobs in solver.net.params.values() for blob in blobs):
            blob.data[...] += rank + 1
        before = parameters(solver)
        end.bcast()
        return before, parameters(solver)

    (first, first_after), (second, second_after) = run_ranks(monkeypatch, solver_file, action)
    for before, other, *after in zip(first, second, first_after, second_after, strict=True):
        assert not np.array_equal(before, other)
        for found in after:
            np.testing.assert_array_equal(found, before)


@pytest.mark.parametrize("layer_wise", [True, False])
def test_gradients_become_the_average(monkeypatch, solver_file, layer_wise):
    """Once in parts while the pass goes on, and once as a whole behind it."""

    def action(rank, solver, end):
        end.bcast()
        if layer_wise:
            solver.net.after_backward(end)
        own: list[np.ndarray] = []
        solver.net.after_backward(lambda layer: own.extend(gradients(solver)) if layer == 0 else None)
        solver.net.clear_param_diffs()
        solver.net.blobs["data"].data[...] = np.arange(12).reshape(4, 3) * (rank + 1)
        solver.net.forward(start="ip1")
        solver.net.backward()
        end.on_gradients_ready()
        return own, gradients(solver), end._reducer.overlaps

    results = run_ranks(monkeypatch, solver_file, action, f"layer_wise_reduce: {str(layer_wise).lower()}")
    assert [wise for *_, wise in results] == [layer_wise] * RANKS
    for first, second in zip(*(averages for _, averages, _ in results), strict=True):
        np.testing.assert_array_equal(first, second)
    if not layer_wise:
        own = [gradient for gradient, _, _ in results]
        for a, b, average in zip(*own, results[0][1], strict=True):
            np.testing.assert_allclose(average, (a + b) / 2, rtol=1e-6)
            assert not np.array_equal(a, b)


def test_parts_and_whole_give_the_same_training(monkeypatch, solver_file):
    def train(parts):
        def action(rank, solver, end):
            end.bcast()
            solver.add_callback(end)
            if parts:
                solver.net.after_backward(end)
            solver.step(3)
            return parameters(solver)

        return action

    kept = solver_file.read_text()
    trained = []
    for parts in (True, False):
        solver_file.write_text(kept)
        trained.append(run_ranks(monkeypatch, solver_file, train(parts)))
    for rank in range(RANKS):
        for found, expected in zip(trained[0][rank], trained[1][0], strict=True):
            np.testing.assert_array_equal(found, expected)


def test_passes_of_one_iteration_are_exchanged_once(monkeypatch, solver_file):
    """With iter_size 2 nothing may be exchanged before the second pass has been added."""

    def action(rank, solver, end):
        end.bcast()
        solver.add_callback(end)
        solver.net.after_backward(end)
        solver.step(1)
        assert not end._reducer.overlaps
        return parameters(solver)

    first, second = run_ranks(monkeypatch, solver_file, action, "iter_size: 2 ")
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


def test_parts_are_begun_before_the_pass_has_ended(monkeypatch, solver_file):
    def action(rank, solver, end):
        begun = []
        solver.net.after_backward(end)
        solver.net.after_backward(lambda layer: begun.append(end._reducer._next_bucket))
        solver.net.forward()
        solver.net.backward()
        end.on_gradients_ready()
        return begun

    for begun in run_ranks(monkeypatch, solver_file, action):
        assert begun[0] == 0
        assert begun[-1] == 2


def test_a_process_alone_keeps_its_gradients(monkeypatch, solver_file):
    solver = SGDSolver(solver_file)
    monkeypatch.setattr(nccl, "mode", SimpleNamespace(gpu=False, solver_count=1, solver_rank=0))
    end = NCCL(solver, NCCL.new_uid())
    solver.net.forward()
    solver.net.backward()
    own = gradients(solver)
    end.bcast()
    end.on_gradients_ready()
    end._group.destroy()
    for found, expected in zip(gradients(solver), own, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_uids_are_bytes_and_differ():
    assert has_nccl()
    assert isinstance(NCCL.new_uid(), bytes)
    assert NCCL.new_uid() != NCCL.new_uid()


@pytest.mark.parametrize("uid", [b"", b"x" * 128, b"/etc/passwd", "text", None])
def test_other_uids_are_refused(solver_file, uid):
    with pytest.raises(UserError, match=r"NCCL needs the uid that caffe.NCCL.new_uid\(\) gave"):
        NCCL(SGDSolver(solver_file), uid)


def test_what_is_no_solver_is_a_type_error_as_in_boost_python():
    with pytest.raises(TypeError, match=r"NCCL\(None\)"):
        NCCL(None, "x")
