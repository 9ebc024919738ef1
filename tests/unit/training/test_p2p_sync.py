"""Solver threads whose devices capture their iterations, the exchange of gradients included."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from fake_graph_backend import NET, FakeGraphBackend
from training import solver_param, weights_of

from caffepy.data.sharding import Shard
from caffepy.data.sources.databases import record_key, write_datums
from caffepy.distributed.communicators.communicator import Communicator, FinishedWork, PendingCollective
from caffepy.distributed.communicators.local import LocalCommunicator, ThreadGroup
from caffepy.distributed.connect import Connector
from caffepy.distributed.device_threads import DeviceSpec
from caffepy.distributed.gradient_sync import GradientSync
from caffepy.distributed.reducer import Reducer
from caffepy.errors import ConfigError, DeviceError
from caffepy.formats.proto.caffe_pb2 import Datum
from caffepy.layers.inner_product import InnerProductLayer
from caffepy.training import p2p_sync
from caffepy.training.callback import Action
from caffepy.training.graph_executor import IN_FLIGHT
from caffepy.training.options import TrainOptions
from caffepy.training.p2p_sync import P2PSync
from caffepy.utils.options import ExecutionOptions

SOLVER = 'base_lr: 0.1 lr_policy: "fixed" momentum: 0.9 random_seed: 3 snapshot_after_train: false '


class Streams(LocalCommunicator):
    """Plays NCCL: what it is asked for may be captured."""

    capturable = asynchronous = overlaps = True

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        super().__init__(group, rank)
        self.log: list[str] = []

    def all_reduce_async(self, array: Any, timed: AbstractContextManager[None]) -> PendingCollective:
        self.log.append("begin")
        with timed:
            self.all_reduce(array)
        return FinishedWork()


class Nccl(Streams):
    """Also refuses what NCCL does not allow: an exchange that some devices replay and others run eagerly, or of graphs
    that were not captured together."""

    def all_reduce(self, array: Any, average: bool = True) -> None:
        backend = self.group.syncs[self.rank].solver.backend  # type: ignore[attr-defined]
        ways = self.sum(np.eye(self.size)[self.rank] * (2 * backend.captures_made + backend.capturing))
        assert len(set(ways.tolist())) == 1, f"devices exchange in different ways: {ways}"
        super().all_reduce(array, average)


class Counting(FakeGraphBackend):
    """Knows how often graphs were made."""

    captures_made = 0

    def capture(self, *works: Any) -> Any:
        self.captures_made += 1
        return super().capture(*works)


def train(
    monkeypatch: pytest.MonkeyPatch,
    kind: type[LocalCommunicator],
    solver: str = "",
    net: str = "",
    iterations: int = 12,
    sync_bn: bool = False,
    text: str = NET,
    devices: int = 2,
    requests: tuple[Callable[[P2PSync], Action], ...] = (),
    engine: ExecutionOptions | None = None,
) -> list[P2PSync]:
    """The devices' threads after training; their solvers are closed, their weights were kept as `sync.weights`."""
    finish = Reducer.finish

    def noted(exchange: Reducer) -> None:
        getattr(exchange._communicator, "log", []).append("finish")
        finish(exchange)

    monkeypatch.setattr(p2p_sync, "create_backend", lambda *arguments: Counting())
    monkeypatch.setattr(Reducer, "finish", noted)
    param = solver_param(SOLVER + solver + f"max_iter: {iterations}", net + text)
    options = TrainOptions(param, timeout=300, sync_bn=sync_bn, engine=engine or ExecutionOptions())
    group = ThreadGroup(devices, 300)
    syncs: list[P2PSync] = []
    group.syncs = syncs  # type: ignore[attr-defined]

    def connect(index: int) -> Communicator:
        syncs[index].communicator = kind(group, index)  # type: ignore[attr-defined]
        return syncs[index].communicator  # type: ignore[attr-defined, no-any-return]

    def request(index: int) -> Action:
        return requests[index](syncs[index]) if requests else Action.NONE

    def keep_weights(sync: P2PSync) -> None:
        if sync.finished.is_set() and sync.solver is not None:
            sync.weights = weights_of(sync.solver.net)  # type: ignore[attr-defined]

    for index in range(devices):
        spec = DeviceSpec(index, None, f"CPU {index}", 1, Shard(index, devices, devices))
        syncs.append(P2PSync(spec, options, Connector(partial(connect, index)), partial(request, index), keep_weights))
    for sync in syncs:
        sync.start()
    for sync in syncs:
        assert sync.ready.wait(300)
    for sync in syncs:
        sync.go()
    for sync in syncs:
        assert sync.join(300)
    for sync in syncs:
        assert sync.error is None, sync.error
    return syncs


