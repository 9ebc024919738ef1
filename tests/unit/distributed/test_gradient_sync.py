"""Devices whose parameters drift apart, what the root alone reads, and the timeout that data layers are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_graph_backend import NET, FakeGraphBackend
from process_groups import run_threads
from training import CPU, build_net, build_solver, solver_param, weights_of

from caffepy.data.sharding import Shard
from caffepy.distributed.communicators.local import LocalCommunicator, ThreadGroup
from caffepy.distributed.connect import Connector
from caffepy.distributed.device_threads import DeviceSpec
from caffepy.distributed.gradient_sync import check_replicas
from caffepy.errors import ConfigError, RunError, SnapshotError
from caffepy.net import Net
from caffepy.training import p2p_sync
from caffepy.training.callback import Action
from caffepy.training.options import TrainOptions
from caffepy.training.p2p_sync import P2PSync
from caffepy.training.solver import Solver

SOLVER = 'base_lr: 0.1 lr_policy: "fixed" momentum: 0.9 random_seed: 3 snapshot_after_train: false average_loss: 2 '
NAMES = ["rank 0 on a", "rank 1 on b", "rank 2 on c"]
BATCH_NORM = """
layer { name: "data" type: "DummyData" top: "data" dummy_data_param { shape { dim: 4 dim: 3 dim: 2 dim: 2 } } }
layer { name: "bn" type: "BatchNorm" bottom: "data" top: "bn" batch_norm_param { scale_bias: true } }
layer { name: "ip" type: "InnerProduct" bottom: "bn" top: "ip" inner_product_param { num_output: 2 } }
"""


def compare(change: Callable[[int, Net], None], size: int = 3, text: str = BATCH_NORM) -> list[Any]:
    """What each device meets after `change` was called with its number and net."""
    group = ThreadGroup(size, 300)

    def gather(device: int, values: Sequence[int]) -> Any:
        rows = np.zeros((size, len(values)))
        rows[device] = values
        return LocalCommunicator(group, device).sum(rows)

    def work(device: int) -> None:
        with CPU.activate():
            net = build_net(text)
            change(device, net)
            check_replicas(net, NAMES[:size], partial(gather, device))

    return run_threads(size, work)


def changing(device: int, layer: str, index: int) -> Callable[[int, Net], None]:
    def change(number: int, net: Net) -> None:
        if number == device:
            blob = next(found for found in net.layers if found.name == layer).blobs[index]
            values = blob.host_data()
            values.ravel()[-1] = np.nextafter(values.ravel()[-1], np.float32(9))
            CPU.from_host(values, blob.data)

    return change


def test_equal_parameters_are_found_equal() -> None:
    assert compare(lambda device, net: None) == [None] * 3


def test_every_nan_is_the_same() -> None:
    def poison(device: int, net: Net) -> None:
        values = np.full(net.layers[-1].blobs[1].shape, 0x7FC00000 + device, np.uint32).view(np.float32)
        net.layers[-1].blobs[1].data[...] = values

    assert compare(poison) == [None] * 3


@pytest.mark.parametrize("index", [0, 1, 2])
def test_running_statistics_are_each_devices_own(index: int) -> None:
    assert compare(changing(1, "bn", index)) == [None] * 3


@pytest.mark.parametrize(("layer", "index"), [("bn", 3), ("bn", 4), ("ip", 0), ("ip", 1)])
def test_the_smallest_difference_names_layer_and_rank_on_all_devices(layer: str, index: int) -> None:
    errors = compare(changing(1, layer, index))
    assert all(type(error) is RunError for error in errors)
    assert {str(error) for error in errors} == {
        f"rank 1 on b no longer has the parameters of rank 0 on a: parameter {index} of layer '{layer}' is the first "
        "of 1 that differ; go on from a snapshot before this iteration, and look at the memory of these machines if it "
        "happens again"
    }


def test_a_layer_with_the_name_of_a_batch_norm_is_compared() -> None:
    errors = compare(changing(1, "ip", 0), text=BATCH_NORM.replace('name: "bn"', 'name: "ip"'))
    assert errors == [None] * 3  # the first of the name is the BatchNorm, whose statistics are each device's own

    def change(number: int, net: Net) -> None:
        if number == 1:
            net.layers[-1].blobs[0].data.reshape(-1)[0] += 1

    errors = compare(change, text=BATCH_NORM.replace('name: "bn"', 'name: "ip"'))
    assert all("parameter 0 of layer 'ip' is the first of 1 that differ" in str(error) for error in errors)


def test_a_root_that_differs_from_all_others_is_compared_with_all() -> None:
    (message,) = {str(error) for error in compare(changing(0, "ip", 0))}
    assert message.startswith("rank 1 on b, rank 2 on c no longer have the parameters of rank 0 on a: parameter 0 of")


class Streams(LocalCommunicator):
    """Plays NCCL: what it is asked for may be captured."""

    capturable = True


def train(
    monkeypatch: pytest.MonkeyPatch, kind: type[LocalCommunicator], options: TrainOptions, changed: int = -1
) -> list[P2PSync]:
    """Two devices' threads after training; the second one's weights are changed before iteration `changed`."""
    monkeypatch.setattr(p2p_sync, "create_backend", lambda *arguments: FakeGraphBackend())
    group = ThreadGroup(2, 300)
    iterate = Solver._iterate

    def change(solver: Solver) -> None:
        if solver.shard.rank == 1 and solver.iteration == changed:
            solver.backend.fill(solver.net.parameters.parameters[2].blob.data[:1], 0.3)
        iterate(solver)

    def keep(sync: P2PSync) -> None:
        if sync.finished.is_set() and sync.solver is not None:
            sync.weights = weights_of(sync.solver.net)  # type: ignore[attr-defined]

    monkeypatch.setattr(Solver, "_iterate", change)
    syncs = [
        P2PSync(
            DeviceSpec(index, None, f"CPU {index}", 1, Shard(index, 2, 2)),
            options,
            Connector(partial(kind, group, index)),
            lambda: Action.NONE,
            keep,
        )
        for index in range(2)
    ]
    for sync in syncs:
        sync.start()
    for sync in syncs:
        assert sync.ready.wait(300)
        assert sync.error is None, sync.error
    root = syncs[0].solver
    assert root is not None
    for sync in syncs:
        sync.go(root.snapshots.restored)
    for sync in syncs:
        assert sync.join(300)
    return syncs


@pytest.mark.parametrize("kind", [Streams, LocalCommunicator])
def test_replicas_are_compared_between_replayed_iterations(
    monkeypatch: pytest.MonkeyPatch, kind: type[LocalCommunicator]
) -> None:
    param = solver_param(SOLVER + "max_iter: 20", NET)
    syncs = train(monkeypatch, kind, TrainOptions(param, timeout=300, check_replicas=4), changed=9)
    # Whoever says it first may let the other go before that could.
    said = [str(sync.error) for sync in syncs if type(sync.error) is RunError]
    wanted = "device 1 no longer has the parameters of device 0: parameter 0 of layer 'last'"
    assert said and all(message.startswith(wanted) for message in said)
    for sync in syncs:
        assert sync.error is not None
        assert sync.solver is not None and sync.solver.iteration == 12
        backend = sync.solver.backend
        assert isinstance(backend, FakeGraphBackend) and backend.launches > 10, "nothing was replayed"


def test_replicas_are_compared_at_snapshots_and_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    param = solver_param(SOLVER + f'max_iter: 20 snapshot: 5 snapshot_prefix: "{tmp_path}/x"', NET)
    syncs = train(monkeypatch, Streams, TrainOptions(param, timeout=300), changed=7)
    assert any(type(sync.error) is RunError for sync in syncs)
    assert {path.name for path in tmp_path.iterdir()} == {"x_iter_5.caffemodel", "x_iter_5.solverstate"}


def test_comparing_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    param = solver_param(SOLVER + "max_iter: 9", NET)
    results = [train(monkeypatch, Streams, TrainOptions(param, timeout=300, check_replicas=n)) for n in (0, 1)]
    for plain, checked in zip(*results, strict=True):
        for name, values in plain.weights.items():  # type: ignore[attr-defined]
            np.testing.assert_array_equal(checked.weights[name], values)  # type: ignore[attr-defined]


def test_an_interval_is_not_negative() -> None:
    with pytest.raises(ConfigError, match="check_replicas: '-1' is not a whole number of at least 1"):
        TrainOptions(solver_param(SOLVER), check_replicas=-1).check()


def test_the_root_alone_reads_what_training_starts_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A snapshot read by one device goes on as if both had read it, positions and loss window included."""
    text = SOLVER + f'snapshot: 4 snapshot_prefix: "{tmp_path}/x" max_iter: '
    whole = train(monkeypatch, Streams, TrainOptions(solver_param(text + "8", NET), timeout=300))
    reads: list[int] = []
    restore = Solver.restore

    def noted(solver: Solver, path: Path) -> None:
        reads.append(solver.shard.rank)
        restore(solver, path)

    monkeypatch.setattr(Solver, "restore", noted)
    options = TrainOptions(solver_param(text + "8", NET), timeout=300, snapshot=tmp_path / "x_iter_4.solverstate")
    resumed = train(monkeypatch, Streams, options)
    assert reads == [0]
    for sync, before in zip(resumed, whole, strict=True):
        assert sync.error is None and sync.solver is not None and before.solver is not None
        assert sync.solver.iteration == 8
        assert sync.solver.net.context.passes.number == before.solver.net.context.passes.number
        assert list(sync.solver.losses._losses) == list(before.solver.losses._losses)
        for name, values in before.weights.items():  # type: ignore[attr-defined]
            np.testing.assert_array_equal(sync.weights[name], values)  # type: ignore[attr-defined]


