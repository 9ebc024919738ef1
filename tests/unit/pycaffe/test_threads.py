"""Several threads use one net: its parameters, passes and snapshots, from the first moment on.

`CAFFEPY_THREADS_SECONDS=60 pytest tests/unit/pycaffe/test_threads.py` runs each case for a minute.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_graph_backend import Leaving

from caffepy import pycaffe as caffe
from caffepy.formats.caffemodel import read_caffemodel
from caffepy.pycaffe import device as settings
from caffepy.pycaffe.device import Device

SECONDS = float(os.environ.get("CAFFEPY_THREADS_SECONDS", "3"))
"""How long each case runs."""

THREADS = 8
LIMIT = 300
"""Seconds after which a thread that waits for the others hangs."""

NET = """
name: 'n' force_backward: true
layer { name: 'data' type: 'Input' top: 'data' input_param { shape { dim: 2 dim: 3 dim: 8 dim: 8 } } }
layer { name: 'c' type: 'Convolution' bottom: 'data' top: 'c'
  convolution_param { num_output: 64 kernel_size: 5 weight_filler { type: 'xavier' } bias_filler { value: 0.5 } } }
layer { name: 's' type: 'Scale' bottom: 'c' top: 's' scale_param { bias_term: true filler { value: 3 } } }
layer { name: 'r' type: 'ReLU' bottom: 's' top: 's' }
layer { name: 'ip' type: 'InnerProduct' bottom: 's' top: 'ip' param { name: 'w' }
  inner_product_param { num_output: 128 weight_filler { type: 'xavier' } bias_filler { value: -1 } } }
layer { name: 'iq' type: 'InnerProduct' bottom: 's' top: 'iq' param { name: 'w' }
  inner_product_param { num_output: 128 weight_filler { type: 'xavier' } bias_filler { value: 2 } } }
layer { name: 'sum' type: 'Eltwise' bottom: 'ip' bottom: 'iq' top: 'sum' }
"""
IMAGES = [np.random.default_rng(seed).standard_normal((2, 3, 8, 8)).astype(np.float32) for seed in range(THREADS)]

Numbers = dict[str, list[Any]]


class Expected:
    """What one thread alone sees of a net.

    Args:
        net: fresh.
        folder: for a file with its parameters.
    """

    def __init__(self, net: caffe.Net, folder: Path) -> None:
        self.parameters: Numbers = {name: [blob.data.copy() for blob in blobs] for name, blobs in net.params.items()}
        self.outputs = [net.forward(data=images)["sum"].copy() for images in IMAGES]
        self.file = folder / "weights.caffemodel"
        net.save(self.file)


def same(found: Numbers, expected: Numbers) -> None:
    assert found.keys() == expected.keys()
    for name, arrays in expected.items():
        for one, other in zip(found[name], arrays, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=name)


def look(net: caffe.Net, expected: Expected, path: Path, number: int) -> None:
    same({name: [blob.data for blob in blobs] for name, blobs in net.params.items()}, expected.parameters)


def run(net: caffe.Net, expected: Expected, path: Path, number: int) -> None:
    with net.device.turn:  # until the output is compared: the next pass overwrites it
        found = net.forward(data=IMAGES[number])["sum"]
        np.testing.assert_allclose(found, expected.outputs[number], rtol=1e-3, atol=1e-3)


def run_alike(net: caffe.Net, expected: Expected, path: Path, number: int) -> None:
    """Two threads' passes on the same numbers, and no lock."""
    assert np.isfinite(net.forward(data=IMAGES[number])["sum"]).all()


def save(net: caffe.Net, expected: Expected, path: Path, number: int) -> None:
    net.save(path)
    same(stored(path), expected.parameters)


def stored(path: Path) -> Numbers:
    layers = read_caffemodel(path)
    return {
        layer.name: [
            np.frombuffer(layers.content[blob.data_begin : blob.data_end], "<f4").reshape(tuple(blob.shape.dim))
            if blob.data_end
            else np.array(blob.data, np.float32).reshape(tuple(blob.shape.dim))
            for blob in layer.blobs
        ]
        for layer in layers.message.layer
        if layer.blobs
    }


def load(net: caffe.Net, expected: Expected, path: Path, number: int) -> None:
    """The numbers that the net has already."""
    net.copy_from(expected.file)


def look_at_diffs(net: caffe.Net, expected: Expected, path: Path, number: int) -> None:
    held = net.params["ip"][0].diff
    net.clear_param_diffs()
    assert np.shares_memory(held, net.params["ip"][0].diff)


def write(net: caffe.Net, expected: Expected, path: Path, number: int) -> None:
    """The numbers that are there already, into an array that is held over a pass."""
    held = net.params["c"][0].data
    held[...] = expected.parameters["c"][0]
    net.forward()
    assert np.shares_memory(held, net.params["c"][0].data)


DEEDS: list[Callable[[caffe.Net, Expected, Path, int], None]] = [
    look,
    run,
    save,
    run,
    load,
    look_at_diffs,
    write,
    run_alike,
]


@pytest.fixture(params=["CPU, TRAIN", "CPU, TEST", "a device that weights leave"])
def make(request: pytest.FixtureRequest, write_net: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], caffe.Net]:
    """Makes the same net again and again."""
    phase = caffe.TRAIN if "TRAIN" in request.param else caffe.TEST
    if "device" in request.param:
        device = Device(Leaving())
        monkeypatch.setattr(settings.mode, "present_device", lambda: device)

    def new() -> caffe.Net:
        caffe.set_random_seed(3)
        return caffe.Net(write_net, phase)

    return new


@pytest.fixture
def write_net(tmp_path: Path) -> Path:
    path = tmp_path / "net.prototxt"
    path.write_text(NET)
    return path


def test_threads_use_one_fresh_net(make: Callable[[], caffe.Net], tmp_path: Path) -> None:
    """Each thread begins with another of the things that it does, at the same moment."""
    expected = Expected(make(), tmp_path)
    stop = time.monotonic() + SECONDS
    with ThreadPoolExecutor(THREADS) as threads:
        for turn in itertools.count():
            net, barrier = make(), threading.Barrier(THREADS)

            def use(number: int, net: caffe.Net = net, barrier: threading.Barrier = barrier, turn: int = turn) -> None:
                barrier.wait(LIMIT)
                for step in range(len(DEEDS) if turn % 4 == 0 else 2):
                    deed = DEEDS[(number + step + turn) % len(DEEDS)]
                    deed(net, expected, tmp_path / f"{number}.caffemodel", number)

            for work in [threads.submit(use, number) for number in range(THREADS)]:
                work.result(LIMIT)
            if turn >= 3 and time.monotonic() > stop:
                break