def test_the_backend_is_made_as_the_options_say(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(*arguments: Any) -> None:
        asked.append(arguments)
        raise DeviceError("there is no such device", "use another")

    monkeypatch.setattr(p2p_sync, "create_backend", refuse)
    engine = ExecutionOptions(autotune=False, deterministic=False)
    options = TrainOptions(solver_param(SOLVER, NET), timeout=300, math="tf32", engine=engine)
    spec = DeviceSpec(0, None, "CPU 0", 3, Shard(0, 1, 1))
    group = ThreadGroup(1, 300)
    connector = Connector(lambda: LocalCommunicator(group, 0))
    sync = P2PSync(spec, options, connector, lambda: Action.NONE, lambda sync: None)
    sync.start()
    assert sync.join(300)
    assert isinstance(sync.error, DeviceError)
    assert asked == [(None, 3, "tf32", False, False)]


def weights(sync: P2PSync) -> dict[str, np.ndarray]:
    return sync.weights  # type: ignore[attr-defined, no-any-return]


def log(sync: P2PSync) -> list[str]:
    return sync.communicator.log  # type: ignore[attr-defined, no-any-return]


def launches(sync: P2PSync) -> int:
    assert sync.solver is not None and isinstance(sync.solver.backend, FakeGraphBackend)
    return sync.solver.backend.launches


def test_the_exchange_is_part_of_the_graph_and_goes_on_in_buckets(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        syncs = train(monkeypatch, Streams, net="reduce_buckets: 2 ")
    assert [launches(sync) for sync in syncs] == [11, 11], "one graph an iteration, the first iteration runs eagerly"
    assert log(syncs[0]) == log(syncs[1]) == ["finish", "begin", "begin"] + ["begin", "begin", "finish"] * 11
    assert any("exchanged in 2 parts" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(("buckets", "parts"), [(0, 4), (3, 2), (50, 4)])
def test_the_log_says_into_how_many_parts_gradients_were_really_cut(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, buckets: int, parts: int
) -> None:
    with caplog.at_level(logging.INFO):
        syncs = train(monkeypatch, Streams, net=f"reduce_buckets: {buckets} ", iterations=3)
    assert log(syncs[0])[-parts - 1 :] == ["begin"] * parts + ["finish"]
    assert any(f"exchanged in {parts} parts" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_negative_number_of_parts_is_refused_when_the_net_is_built(devices: int) -> None:
    options = TrainOptions(solver_param(SOLVER, "reduce_buckets: -1 " + NET), timeout=300)
    group = ThreadGroup(1, 300)
    spec = DeviceSpec(0, None, "CPU 0", 1, Shard(0, devices, devices))
    connector = Connector(lambda: LocalCommunicator(group, 0))
    sync = P2PSync(spec, options, connector, lambda: Action.NONE, lambda sync: None)
    sync.start()
    assert sync.join(300)
    assert isinstance(sync.error, ConfigError) and "reduce_buckets is -1" in str(sync.error)


def test_a_layer_that_is_not_captured_leaves_the_backward_pass_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    net = """layer { name: "noise" type: "DummyData" top: "noise"
      dummy_data_param { shape { dim: 1 } data_filler { type: "gaussian" } } } """
    syncs = train(monkeypatch, Streams, net=f"reduce_buckets: 2 {net}")
    assert [launches(sync) for sync in syncs] == [22, 22], "before the layer, and after it"
    assert log(syncs[0]) == ["finish", "begin", "begin"] + ["begin", "begin", "finish"] * 11


def test_nothing_is_begun_in_a_backward_pass_of_several_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InnerProductLayer, "capture_blocker", lambda layer: "it plays a layer on the host")
    syncs = train(monkeypatch, Streams, net="reduce_buckets: 2 ")
    assert log(syncs[0]) == ["finish"] * 12


def test_what_goes_through_the_host_stays_between_two_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [launches(sync) for sync in train(monkeypatch, LocalCommunicator)] == [22, 22]


@pytest.mark.parametrize("net", ["reduce_buckets: 1 ", "reduce_buckets: 3 "])
@pytest.mark.parametrize("solver", ["", "iter_size: 2 ", "clip_gradients: 0.05 ", "layer_wise_reduce: false "])
def test_captured_exchange_trains_as_the_one_between_graphs_does(
    monkeypatch: pytest.MonkeyPatch, solver: str, net: str
) -> None:
    captured, between = (train(monkeypatch, kind, solver, net) for kind in (Streams, LocalCommunicator))
    for one, other in zip(captured, between, strict=True):
        for name, values in weights(one).items():
            np.testing.assert_allclose(values, weights(other)[name], rtol=1e-6, atol=1e-7)


def test_synchronised_statistics_are_captured_too(monkeypatch: pytest.MonkeyPatch) -> None:
    net = NET.replace('name: "relu"', 'name: "bn" type: "BatchNorm" bottom: "ip" top: "ip" }\nlayer { name: "relu"')
    one, other = (train(monkeypatch, kind, sync_bn=True, text=net) for kind in (Streams, LocalCommunicator))
    assert [launches(sync) for sync in one] == [11, 11]
    assert launches(other[0]) > 22
    for name, values in weights(one[0]).items():
        np.testing.assert_allclose(values, weights(other[0])[name], rtol=1e-6, atol=1e-7)


IGNORING = """
layer { name: "data" type: "DummyData" top: "data" top: "label" dummy_data_param {
  shape { dim: 6 dim: 5 } shape { dim: 6 dim: 3 } data_filler { type: "gaussian" }
  data_filler { type: "uniform" min: 0 max: 2 } } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip"
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SigmoidCrossEntropyLoss" bottom: "ip" bottom: "label" top: "loss"
  loss_param { normalization: VALID ignore_label: 1 } }
"""


def test_two_devices_count_valid_labels_together(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shown = []
    for kind, devices in ((Streams, 2), (LocalCommunicator, 2), (LocalCommunicator, 1)):
        caplog.clear()
        text = IGNORING if devices == 2 else IGNORING.replace("dim: 6", "dim: 12")
        with caplog.at_level(logging.INFO):
            syncs = train(monkeypatch, kind, "display: 3 iter_size: 2 ", text=text, devices=devices)
        losses = [r.getMessage().split("loss = ")[1] for r in caplog.records if "iters), loss" in r.getMessage()]
        shown.append(([float(loss) for loss in losses], weights(syncs[0]), launches(syncs[0])))
    assert shown[0][2] < shown[1][2], "on the device the count is part of the graphs"
    for losses, found, _ in shown[:2]:
        np.testing.assert_allclose(losses, shown[2][0], rtol=1e-5)
        for name, values in found.items():
            np.testing.assert_allclose(values, shown[2][1][name], rtol=1e-5, atol=1e-6)


def test_communication_is_timed_in_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    for sync in train(monkeypatch, Streams, net="reduce_buckets: 2 ", iterations=30):
        performance = sync.performance
        assert 0 < performance.exposed <= performance.communication < performance.seconds


def image_net(folder: Path, sizes: list[int], batch: int) -> str:
    """A net that takes images of several sizes."""
    for number, size in enumerate(sizes):
        image = np.random.default_rng(number).integers(0, 256, (size, 8, 3), np.uint8)
        cv2.imwrite(str(folder / f"{number}.png"), image)
    (folder / "images.txt").write_text("".join(f"{folder}/{n}.png {n % 3}\n" for n in range(len(sizes))))
    return f"""
        layer {{ name: "data" type: "ImageData" top: "data" top: "label" transform_param {{ scale: 0.01 }}
          image_data_param {{ source: "{folder}/images.txt" batch_size: {batch} }} }}
        layer {{ name: "conv" type: "Convolution" bottom: "data" top: "conv"
          convolution_param {{ num_output: 3 kernel_size: 3 weight_filler {{ type: "xavier" }} }} }}
        layer {{ name: "pool" type: "Pooling" bottom: "conv" top: "pool"
          pooling_param {{ pool: AVE global_pooling: true }} }}
        layer {{ name: "loss" type: "SoftmaxWithLoss" bottom: "pool" bottom: "label" top: "loss" }}"""


ONE_CHANGES = [8] * 16 + [8, 9] + [8] * 16
"""Images of which the second device's alone has another size, once."""
SIZES = [8, 8, 8, 9, 8, 8, 8, 8, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 8, 7, 7, 7, 7, 7, 7, 7, 7, 8, 8]


@pytest.mark.parametrize("kind", [Nccl, LocalCommunicator])
@pytest.mark.parametrize("sizes", [ONE_CHANGES, SIZES], ids=["one", "several"])
def test_all_devices_leave_their_graphs_where_one_devices_image_has_another_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sizes: list[int], kind: type[LocalCommunicator]
) -> None:
    net = image_net(tmp_path, sizes, 2)
    replayed, eager = (
        train(monkeypatch, kind, text=net, iterations=len(sizes) // 2, engine=engine)
        for engine in (ExecutionOptions(), ExecutionOptions(eager=True))
    )
    assert launches(replayed[0]) == launches(replayed[1]) > 0
    for one, other in zip(replayed, eager, strict=True):
        for name, values in weights(one).items():
            np.testing.assert_array_equal(values, weights(other)[name])


@pytest.mark.parametrize("device", [0, 1, 2])
@pytest.mark.parametrize("asked", [1, 4, 5, 6, 7])
def test_devices_stop_in_the_same_iteration_whether_they_replay_or_run_eagerly(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: int, device: int
) -> None:
    sizes = [8] * 3 * 5 + [8, 9, 8] + [8] * 3 * 8  # the second device's in iteration 5

    def ask(index: int, sync: P2PSync) -> Action:
        assert sync.solver is not None
        return Action.STOP if index == device and sync.solver.iteration == asked else Action.NONE

    requests = tuple(partial(ask, index) for index in range(3))
    net = image_net(tmp_path, sizes, 3)
    syncs = train(monkeypatch, Nccl, text=net, iterations=13, devices=3, requests=requests)
    assert {sync.solver.iteration for sync in syncs if sync.solver} == {asked + IN_FLIGHT}


def test_devices_ask_each_other_once_a_block_of_byte_images(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (70, 3, 8, 8), np.uint8)
    datums = [Datum(channels=3, height=8, width=8, data=image.tobytes(), label=n % 3) for n, image in enumerate(images)]
    write_datums(tmp_path / "lmdb", [(record_key(n), datum) for n, datum in enumerate(datums)])
    net = image_net(tmp_path, [8], 2).replace("ImageData", "Data").replace("image_data_param", "data_param")
    net = net.replace("images.txt", "lmdb").replace("batch_size: 2", "batch_size: 2 backend: LMDB")
    asked: list[str] = []
    minimum = GradientSync.min_over_devices

    def noted(exchange: GradientSync, number: float, what: str) -> float:
        asked.append(what)
        return minimum(exchange, number, what)

    monkeypatch.setattr(GradientSync, "min_over_devices", noted)
    train(monkeypatch, Nccl, text=net, iterations=130)
    where = "at the first replay, where the first batch of 8 passes ends, and where a block of 64 begins"
    assert asked.count("the form of all devices' data") == 2 * 4, where
