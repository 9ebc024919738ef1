"""A stop that is requested while one of several devices waits for its data ends training as if this iteration had not
begun, whether the devices run eagerly or replay graphs."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_graph_backend import FakeGraphBackend
from training import solver_param

from caffepy.backend.cpu.backend import CpuBackend
from caffepy.data.loader import DatumLoader
from caffepy.data.schedule import Shard
from caffepy.data.sources.lmdb_write import record_key, write_datums
from caffepy.options import ExecutionOptions
from caffepy.parallel import p2p_sync
from caffepy.parallel.communicators.local import LocalCommunicator, LocalGroup
from caffepy.parallel.device_threads import DeviceSpec
from caffepy.parallel.factory import Connector
from caffepy.parallel.options import TrainOptions
from caffepy.parallel.p2p_sync import P2PSync
from caffepy.proto import caffe_pb2
from caffepy.solvers import Action

SOLVER = """base_lr: 0.1 momentum: 0.9 lr_policy: "fixed" random_seed: 3 display: 4 average_loss: 3
snapshot_prefix: "{folder}/x" """
NET = """
layer {{ name: "data" type: "Data" top: "data" top: "label" transform_param {{ scale: 0.01 }}
  data_param {{ source: "{folder}/db" batch_size: 4 prefetch: 1 }} }}
layer {{ name: "ip" type: "InnerProduct" bottom: "data" top: "ip"
  inner_product_param {{ num_output: 5 weight_filler {{ type: "xavier" }} }} }}
layer {{ name: "bn" type: "BatchNorm" bottom: "ip" top: "bn" }}
layer {{ name: "drop" type: "Dropout" bottom: "bn" top: "bn" }}
layer {{ name: "ip2" type: "InnerProduct" bottom: "bn" top: "ip2"
  inner_product_param {{ num_output: 3 weight_filler {{ type: "xavier" }} }} }}
layer {{ name: "loss" type: "SoftmaxWithLoss" bottom: "ip2" bottom: "label" top: "loss" }}
"""
SECONDS = 600.0
"""How long a reader stalls that nobody waits for."""


class Streams(LocalCommunicator):
    """Plays NCCL: what it is asked for may be captured."""

    capturable = True


class StalledReader:
    """Keeps the reader of one device from its batch of a pass.

    Args:
        monkeypatch: undoes it.
        device: whose.
        number: the pass.
        iteration: which this pass belongs to.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: int, number: int, iteration: int) -> None:
        self.iteration = iteration
        self.syncs: list[P2PSync] = []
        self.waited = threading.Event()
        self.end = threading.Event()
        read = DatumLoader.load_bytes

        def stalling(loader: DatumLoader, firsts: Sequence[int], count: int, *others: Any) -> int:
            firsts = firsts[:1]  # a block of one pass
            if firsts[0] == (2 * number + device) * count:
                self.waited.set()
                self.end.wait(SECONDS)
            return read(loader, firsts, count, *others)

        monkeypatch.setattr(DatumLoader, "load_bytes", stalling)

    def wanted(self) -> tuple[Action, ...]:
        """What the devices hear while they wait for data: nothing before all are in that iteration."""
        solvers = [sync.solver for sync in self.syncs]
        arrived = all(solver is not None and solver.iteration == self.iteration for solver in solvers)
        return (Action.SNAPSHOT, Action.STOP) if self.waited.is_set() and arrived else ()


def train(
    monkeypatch: pytest.MonkeyPatch,
    texts: tuple[str, str],
    captured: bool,
    iterations: int,
    reader: StalledReader | None = None,
    snapshot: Path | None = None,
) -> list[P2PSync]:
    """Two devices' threads after training."""
    monkeypatch.setattr(p2p_sync, "create_backend", lambda *_: FakeGraphBackend() if captured else CpuBackend(1))
    param = solver_param(f"{texts[0]} max_iter: {iterations}", texts[1])
    options = TrainOptions(param, timeout=300, engine=ExecutionOptions(), snapshot=snapshot)
    group = LocalGroup(2, 300)
    kind = Streams if captured else LocalCommunicator
    connect = lambda index: kind(group, index)  # noqa: E731
    syncs: list[P2PSync] = []
    for index in range(2):
        spec = DeviceSpec(index, None, f"CPU {index}", 1, Shard(index, 2, 2))
        connector = Connector(partial(connect, index))
        syncs.append(P2PSync(spec, options, connector, lambda: Action.NONE, lambda sync: None))
        if reader is not None:
            syncs[-1].stop_wanted = reader.wanted
            reader.syncs = syncs
    for sync in syncs:
        sync.start()
    for sync in syncs:
        assert sync.ready.wait(300)
    root = syncs[0].solver
    assert root is not None
    for sync in syncs:
        sync.go(root.restored)
    if reader is not None:
        assert reader.waited.wait(300), [one.error for one in syncs]
        time.sleep(0.3)
    started = time.monotonic()
    for sync in syncs:
        assert sync.join(300)
        assert sync.error is None, [one.error for one in syncs]
    if reader is not None:
        assert time.monotonic() - started < SECONDS / 2
        reader.end.set()
    return syncs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Holds an LMDB."""
    rng = np.random.default_rng(3)
    datums = [caffe_pb2.Datum(channels=1, height=3, width=3, data=rng.bytes(9), label=n % 3) for n in range(50)]
    write_datums(tmp_path / "db", ((record_key(n), datum) for n, datum in enumerate(datums)))
    return tmp_path


def files(folder: Path, iteration: int) -> list[bytes]:
    return [(folder / f"x_iter_{iteration}{suffix}").read_bytes() for suffix in (".caffemodel", ".solverstate")]


@pytest.mark.parametrize("solver", ["", "iter_size: 2 clip_gradients: 0.5 ", 'lr_policy: "plateau" gamma: 0.5 '])
@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("stalled", [0, 5])
def test_a_stop_ends_one_devices_wait_for_data_and_leaves_the_last_whole_iteration(
    monkeypatch: pytest.MonkeyPatch, folder: Path, captured: bool, device: int, solver: str, stalled: int
) -> None:
    if "plateau" in solver:
        solver += "plateau_winsize: 2 plateau_winsize: 2 "
    texts = SOLVER.format(folder=folder)
    if "plateau" in solver:
        texts = texts.replace('lr_policy: "fixed"', "")
    texts_of_run = texts + solver, NET.format(folder=folder)
    expected = None
    if stalled:
        train(monkeypatch, texts_of_run, captured, stalled)
        expected = files(folder, stalled)
    passes = 2 if "iter_size" in solver else 1
    with monkeypatch.context() as patches:
        reader = StalledReader(patches, device, stalled * passes + passes - 1, stalled)
        syncs = train(patches, texts_of_run, captured, 12, reader)
    for sync in syncs:
        assert sync.solver is not None
        assert (sync.solver.iteration, sync.solver.stopped_early) == (stalled, True)
    assert sorted(path.name for path in folder.glob("*.solverstate"))[-1] == f"x_iter_{stalled}.solverstate"
    if expected is not None:
        assert files(folder, stalled) == expected
