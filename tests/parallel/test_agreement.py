"""Ranks that differ are refused by name before the first iteration; those that drift apart are found."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from processes import find_mpirun
from subprocess_training import NET, SOLVER, Outcome, SubprocessTraining

from caffepy.formats.proto.caffe_pb2 import Datum
from caffepy.formats.solverstate import read_solverstate

_AT_A_TIME = 3
_SETTINGS = {"iterations": 20, "snapshot": 0, "prefix": "refused"}


def with_solver(training: SubprocessTraining, name: str, written: str, instead: str) -> tuple[str, ...]:
    """The option that gives rank 1 another solver."""
    for rank, text in enumerate((SOLVER, SOLVER.replace(written, instead))):
        (training.folder / f"{name}{rank}.prototxt").write_text(text % {**_SETTINGS, "net": "refused.prototxt"})
    assert SOLVER.replace(written, instead) != SOLVER
    (training.folder / "refused.prototxt").write_text(NET % {"batch": 32})
    return "--solver", f"{name}{{rank}}.prototxt"


def write_other_lmdb(training: SubprocessTraining) -> None:
    """Folders of two ranks, with an LMDB of the same name each; the last record's label differs."""
    import lmdb

    for rank in range(2):
        folder = training.folder / f"other{rank}"
        shutil.copytree(training.folder / "train_lmdb", folder / "train_lmdb")
    path = str(training.folder / "other1" / "train_lmdb")
    with lmdb.open(path, map_size=1 << 24) as environment, environment.begin(write=True) as transaction:
        datum = Datum.FromString(transaction.get(b"00000639"))
        datum.label += 1
        transaction.put(b"00000639", datum.SerializeToString())


def other_lmdb(training: SubprocessTraining) -> Outcome:
    write_other_lmdb(training)
    return training.train(ranks=2, batch=32, FOLDER="other{rank}")


DIFFERENCES: dict[str, tuple[Callable[[SubprocessTraining], Outcome], str]] = {
    "base_lr": (
        lambda training: training.train(*with_solver(training, "rate", "base_lr: 0.02", "base_lr: 0.002"), ranks=2),
        r"base_lr is 0\.02 on RANK0 and 0\.002 on RANK1",
    ),
    "compression": (
        lambda training: training.train("--compression", "{none|fp16}", ranks=2, batch=32),
        r"--compression is none on RANK0 and fp16 on RANK1",
    ),
    "data": (
        other_lmdb,
        r"the hash of the last record of layer 'data' of the train net is [0-9a-f]{12} on RANK0 and [0-9a-f]{12} on "
        "RANK1",
    ),
}


@pytest.fixture(scope="module")
def refused(training: SubprocessTraining, request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Outcome]]]:
    """The chosen differences, tried beside each other."""
    find_mpirun()
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        chosen = [item for item in request.session.items if item.parent is request.node]
        names = [item.callspec.params["name"] for item in chosen if "refused" in getattr(item, "fixturenames", ())]
        yield {name: pool.submit(DIFFERENCES[name][0], training) for name in names}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_the_first_difference_is_named_before_the_first_iteration(
    refused: dict[str, Future[Outcome]], name: str
) -> None:
    outcome = refused[name].result()
    assert outcome.status == 2, outcome.log
    assert not outcome.logged("Starting Optimization") and not outcome.logged("Iteration"), outcome.log
    (message,) = outcome.errors()
    wanted = DIFFERENCES[name][1].replace("RANK0", r"rank 0 on \S+").replace("RANK1", r"rank 1 on \S+")
    assert re.match(f"{wanted}; all ranks must train alike: give them the same files and options$", message), message


# -- folders of the ranks' own ---------------------------------------------------------------------------


def assert_same_files(one: Path, other: Path) -> None:
    """Weights and history of two runs, bit by bit.

    Args:
        one: a .solverstate with its .caffemodel beside it.
        other: another.
    """
    assert one.with_suffix(".caffemodel").read_bytes() == other.with_suffix(".caffemodel").read_bytes()
    first, second = read_solverstate(one).message, read_solverstate(other).message
    assert len(first.history) == 6
    for state in (first, second):
        state.ClearField("learned_net")  # of another folder, and so is the checksum another one
        state.ClearField("crc32c")
    assert first == second


