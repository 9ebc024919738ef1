"""A small LeNet with dropout over an LMDB, and a way to train it, also with mpirun, that cannot hang the tests."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from processes import (
    MARK,
    PATIENCE,
    REPOSITORY,
    WHOLE_LINES,
    find_mpirun,
    program_environment,
    time_of_fault,
    wait_for_end,
)

from caffepy.formats.caffemodel import read_weights
from caffepy.formats.proto.caffe_pb2 import Datum, NetParameter
from caffepy.formats.solverstate import find_learned_net, read_solverstate

PROGRAM = REPOSITORY / "tests" / "parallel" / "program.py"
RANKS = PROGRAM.with_name("ranks.py")
LONG = 100000
"""Iterations that no test waits for."""
LIMIT = 60.0
"""Seconds from a fault to the end of every process: the 10 that are promised, and what a loaded machine adds."""

NET = """
name: "small"
layer { name: "data" type: "Data" top: "data" top: "label" include { phase: TRAIN }
        transform_param { scale: 0.00390625 }
        data_param { source: "train_lmdb" batch_size: %(batch)d backend: LMDB } }
layer { name: "data" type: "Data" top: "data" top: "label" include { phase: TEST }
        transform_param { scale: 0.00390625 }
        data_param { source: "train_lmdb" batch_size: 32 backend: LMDB } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv" param { lr_mult: 1 } param { lr_mult: 2 }
        convolution_param { num_output: 8 kernel_size: 5 weight_filler { type: "xavier" } } }
layer { name: "pool" type: "Pooling" bottom: "conv" top: "pool" pooling_param { pool: MAX kernel_size: 2 stride: 2 } }
layer { name: "fault" type: "Fault" bottom: "pool" top: "pool" }
layer { name: "ip1" type: "InnerProduct" bottom: "pool" top: "ip1"
        inner_product_param { num_output: 32 weight_filler { type: "xavier" } } }
layer { name: "relu" type: "ReLU" bottom: "ip1" top: "ip1" }
layer { name: "drop" type: "Dropout" bottom: "ip1" top: "ip1" dropout_param { dropout_ratio: 0.5 } }
layer { name: "ip2" type: "InnerProduct" bottom: "ip1" top: "ip2"
        inner_product_param { num_output: 10 weight_filler { type: "xavier" } } }
