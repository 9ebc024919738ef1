"""Parameters' first values: drawn once, at the first use, and not at all where other values replace them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format

from caffepy.backend.cpu.backend import CpuBackend
from caffepy.formats.proto import caffe_pb2
from caffepy.layers import fillers
from caffepy.layers.blob import Blob
from caffepy.layers.fillers import fill
from caffepy.layers.layer import LayerContext
from caffepy.net import Net

NET = """
layer { name: "data" type: "DummyData" top: "x" dummy_data_param { shape { dim: 2 dim: 40 } } }
layer { name: "ip" type: "InnerProduct" bottom: "x" top: "y"
  inner_product_param { num_output: 300 weight_filler { type: "xavier" } bias_filler { type: "constant" value: 2 } } }
layer { name: "own" type: "InnerProduct" bottom: "y" top: "z" include { phase: TEST }
  inner_product_param { num_output: 50 weight_filler { type: "gaussian" } } }
"""


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The fillers that have drawn numbers."""
    fillers_used: list[str] = []
    for name in ("xavier", "gaussian"):
        inner = fillers.FILLERS.get(name)

        def spied(*arguments: Any, inner: Any = inner, name: str = name) -> Any:
            draw = inner(*arguments)
            return lambda generator: (fillers_used.append(name), draw(generator))[1]

        monkeypatch.setitem(fillers.FILLERS._entries, name, spied)
    return fillers_used


def new_net(phase: int) -> Net:
    param = text_format.Parse(NET, caffe_pb2.NetParameter())
    return Net(param, LayerContext(CpuBackend(1), phase=phase, seed=3))


def test_a_parameters_numbers_are_drawn_at_its_first_use(drawn: list[str]) -> None:
    net = new_net(caffe_pb2.TRAIN)
    assert drawn == []
    weights, bias = net.layers[1].blobs
    expected = fill(caffe_pb2.FillerParameter(type="xavier"), (300, 40), net.layers[1].random_stream(0), "layer 'ip'")
    assert np.array_equal(weights.host_data(), expected)
    assert (bias.host_data() == 2).all()
    assert drawn == ["xavier", "xavier"], "one by `fill`, one by the net"


def test_a_test_net_draws_what_it_does_not_share(drawn: list[str]) -> None:
    train = new_net(caffe_pb2.TRAIN)
    train.prepare()
    before = len(drawn)
    test = new_net(caffe_pb2.TEST)
    test.share_trained_layers_with(train)
    assert len(drawn) == before
    test.prepare()
    assert len(drawn) == before + 1, "the layer that only the test net has"
    assert test.layers[2].blobs[0].allocated("data") is not None
    assert np.array_equal(test.layers[1].blobs[0].host_data(), train.layers[1].blobs[0].host_data())


def counted(calls: list[int]) -> Any:
    return lambda: (calls.append(1), np.arange(6, dtype=np.float32).reshape(2, 3))[1]


@pytest.mark.parametrize("how", ["data", "fill", "move", "move after use"])
def test_a_blob_takes_its_values_once(how: str) -> None:
    calls: list[int] = []
    backend = CpuBackend(1)
    blob = Blob(backend, (2, 3), "b")
    blob.fill_with(counted(calls))
    assert calls == []
    if how == "fill":
        blob.fill()
    if how in ("data", "move after use"):
        assert blob.data is not None
    memory = backend.zeros((2, 3))
    if how.startswith("move"):
        blob.move(memory)
        assert blob.data is memory
    assert calls == [1]
    assert blob.host_data().tolist() == [[0, 1, 2], [3, 4, 5]]
    blob.fill()
    assert calls == [1]


@pytest.mark.parametrize("how", ["bind", "reshape", "drop"])
def test_a_blob_that_gets_other_values_does_not_ask_for_its_own(how: str) -> None:
    calls: list[int] = []
    backend = CpuBackend(1)
    blob = Blob(backend, (2, 3), "b")
    blob.fill_with(counted(calls))
    if how == "bind":
        blob.bind(data=backend.zeros((2, 3)))
    elif how == "reshape":
        blob.reshape((6,))
    else:
        blob.drop_data()
    assert not blob.host_data().any()
    assert calls == []


@pytest.mark.parametrize("used", [False, True])
def test_loaded_values_replace_those_of_the_filler(used: bool) -> None:
    """What the filler would have made is made only if it was used before."""
    calls: list[int] = []
    blob = Blob(CpuBackend(1), (2, 3), "b")
    blob.fill_with(counted(calls))
    memory = blob.data if used else None
    blob.load(np.full((2, 3), 7, np.float32))
    assert blob.host_data().tolist() == [[7, 7, 7], [7, 7, 7]]
    assert calls == [1] * used
    assert memory is None or memory is blob.data


def test_loaded_values_are_those_of_the_blob_that_is_followed() -> None:
    calls: list[int] = []
    backend = CpuBackend(1)
    blob, owner = Blob(backend, (2, 3), "b"), Blob(backend, (2, 3), "a")
    owner.fill_with(counted(calls))
    blob.follow(owner)
    blob.load(np.full((2, 3), 7, np.float32))
    assert owner.host_data().tolist() == blob.host_data().tolist() == [[7, 7, 7], [7, 7, 7]]


@pytest.mark.parametrize("how", ["data", "fill and data", "host_data", "load"])
def test_a_thread_that_uses_a_blob_while_another_fills_it_waits(how: str) -> None:
    """It never sees the zeros that the memory has before the values exist."""
    blob, filling, ready = Blob(CpuBackend(1), (2, 3), "b"), threading.Event(), threading.Event()

    def values() -> Any:
        filling.set()
        assert ready.wait(300)
        return np.full((2, 3), 7, np.float32)

    def use() -> Any:
        if how == "load":
            blob.load(np.full((2, 3), 8, np.float32))
        elif how == "fill and data":
            blob.fill()
        return blob.host_data() if how == "host_data" else blob.data.copy()

    blob.fill_with(values)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(lambda: blob.data)
        assert filling.wait(300)
        second = threads.submit(use)
        assert not wait([second], 0.2).done  # without the lock it is done at once
        ready.set()
        assert (second.result(300) == (8 if how == "load" else 7)).all()
        assert first.result(300) is blob.data
    assert (blob.data == (8 if how == "load" else 7)).all()


def test_threads_that_ask_for_derivatives_at_the_same_time_get_one_array() -> None:
    for _ in range(20):
        net, barrier = new_net(caffe_pb2.TEST), threading.Barrier(4)

        def ask(_: int, net: Net = net, barrier: threading.Barrier = barrier) -> Any:
            barrier.wait(300)
            return net.parameters.diff

        with ThreadPoolExecutor(4) as threads:
            arrays = list(threads.map(ask, range(4)))
        assert all(array is arrays[0] for array in arrays)


def test_a_filler_that_fails_is_asked_again() -> None:
    answers: list[Any] = [MemoryError("none"), np.ones((2, 3), np.float32)]
    blob = Blob(CpuBackend(1), (2, 3), "b")

    def values() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    blob.fill_with(values)
    with pytest.raises(MemoryError, match="none"):
        _ = blob.data
    assert (blob.data == 1).all()