def test_only_the_root_needs_snapshots_and_weights(training: SubprocessTraining) -> None:
    """Rank 1's folder has neither the weights to start from, nor snapshots, nor a folder for them."""
    find_mpirun()
    start = training.train(iterations=1)
    (training.folder / "saved").mkdir()
    folder = training.new_folder()
    (folder / "rank1").mkdir()
    (folder / "rank0" / "saved").mkdir(parents=True)
    for target in (training.folder, folder / "rank0"):
        shutil.copy(training.folder / f"{start.prefix}_iter_1.caffemodel", target / "start.caffemodel")

    def run(name: str, where: Path, *options: str) -> Path:
        outcome = training.train(
            *options,
            ranks=2,
            batch=32,
            iterations=20,
            snapshot=10,
            prefix=f"saved/{name}",
            FOLDER=str(where),
            solver_text='average_loss: 3 weights: "start.caffemodel"',
        )
        assert outcome.status == 0, outcome.log
        assert outcome.logged("Restoring previous" if options else "Finetuning from start.caffemodel"), outcome.log
        return Path(str(where).replace("{rank}", "0")) / "saved" / f"{name}_iter_20.solverstate"

    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(run, "together", training.folder), pool.submit(run, "apart", folder / "rank{rank}")]
        together, apart = (done.result() for done in runs)
    assert_same_files(together, apart)
    shutil.copy(training.folder / "saved" / "together_iter_10.caffemodel", folder / "rank0" / "saved")
    state = training.folder / "saved" / "together_iter_10.solverstate"
    shutil.copy(state, folder / "rank0" / "saved" / "resumed_iter_10.solverstate")
    assert_same_files(together, run("resumed", folder / "rank{rank}", "--snapshot", "auto"))
    assert not list((folder / "rank1").iterdir())


# -- replicas --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "options", "snapshot", "found", "names"),
    [
        (2, ("--check-replicas", "5"), 0, 15, (r"rank 0 on \S+, device CPU", r"rank 1 on \S+, device CPU")),
        (0, ("--cpu-solvers", "3"), 20, 20, ("device CPU 0", "device CPU 1")),
    ],
    ids=["ranks", "threads"],
)
def test_a_weight_that_changes_on_one_device_ends_training(
    training: SubprocessTraining,
    ranks: int,
    options: tuple[str, ...],
    snapshot: int,
    found: int,
    names: tuple[str, str],
) -> None:
    outcome = training.train(*options, ranks=ranks, batch=32, snapshot=snapshot, FAULT="change 1 12")
    assert outcome.status == 1, outcome.log
    (message,) = outcome.errors()
    wanted = (
        rf"iteration {found}: {names[1]} no longer has the parameters of {names[0]}: parameter 0 of layer 'ip1' is the "
        "first of 1 that differ; go on from a snapshot before this iteration"
    )
    assert re.search(wanted, message), message
    assert outcome.snapshots() == []


def test_replicas_that_agree_are_left_alone(training: SubprocessTraining) -> None:
    plain, checked = (
        training.train("--cpu-solvers", "2", *options, iterations=12) for options in ((), ("--check-replicas", "1"))
    )
    assert plain.status == checked.status == 0, checked.log
    for name, values in plain.weights(12).items():
        np.testing.assert_array_equal(checked.weights(12)[name], values)


@pytest.mark.mpi
def test_rank_0_finds_snapshots_of_another_net(training: SubprocessTraining) -> None:
    """Before training; the other rank ends with it. Rank 0 alone has the files."""
    first = training.train(iterations=2)
    other = NET.replace("num_output: 32", "num_output: 33")
    assert other != NET
    outcome = training.train(ranks=2, batch=32, iterations=2, prefix=first.prefix, net_text=other)
    assert outcome.status == 2
    (message,) = outcome.errors()
    assert f"{first.prefix}_iter_2.caffemodel is of another net" in message and "--overwrite" in message
    assert "Iteration 0" not in outcome.log
    again = training.train("--overwrite", ranks=2, batch=32, iterations=2, prefix=first.prefix, net_text=other)
    assert again.status == 0, again.log
    assert "is the newest of the snapshots" not in again.log