class Other:
    """A device that is not the root and meets nobody."""

    is_root = False
    world_size = 2

    def on_clock_start(self) -> None:
        """Nothing is timed."""

    def wait_for_device(self, wait: Callable[[], None]) -> None:
        """Nobody else is waited for."""
        wait()


def test_who_is_not_the_root_reads_no_weights_and_looks_at_no_folder() -> None:
    text = SOLVER + 'max_iter: 1 snapshot: 1 snapshot_prefix: "/nowhere/x" weights: "nowhere.caffemodel" '
    with build_solver(text, NET, callback=Other(), shard=Shard(1, 2)) as solver:
        assert not solver.callback.is_root
    with pytest.raises(SnapshotError, match=r"nowhere\.caffemodel"), build_solver(text, NET):
        pass
    text = text.replace('weights: "nowhere.caffemodel"', "")
    with pytest.raises(ConfigError, match="the folder /nowhere does not exist"), build_solver(text, NET):
        pass


def test_the_timeout_reaches_the_data_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait longer than the watchdog, which can say more; and as long as they are told."""
    param = solver_param(SOLVER + "max_iter: 1", NET)
    for sync in train(monkeypatch, Streams, TrainOptions(param, timeout=1234)):
        assert sync.solver is not None
        assert sync.solver.net.context.timeout > 1234
    with build_solver(SOLVER + "max_iter: 1", NET, timeout=7.0) as solver:
        assert solver.net.context.timeout == 7.0
