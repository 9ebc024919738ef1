"""Solvers of several ranks, threads of the test, train as one solver on the whole batch does."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from process_groups import raise_first, run_tcp
from training import build_solver, solver_param, weights_of

from caffepy.backend import create_backend
from caffepy.distributed import DistributedDataParallel, ProcessGroup
from caffepy.errors import PeerError, UserError
from caffepy.training.solver import Solver, create_solver

NET = """
name: "small" %(more)s
layer { name: "data" type: "DummyData" top: "data" top: "target" dummy_data_param {
  shape { dim: [%(batch)d, 5] } shape { dim: [%(batch)d, 2] }
  data_filler { type: "gaussian" } data_filler { type: "uniform" } } }
layer { name: "ip1" type: "InnerProduct" bottom: "data" top: "ip1"
        inner_product_param { num_output: 7 weight_filler { type: "xavier" } } }
layer { name: "bn" type: "BatchNorm" bottom: "ip1" top: "bn" }
layer { name: "ip2" type: "InnerProduct" bottom: "bn" top: "ip2"
        inner_product_param { num_output: 2 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "EuclideanLoss" bottom: "ip2" bottom: "target" top: "loss" }
"""
SOLVER = 'base_lr: 0.05 lr_policy: "fixed" momentum: 0.9 max_iter: 5 snapshot_after_train: false random_seed: %d '
Work = Callable[[ProcessGroup, Solver], Any]


def run(work: Work, ranks: int = 2, batch: int = 4, more: str = "", settings: str = "", seed: int = 3) -> list[Any]:
    """What `work` returns on each rank, or its error; the ranks' solvers begin with different weights."""

    def start(group: ProcessGroup) -> Any:
        backend = create_backend(None, 1)
        param = solver_param(SOLVER % (seed + group.rank) + settings, NET % {"batch": batch, "more": more})
        with backend.activate():
            solver = create_solver(param, backend)
        try:
            return work(group, solver)
        finally:
            solver.close()

    return run_tcp(ranks, start, timeout=300)


def train(group: ProcessGroup, solver: Solver) -> dict[str, np.ndarray]:
    DistributedDataParallel(solver, process_group=group, sync_bn=True)
    solver.solve()
    return weights_of(solver.net)


@pytest.mark.parametrize(
    ("ranks", "more", "settings"),
    [
        (2, "", ""),
        (2, "reduce_buckets: 3", ""),
        (2, "", "layer_wise_reduce: false"),
        (2, "", "iter_size: 2 clip_gradients: 0.5"),
        (4, "", 'type: "Nesterov"'),
    ],
)
def test_ranks_train_as_one_solver_on_the_whole_batch(ranks: int, more: str, settings: str) -> None:
    found = raise_first(run(train, ranks, 8 // ranks, more, settings))
    with build_solver(SOLVER % 3 + settings, NET % {"batch": 8, "more": more}) as alone:
        alone.solve()
        wanted = weights_of(alone.net)
    for name in wanted:
        for weights in found[1:]:
            np.testing.assert_array_equal(weights[name], found[0][name])
        np.testing.assert_allclose(found[0][name], wanted[name], rtol=2e-4, atol=2e-5)


def test_gradients_are_exchanged_during_the_backward_pass(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        raise_first(run(train, settings="layer_wise_reduce: true", more="reduce_buckets: 2"))
    assert caplog.text.count("gradients are exchanged in 2 parts during the backward pass") == 1


def test_a_callback_stops_all_ranks_in_one_iteration() -> None:
    def work(group: ProcessGroup, solver: Solver) -> tuple[int, bool]:
        DistributedDataParallel(solver, process_group=group)
        if group.rank == 1:
            solver.add_callback(lambda solver: solver.iteration == 2)
        solver.step(50)
        return solver.iteration, solver.stopped_early

    assert raise_first(run(work)) == [(3, True)] * 2


def test_tests_are_shared_and_the_root_alone_writes(tmp_path: Any) -> None:
    def work(group: ProcessGroup, solver: Solver) -> tuple[float, bool]:
        DistributedDataParallel(solver, process_group=group)
        solver.step(1)
        solver.snapshot()
        return float(solver.test_all()[0]["loss"]), solver.callback.is_root

    more = f'test_iter: 4 test_interval: 100 snapshot_prefix: "{tmp_path}/s"'
    (first, root), (second, other) = raise_first(run(work, settings=more))
    assert (first == second, root, other) == (True, True, False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s_iter_1.caffemodel", "s_iter_1.solverstate"]


def test_one_process_alone_trains_alone() -> None:
    def work(group: ProcessGroup, solver: Solver) -> int:
        DistributedDataParallel(solver, process_group=group)
        solver.step(2)
        return solver.callback.world_size

    assert raise_first(run(work, ranks=1)) == [1]


def test_solvers_that_differ_are_named() -> None:
    def work(group: ProcessGroup, solver: Solver) -> None:
        solver.param.max_iter += group.rank
        DistributedDataParallel(solver, process_group=group)

    wanted = r"max_iter is 5 on rank 0 .* and 6 on rank 1 .*; give all processes the same solver, net and snapshot"
    assert all(re.search(wanted, str(error)) for error in run(work))


def test_a_solver_is_parallel_once() -> None:
    def work(group: ProcessGroup, solver: Solver) -> None:
        DistributedDataParallel(solver, process_group=group)
        with pytest.raises(UserError, match="this solver already trains with other devices"):
            DistributedDataParallel(solver, process_group=group)

    raise_first(run(work))


def test_devices_that_are_not_the_solvers_are_named() -> None:
    def work(group: ProcessGroup, solver: Solver) -> None:
        for arguments in ({"device_ids": [0]}, {"output_device": 0}):
            with pytest.raises(UserError, match="is .*0.*, but the solver is on the CPU: leave it out"):
                DistributedDataParallel(solver, process_group=group, **arguments)  # type: ignore[arg-type]
        with pytest.raises(UserError, match="module is a Net; give DistributedDataParallel a solver"):
            DistributedDataParallel(solver.net, process_group=group)  # type: ignore[arg-type]
        DistributedDataParallel(solver, device_ids=None, output_device=None, process_group=group)

    raise_first(run(work, ranks=1))


def test_the_end_of_a_rank_ends_the_others_waits() -> None:
    def work(group: ProcessGroup, solver: Solver) -> None:
        DistributedDataParallel(solver, process_group=group)
        solver.step(1)
        if group.rank == 1:
            raise ValueError("injected")
        solver.step(1000)

    first, second = run(work)
    assert isinstance(first, PeerError)
    assert re.search("rank 1 .*ValueError: injected", str(first))  # rank 0 says that it waited, where it did
    assert str(second) == "injected"


def test_a_rank_that_does_not_come_is_given_up() -> None:
    given_up = threading.Event()

    def work(group: ProcessGroup, solver: Solver) -> None:
        DistributedDataParallel(solver, process_group=group)
        group.timeout = 1.0
        if group.rank == 1:
            given_up.wait(300)
            return
        try:
            solver.step(1)
        finally:
            given_up.set()

    first, _ = run(work)
    assert isinstance(first, PeerError)
    assert re.search(r"^rank 0 [^:]*: [^:]*: has waited \d+ s for rank 1 on .*, which has started", str(first))
