"""A stop that is requested while one of several devices waits for its data takes effect when the data come: all devices
make the same iterations, whether they run eagerly or replay graphs."""

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
from caffepy.data.sharding import Shard
from caffepy.data.sources.databases import record_key, write_datums
from caffepy.distributed.communicators.local import LocalCommunicator, ThreadGroup
from caffepy.distributed.connect import Connector
from caffepy.distributed.device_threads import DeviceSpec
from caffepy.formats.proto import caffe_pb2
from caffepy.training import p2p_sync
from caffepy.training.callback import Action
from caffepy.training.graph_executor import IN_FLIGHT
from caffepy.training.options import TrainOptions
from caffepy.training.p2p_sync import P2PSync
from caffepy.utils.options import ExecutionOptions

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


class Streams(LocalCommunicator):
    """Plays NCCL: what it is asked for may be captured."""

    capturable = True


class StalledReader:
    """Keeps the reader of one device from its batch of a pass until `end` is set.

    Args:
        monkeypatch: undoes it.
        device: whose.
        number: the pass.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: int, number: int) -> None:
        self.waited = threading.Event()
        self.end = threading.Event()
        read = DatumLoader.load_bytes

        def stalling(loader: DatumLoader, firsts: Sequence[int], count: int, *others: Any) -> int:
            firsts = firsts[:1]  # a block of one pass
            if firsts[0] == (2 * number + device) * count:
                self.waited.set()
                assert self.end.wait(300)
            return read(loader, firsts, count, *others)

        monkeypatch.setattr(DatumLoader, "load_bytes", stalling)


class Training:
    """Two devices' threads, which train when they are made; the first one takes the signals.

    Args:
        monkeypatch: undoes it.
        texts: of solver and net.
        captured: whether iterations are replayed as graphs.
        iterations: how many.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, texts: tuple[str, str], captured: bool, iterations: int
    ) -> None:
        monkeypatch.setattr(p2p_sync, "create_backend", lambda *_: FakeGraphBackend() if captured else CpuBackend(1))
        param = solver_param(f"{texts[0]} max_iter: {iterations}", texts[1])
        options = TrainOptions(param, timeout=300, engine=ExecutionOptions())
        group = ThreadGroup(2, 300)
        kind = Streams if captured else LocalCommunicator
        self.requests: list[Action] = []
        self.syncs: list[P2PSync] = []
        for index in range(2):
            spec = DeviceSpec(index, None, f"CPU {index}", 1, Shard(index, 2, 2))
            request = (lambda: Action.NONE) if index else self._take_request
            connector = Connector(partial(kind, group, index))
            self.syncs.append(P2PSync(spec, options, connector, request, lambda sync: None))
        for sync in self.syncs:
            sync.start()
        for sync in self.syncs:
            assert sync.ready.wait(300)
        for sync in self.syncs:
            sync.go(None)

    def _take_request(self) -> Action:
        return self.requests.pop(0) if self.requests else Action.NONE

    def reach(self, iteration: int) -> None:
        """Wait until all devices have made so many iterations: batches are read ahead."""
        end = time.monotonic() + 300
        while any(sync.heartbeat.iteration() < iteration for sync in self.syncs):
            assert time.monotonic() < end, [sync.error for sync in self.syncs]
            time.sleep(0.01)

    def join(self) -> tuple[int, bool]:
        """Wait for the end; which iteration all devices have come to, and whether they were stopped there."""
        for sync in self.syncs:
            assert sync.join(300)
            assert sync.error is None, [one.error for one in self.syncs]
        solvers = [sync.solver for sync in self.syncs if sync.solver is not None]
        (end,) = {(solver.iteration, solver.stopped_early) for solver in solvers}
        assert len(solvers) == 2
        return end


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Holds an LMDB."""
    rng = np.random.default_rng(3)
    datums = [caffe_pb2.Datum(channels=1, height=3, width=3, data=rng.bytes(9), label=n % 3) for n in range(50)]
    write_datums(tmp_path / "db", ((record_key(n), datum) for n, datum in enumerate(datums)))
    return tmp_path


def files(folder: Path, iteration: int) -> list[bytes]:
    return [(folder / f"x_iter_{iteration}{suffix}").read_bytes() for suffix in (".caffemodel", ".solverstate")]


@pytest.mark.parametrize("solver", ["", "iter_size: 2 clip_gradients: 0.5 "])
@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("stalled", [0, 5])
def test_a_stop_takes_effect_when_the_data_come(
    monkeypatch: pytest.MonkeyPatch, folder: Path, captured: bool, device: int, solver: str, stalled: int
) -> None:
    texts = SOLVER.format(folder=folder) + solver, NET.format(folder=folder)
    passes = 2 if "iter_size" in solver else 1
    with monkeypatch.context() as patches:
        reader = StalledReader(patches, device, stalled * passes + passes - 1)
        training = Training(patches, texts, captured, 30)
        assert reader.waited.wait(300), [sync.error for sync in training.syncs]
        training.reach(stalled)
        training.requests += [Action.SNAPSHOT, Action.STOP]
        assert not any(sync.finished.wait(0.2) for sync in training.syncs)
        reader.end.set()
        iteration, stopped_early = training.join()
    assert stopped_early
    assert stalled < iteration <= stalled + 1 + IN_FLIGHT
    assert [path.name for path in folder.glob("*.solverstate")] == [f"x_iter_{iteration}.solverstate"]
    stopped = files(folder, iteration)
    assert Training(monkeypatch, texts, captured, iteration).join() == (iteration, False)
    assert files(folder, iteration) == stopped
