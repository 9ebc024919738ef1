"""Input on a GPU against the CPU's: kernels, the ring's order of events, whole data layers, eager and captured."""

from __future__ import annotations

import time

import numpy as np
import pytest
from backend_arrays import rounded
from google.protobuf import text_format

from caffepy.backend import create_backend
from caffepy.backend.types import DTYPES, ImageSlot
from caffepy.data.sources.databases import record_key, write_datums
from caffepy.formats.proto.caffe_pb2 import TRAIN, Datum, LayerParameter
from caffepy.layers.blob import Blob
from caffepy.layers.layer import LayerContext, layer_class


def wait_for(ring):
    """Wait until the ring takes more."""
    deadline = time.monotonic() + 300
    while not ring.ready():
        assert time.monotonic() < deadline


def pinned(backend, memory):
    """A copy in memory that the device copies from."""
    copy = backend.host_memory(memory.size)
    copy[...] = memory
    return copy


@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("captured", [False, True])
def test_slots_are_neither_read_too_early_nor_overwritten_too_early(backend, block, captured):
    """While the device is busy for long the host goes far ahead; every pass still finds its own data."""
    import cupy

    slot = ImageSlot(2, 1, 64, 64)
    ring = backend.input_ring(slot.size, block, 4)
    mean = backend.zeros((1, 1, 1))
    images, labels = backend.zeros(slot.shape), backend.zeros((slot.count,))
    burden = backend.zeros((1 << 26,))
    passes = 6 * ring.slots
    history = backend.zeros((passes, 2))
    numbers = cupy.arange(2 * passes, dtype=cupy.uint64).reshape(passes, 2) // 2
    counter = cupy.zeros(2, cupy.uint64)
    kept = backend.zeros((2,))

    def work():
        backend.take_images(ring, counter, slot, mean, 1.0, images, labels)
        backend.copy(images[:, 0, 0, 0], kept)

    work()
    graph = backend.capture(work) if captured else None
    memories = [pinned(backend, np.zeros(slot.size * block, np.uint8)) for _ in range(ring.blocks + 1)]
    free = list(range(len(memories)))
    for number in range(passes):
        if number % block == 0:
            deadline = time.monotonic() + 300
            while not (ring.ready() and free):
                assert time.monotonic() < deadline
            which = free.pop()
            for i in range(block):
                slot.parts(memories[which][i * slot.size : (i + 1) * slot.size])[2][...] = (number + i) % 251
            ring.put(number, block, [(0, memories[which])], lambda which=which: free.append(which))
        counter[...] = numbers[number]
        backend.fill(burden, 1.0)
        if graph is not None:
            graph.launch()
        else:
            work()
        ring.consumed(number)
        backend.copy(kept, history[number])
    expected = np.repeat(np.arange(passes) % 251, 2).reshape(passes, 2)
    np.testing.assert_array_equal(backend.to_host(history), expected)
    backend.synchronize()
    ring.close(300)
    assert sorted(free) == list(range(len(memories)))
    ring.close()


def test_going_too_far_ahead_is_our_own_mistake(backend):
    ring = backend.input_ring(256, 1, 4)
    memory = pinned(backend, np.zeros(256, np.uint8))
    for number in range(4):
        ring.put(number, 1, [(0, memory)], lambda: None)
    wait_for(ring)
    with pytest.raises(AssertionError, match="pass 4 overwrites a slot that is not consumed"):
        ring.put(4, 1, [(0, memory)], lambda: None)
    ring.restart()
    ring.put(9, 1, [(0, memory)], lambda: None)
    ring.close(300)


# -- whole layers ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """LMDBs of bytes, of floats, and of bytes with a float record among them."""
    path = tmp_path_factory.mktemp("input")
    images = np.random.default_rng(0).integers(0, 256, (50, 3, 20, 24), dtype=np.uint8)

    def datum(image, label, floats):
        values = {"float_data": image.ravel().tolist()} if floats else {"data": image.tobytes()}
        return Datum(channels=3, height=20, width=24, label=label, **values)

    for name, is_float in (("bytes", lambda n: False), ("floats", lambda n: True), ("mixed", lambda n: n == 33)):
        write_datums(path / name, ((record_key(n), datum(one, n, is_float(n))) for n, one in enumerate(images)))
    return path


def make(backend, source, dtype="float32", **context):
    text = f"name: 'd' type: 'Data' data_param {{ source: '{source}' backend: LMDB batch_size: 8 shuffle: true }}"
    transform = "transform_param { crop_size: 17 mirror: true mean_value: 104 mean_value: 117 mean_value: 123 }"
    param = text_format.Parse(f"{text} {transform} top: 'data' top: 'label'", LayerParameter())
    layer = layer_class("Data")(param, LayerContext(backend, TRAIN, seed=3, **context))
    blobs = [Blob(backend, name="data", dtype=dtype), Blob(backend, name="label")]
    layer.setup([], blobs)
    return layer, blobs


def run(layer, blobs, passes):
    found = []
    for number in range(passes):
        layer.prefetch_to_device(number)
        layer.forward([], blobs)
        layer.release_batch(number)
        layer.context.passes.number += 1
        found.append([blob.host_data() for blob in blobs])
    layer.close()
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", ["bytes", "floats", "mixed"])
def test_layers_give_what_they_give_on_the_cpu(backend, folder, source, dtype):
    expected = run(*make(create_backend(threads=1), folder / source), 90)
    found = run(*make(backend, folder / source, dtype), 90)
    for (images, labels), (cpu_images, cpu_labels) in zip(found, expected, strict=True):
        np.testing.assert_array_equal(images, rounded(cpu_images, dtype))
        np.testing.assert_array_equal(labels, cpu_labels)


@pytest.mark.parametrize("iter_size", [1, 3])
def test_captured_layers_take_what_they_are_fed(backend, folder, iter_size):
    """As the solver runs them: the first iteration eagerly, then graphs whose passes are all fed before."""
    import cupy

    expected = run(*make(create_backend(threads=1), folder / "bytes"), 90)
    layer, blobs = make(backend, folder / "bytes", iter_size=iter_size)
    copies = [backend.zeros(blobs[0].shape) for _ in range(iter_size)]
    counters = [cupy.zeros(2, cupy.uint64) for _ in range(iter_size)]
    passes = layer.context.passes

    def work():
        for copy, counter in zip(copies, counters, strict=True):
            passes.on_device = counter
            layer.forward([], blobs)
            backend.copy(blobs[0].data, copy)

    graph = None
    for first in range(0, 90, iter_size):
        for i in range(iter_size):
            backend.from_host(np.array([first + i, 0], np.uint64), counters[i])
            layer.prefetch_to_device(first + i)
        assert not layer.transfer_changed()
        if graph is not None:
            graph.launch()
        else:
            work()
        for i in range(iter_size):
            layer.release_batch(first + i)
        passes.number = first + iter_size
        for i in range(iter_size):
            np.testing.assert_array_equal(backend.to_host(copies[i]), expected[first + i][0])
        if graph is None:
            graph = backend.capture(work)
    layer.close()
