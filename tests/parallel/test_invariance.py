"""The same global batch gives the same training, however it is spread over threads and processes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from processes import find_mpirun
from subprocess_training import NET, NORMALISED_NET, SHARED_NET, Outcome, SubprocessTraining, assert_same_weights

ITERATIONS = 50


@pytest.fixture(scope="module")
def alone(training: SubprocessTraining) -> Outcome:
    """One process, one thread, batch 64: what all others are compared with."""
    outcome = training.train(batch=64, iterations=ITERATIONS, snapshot=20)
    assert outcome.status == 0, outcome.log
    return outcome


def test_the_small_net_learns(alone: Outcome) -> None:
    # Otherwise equal weights would say little.
    accuracy = [float(score.split("= ")[1]) for score in alone.scores() if "accuracy" in score]
    assert accuracy[0] < 0.4 < 0.9 < accuracy[-1]


@pytest.mark.parametrize(("ranks", "threads"), [(0, 2), (2, 1), (2, 2), (0, 4)])
def test_threads_and_ranks_train_as_one_device_does(
    training: SubprocessTraining, alone: Outcome, ranks: int, threads: int
) -> None:
    if ranks:
        find_mpirun()
    options = ("--cpu-solvers", str(threads)) if threads > 1 else ()
    outcome = training.train(*options, ranks=ranks, batch=64 // max(ranks, 1), iterations=ITERATIONS)
    assert outcome.status == 0, outcome.log
    assert_same_weights(outcome, alone, ITERATIONS)
    assert outcome.scores() == alone.scores()
    devices = max(ranks, 1) * threads
    assert len(outcome.logged("Solver performance on device CPU")) == devices
    assert len(outcome.logged("Overall performance: ")) == 1
    assert (
        outcome.logged("Batch: ")[-1] == f"Batch: {64 // devices} per device, {64 // max(ranks, 1)} per rank, 64 in all"
    )


def test_ranks_without_mpi_train_as_one_device_does(training: SubprocessTraining, alone: Outcome) -> None:
    outcome = training.train(ranks=4, mpi=False, batch=16, iterations=ITERATIONS, FORBID="mpi4py")
    assert outcome.status == 0, outcome.log
    assert_same_weights(outcome, alone, ITERATIONS)
    assert outcome.scores() == alone.scores()
    assert len(outcome.logged("Solver performance on device CPU")) == 4


@pytest.mark.parametrize(
    ("threads", "solver", "net", "parts"),
    [
        (1, "layer_wise_reduce: true", "", "2"),
        (1, "layer_wise_reduce: false", "", None),
        (1, "", "reduce_buckets: 0", "6" if Path("/dev/shm").is_dir() else None),
        (2, "", "", None),
        (2, "layer_wise_reduce: true", "reduce_buckets: 2", "2"),
    ],
)
def test_gradients_are_exchanged_during_the_backward_pass_as_the_prototxts_say(
    training: SubprocessTraining, alone: Outcome, threads: int, solver: str, net: str, parts: str | None
) -> None:
    """Ranks of one machine do so by themselves where each has one thread and they share memory."""
    outcome = training.train(
        "--cpu-solvers",
        str(threads),
        ranks=2,
        batch=32,
        iterations=20,
        snapshot=20,
        net_text=net + NET,
        solver_text=solver,
    )
    assert outcome.status == 0, outcome.log
    assert_same_weights(outcome, alone, 20)
    told = [] if parts is None else [f"gradients are exchanged in {parts} parts during the backward pass"]
    assert outcome.logged("gradients are exchanged") == told


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_compressed_gradients_train_nearly_the_same(
    training: SubprocessTraining, alone: Outcome, compression: str
) -> None:
    outcome = training.train("--compression", compression, ranks=2, batch=32, iterations=20, snapshot=20)
    assert outcome.status == 0, outcome.log
    assert_same_weights(outcome, alone, 20, 1e-2)
    compressed, whole = outcome.weights(20), alone.weights(20)
    assert any(np.abs(compressed[name] - whole[name]).max() > 1e-6 for name in whole), "nothing was rounded"


def test_gradients_that_do_not_fit_into_float16_are_skipped_counted_and_end_training(
    training: SubprocessTraining,
) -> None:
    net = NET.replace('top: "loss" }', 'top: "loss" loss_weight: 1e8 }')
    outcome = training.train(
        "--compression", "fp16", "--max-skipped", "12", ranks=2, batch=32, iterations=20, net_text=net
    )
    assert outcome.status == 1, outcome.log
    assert "RuntimeWarning" not in outcome.log
    assert outcome.logged("skipped since") == [
        f"Iteration {iteration}, {count} skipped since the last display, because gradients were not finite"
        for iteration, count in ((0, "1 update"), (10, "10 updates"))
    ]
    (message,) = outcome.errors()
    assert "iteration 11: 12 updates in a row were skipped" in message
    assert "begins in layer 'ip2' (InnerProduct); " in message and "--compression bf16" in message


def test_shared_parameters_are_exchanged_when_their_last_layer_is_done(training: SubprocessTraining) -> None:
    one = training.train(iterations=20, net_text=SHARED_NET)
    two = training.train(ranks=2, batch=32, iterations=20, net_text=SHARED_NET, solver_text="layer_wise_reduce: true")
    assert one.status == two.status == 0, two.log
    assert_same_weights(two, one, 20)


def test_several_passes_are_exchanged_once(training: SubprocessTraining, alone: Outcome) -> None:
    outcome = training.train(ranks=2, batch=16, iterations=20, solver_text="iter_size: 2 layer_wise_reduce: true")
    single = training.train(batch=32, iterations=20, solver_text="iter_size: 2")
    assert outcome.status == single.status == 0, outcome.log
    assert_same_weights(outcome, single, 20)


@pytest.mark.parametrize("kind", ["BatchNorm", "BN"])
def test_synchronised_statistics_are_those_of_one_device(training: SubprocessTraining, kind: str) -> None:
    bn = 'type: "BN" bn_param { slope_filler { value: 1 } }'
    net = NORMALISED_NET if kind == "BatchNorm" else NORMALISED_NET.replace('type: "BatchNorm"', bn)
    one = training.train(iterations=30, net_text=net)
    assert one.status == 0, one.log
    results = [
        training.train("--cpu-solvers", "2", *extra, ranks=2, batch=32, iterations=30, net_text=net)
        for extra in (("--sync-bn",), ())
    ]
    assert results[0].status == 0, results[0].log
    assert_same_weights(results[0], one, 30, 2e-4)
    own, theirs = results[1].weights(30), one.weights(30)
    assert any(np.abs(own[name] - theirs[name]).max() > 1e-3 for name in theirs), "per device should differ"


def test_ignored_labels_are_counted_over_all_devices(training: SubprocessTraining) -> None:
    net = NET.replace('top: "loss" }', 'top: "loss" loss_param { ignore_label: 3 } }')
    runs = [
        training.train(
            "--cpu-solvers", str(threads), ranks=ranks, batch=64 // max(ranks, 1), iterations=20, net_text=net
        )
        for ranks, threads in ((0, 1), (0, 2), (2, 1))
    ]
    shown = [[line.split("loss = ")[1] for line in run.logged("iters), loss = ")] for run in runs]
    for run, losses in zip(runs, shown, strict=True):
        assert run.status == 0, run.log
        assert_same_weights(run, runs[0], 20)
        np.testing.assert_allclose(np.array(losses, float), np.array(shown[0], float), rtol=1e-5)


def test_an_mpi_that_the_main_thread_alone_may_call(training: SubprocessTraining, alone: Outcome) -> None:
    outcome = training.train(
        "--cpu-solvers", "2", ranks=2, batch=32, iterations=20, snapshot=20, MPI4PY_RC_THREAD_LEVEL="funneled"
    )
    assert outcome.status == 0, outcome.log
    assert_same_weights(outcome, alone, 20)


def test_a_run_is_resumed_by_another_number_of_devices(training: SubprocessTraining, alone: Outcome) -> None:
    for options, ranks in ((("--cpu-solvers", "2"), 0), ((), 2)):
        outcome = training.train(
            *options,
            "--snapshot",
            f"{alone.prefix}_iter_20.solverstate",
            ranks=ranks,
            batch=64 // max(ranks, 1),
            iterations=40,
        )
        assert outcome.status == 0, outcome.log
        assert_same_weights(outcome, alone, 40)


def test_resuming_with_the_same_devices_gives_the_same_bytes(training: SubprocessTraining) -> None:
    whole = training.train("--cpu-solvers", "2", iterations=40, snapshot=20)
    part = training.train("--cpu-solvers", "2", "--snapshot", f"{whole.prefix}_iter_20.solverstate", iterations=40)
    assert whole.status == part.status == 0, part.log
    for name, values in whole.weights(40).items():
        assert part.weights(40)[name].tobytes() == values.tobytes(), name


def test_weights_that_the_root_alone_reads_reach_all(training: SubprocessTraining, alone: Outcome) -> None:
    started = [
        training.train(*options, "--weights", f"{alone.prefix}_iter_50.caffemodel", iterations=10)
        for options in ((), ("--cpu-solvers", "2"))
    ]
    assert_same_weights(started[1], started[0], 10)
    assert float(started[1].scores()[0].split("= ")[1]) > 0.9


def test_an_uneven_batch_is_rounded_up_with_a_warning(training: SubprocessTraining) -> None:
    outcome = training.train("--cpu-solvers", "2", batch=31, iterations=2)
    assert outcome.status == 0, outcome.log
    assert outcome.logged("not divisible") == [
        "layer 'data': batch_size 31 is not divisible by 2 devices: each takes 16, 32 together"
    ]