layer { name: "accuracy" type: "Accuracy" bottom: "ip2" bottom: "label" top: "accuracy" include { phase: TEST } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip2" bottom: "label" top: "loss" }
"""
SOLVER = """
net: "%(net)s" test_iter: 5 test_interval: 25 base_lr: 0.02 lr_policy: "inv" gamma: 0.001 power: 0.75 momentum: 0.9
weight_decay: 0.0005 display: 10 max_iter: %(iterations)d random_seed: 7 solver_mode: CPU
snapshot: %(snapshot)d snapshot_prefix: "%(prefix)s"
"""


SHARED_NET = NET.replace(
    'layer { name: "ip2" ',
    """layer { name: "again" type: "InnerProduct" bottom: "ip1" top: "again" param { name: "w" }
        inner_product_param { num_output: 32 bias_term: false weight_filler { type: "xavier" } } }
layer { name: "more" type: "InnerProduct" bottom: "again" top: "more" inner_product_param { num_output: 32
        weight_filler { type: "xavier" } } }
layer { name: "last" type: "InnerProduct" bottom: "more" top: "last" param { name: "w" }
        inner_product_param { num_output: 32 bias_term: false } }
layer { name: "ip2" """,
).replace('bottom: "ip1" top: "ip2"', 'bottom: "last" top: "ip2"')
"""The same with a parameter of two layers, of which the first is far from the last."""
NORMALISED_NET = NET.replace(
    'layer { name: "pool" ',
    """layer { name: "norm" type: "BatchNorm" bottom: "conv" top: "conv" }
layer { name: "scale" type: "Scale" bottom: "conv" top: "conv" scale_param { bias_term: true } }
layer { name: "pool" """,
)
"""The same with normalisation over the batch."""


@dataclass
class Outcome:
    """How a run ended.

    Args:
        status: the exit status.
        log: what it wrote to stdout and stderr.
        ended: when.
        folder: where it ran.
        prefix: of its snapshots.
    """

    status: int
    log: str
    ended: float
    folder: Path
    prefix: str
    fault: float | None = None
    """When the fault came, where it came from outside; else the log says it."""

    def weights(self, iteration: int) -> dict[str, np.ndarray]:
        """The parameters in the .caffemodel of an iteration."""
        net = NetParameter()
        net.ParseFromString((self.folder / f"{self.prefix}_iter_{iteration}.caffemodel").read_bytes())
        return {
            f"{layer.name}[{i}]": np.array(blob.data, np.float32)
            for layer in net.layer
            for i, blob in enumerate(layer.blobs)
        }

    def contents(self, iteration: int) -> tuple[bytes, bytes]:
        """All numbers of a snapshot, less its file's name and checksum and the net's text, which may differ."""
        state = read_solverstate(self.folder / f"{self.prefix}_iter_{iteration}.solverstate").message
        state.ClearField("learned_net")
        state.ClearField("crc32c")
        weights = b"".join(values.tobytes() for _, values in sorted(self.weights(iteration).items()))
        return weights, state.SerializeToString(deterministic=True)

    def seconds_after_fault(self) -> float:
        """From the injected fault to the end of all processes."""
        fault = self.fault or time_of_fault(self.log)
        assert fault, f"there was no fault:\n{self.log}"
        return self.ended - fault

    def snapshots(self) -> list[int]:
        """The iterations of all snapshots, each of which is whole.

        Raises:
            SnapshotError: one is not.
        """
        found = []
        for path in self.folder.glob(f"{self.prefix}_iter_*.solverstate"):
            state = read_solverstate(path).message
            read_weights(find_learned_net(state, path))
            found.append(int(path.stem.split("_iter_")[1]))
            assert state.iter == found[-1]
        return sorted(found)

    def errors(self) -> list[str]:
        """What was reported as an error, by the log or by the command line.

        Open MPI's launcher may put a blank of its own message before a rank's line.
        """
        lines = (line.lstrip() for line in self.log.splitlines() if re.match(r"\s*(E\d{4} |caffepy: error: )", line))
        return [line.split("] ", 1)[-1].removeprefix("caffepy: error: ") for line in lines]

    def logged(self, words: str) -> list[str]:
        """The log's messages that hold some words."""
        return [line.split("] ", 1)[1] for line in self.log.splitlines() if words in line]

    def scores(self) -> list[str]:
        """The test scores that were logged."""
        return [line.split("Test net output ")[1] for line in self.log.splitlines() if "Test net output" in line]


class SubprocessTraining:
    """A folder with data, in which training is started; several threads may use it.

    Args:
        folder: an empty one.
        threads: CPU threads of each solver; None: as many as training takes by itself.
    """

    def __init__(self, folder: Path, threads: int | None = None) -> None:
        self.folder = folder
        self._threads = () if threads is None else ("--threads", str(threads))
        self._numbers = itertools.count(1)
        self._writing = threading.Lock()
        write_lmdb(folder / "train_lmdb")

    def new_folder(self) -> Path:
        """An empty folder that nobody else has."""
        folder = self.folder / f"folder{next(self._numbers)}"
        folder.mkdir()
        return folder

    def cut_data(self, record: int) -> str:
        """The name of data of which a record is cut off in its middle; written once, whichever thread comes first."""
        name = f"cut{record}_lmdb"
        with self._writing:
            if not (self.folder / name).exists():
                write_lmdb(self.folder / name, cut=record)
        return name

    def start(
        self,
        *options: str,
        devices: tuple[str, ...] = ("--cpu",),
        ranks: int = 0,
        mpi: bool = True,
        batch: int = 64,
        iterations: int = 50,
        snapshot: int = 0,
        prefix: str | None = None,
        net_text: str = NET,
        solver_text: str = "",
        launch: Sequence[str] | None = None,
        program: Path = PROGRAM,
        **environment: str,
    ) -> tuple[subprocess.Popen[str], str]:
        """Start a run, with mpirun or without MPI where `ranks` are given; ``{rank}`` in an option becomes the rank's
        number.

        Where options of `caffepy launch` are given (`launch`), it is the parent. `program` has caffepy's command line.

        Returns the process, a group of its own, and the prefix of its snapshots.
        """
        number = next(self._numbers)
        prefix = prefix or f"run{number}"
        net, solver = f"net{number}.prototxt", f"solver{number}.prototxt"
        (self.folder / net).write_text(net_text % {"batch": batch})
        values = {"net": net, "iterations": iterations, "snapshot": snapshot, "prefix": prefix}
        (self.folder / solver).write_text(SOLVER % values + solver_text)
        command = [sys.executable, str(program), "train", "--solver", solver, *devices, *self._threads, *options]
        if launch is not None:
            parent = [sys.executable, "-m", "caffepy", "launch", "--oversubscribe", "--nproc-per-node", str(ranks or 1)]
            way = ["--mpirun", find_mpirun()] if mpi else ["--nnodes", "1"]
            command = [*parent, *way, *launch, "--", *command[1:]]
        elif ranks:
            launcher = [find_mpirun(), "-np"] if mpi else [sys.executable, str(RANKS)]
            command = [*launcher, str(ranks), *command]
        with self.log(prefix).open("w") as log:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=program_environment({MARK: self.mark(prefix), **WHOLE_LINES, **environment}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        return process, prefix

    def wait_for_snapshot(self, started: tuple[subprocess.Popen[str], str], iteration: int) -> None:
        """Wait until a run has written the snapshot of an iteration."""
        path = self.folder / f"{started[1]}_iter_{iteration}.solverstate"
        self._wait_for(started, path.exists, f"{path} does not appear")

    def wait_for_fault(self, started: tuple[subprocess.Popen[str], str]) -> None:
        """Wait until a process of a run has said that the fault came over it."""
        log = self.log(started[1])
        self._wait_for(started, lambda: time_of_fault(log.read_text(errors="replace")) is not None, "no fault comes")

    def _wait_for(self, started: tuple[subprocess.Popen[str], str], come: Callable[[], bool], otherwise: str) -> None:
        end = time.monotonic() + PATIENCE
        while not come():
            if time.monotonic() > end or started[0].poll() is not None:
                pytest.fail(f"{otherwise}:\n{self.finish(started, 0.1).log}")
            time.sleep(0.01)

    def finish(
        self, started: tuple[subprocess.Popen[str], str], timeout: float = PATIENCE, fault: float | None = None
    ) -> Outcome:
        """Wait for the end of all processes of a run; those that hang are killed and fail the test."""
        process, prefix = started
        log, ended = wait_for_end([process], self.mark(prefix), [self.log(prefix)], timeout)
        return Outcome(process.returncode, log, ended, self.folder, prefix, fault)

    def mark(self, prefix: str) -> str:
        """What a run's processes are known by."""
        return f"{self.folder}/{prefix}"

    def log(self, prefix: str) -> Path:
        """The file that a run's processes write to."""
        return self.folder / f"{prefix}.log"

    def train(self, *options: str, timeout: float = PATIENCE, **settings: object) -> Outcome:
        """Start a run and wait for its end; arguments as in `start`."""
        return self.finish(self.start(*options, **settings), timeout)  # type: ignore[arg-type]


def scores_of_snapshot(outcome: Outcome, iteration: int) -> list[str]:
    """What `caffepy test` prints of a run's snapshot, as training prints it."""
    weights = f"{outcome.prefix}_iter_{iteration}.caffemodel"
    model = f"net{outcome.prefix.removeprefix('run')}.prototxt"
    command = [sys.executable, str(PROGRAM), "test", "--cpu", "--model", model, "--weights", weights, "--iterations=5"]
    done = subprocess.run(
        command, cwd=outcome.folder, env=program_environment({}), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split("] ", 1)[1] for line in done.stderr.splitlines() if "] " in line]
    return [line for line in lines if line.startswith(("accuracy = ", "loss = "))]


def write_lmdb(folder: Path, count: int = 640, cut: int = -1) -> None:
    """Images (1, 12, 12) of ten classes, each a noisy pattern of its own; record `cut` is cut off in its middle."""
    lmdb = pytest.importorskip("lmdb")
    generator = np.random.default_rng(1)
    patterns = generator.integers(0, 200, (10, 1, 12, 12))
    with lmdb.open(str(folder), map_size=1 << 24) as environment, environment.begin(write=True) as transaction:
        for i in range(count):
            label = int(generator.integers(10))
            pixels = (patterns[label] + generator.integers(0, 56, (1, 12, 12))).astype(np.uint8)
            datum = Datum(channels=1, height=12, width=12, data=pixels.tobytes(), label=label)
            record = datum.SerializeToString()
            transaction.put(f"{i:08}".encode(), record[: len(record) // 2] if i == cut else record)


def assert_same_weights(actual: Outcome, expected: Outcome, iteration: int, tolerance: float = 1e-5) -> None:
    """Compare what two runs had learned by an iteration."""
    ours, theirs = actual.weights(iteration), expected.weights(iteration)
    assert ours.keys() == theirs.keys() and len(ours) >= 6
    for name, values in theirs.items():
        np.testing.assert_allclose(ours[name], values, rtol=0, atol=tolerance, err_msg=name)
