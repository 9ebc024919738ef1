"""Images and values out of an input ring."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backend_arrays import rounded, to_device
from image_slots import random_slot

from caffepy.backend import Backend
from caffepy.backend.types import ImageSlot, aligned_size, element_dtype

SHAPES = [
    (1, 1, 1, 1),
    (2, 1, 28, 28),
    (3, 3, 7, 5),
    (1, 7, 3, 3),
    (2, 33, 2, 3),
    (5, 3, 227, 227),
    (3, 2, 1, 9),
    (1, 4, 8, 8),
]


def _fed(backend: Backend, size: int, number: int, at: int, memory: Any) -> tuple[Any, list[int]]:
    """A ring one of whose slots has the memory's bytes from `at` on, and the passes whose memory came back."""
    ring, source = backend.input_ring(size, 1, 4), backend.host_memory(memory.size)
    source[...] = memory
    given_back: list[int] = []
    ring.put(number, 1, [(at, source)], lambda: given_back.append(number))
    return ring, given_back


def _close(backend: Backend, ring: Any, number: int) -> None:
    """Wait for the device, then give the memory back."""
    backend.synchronize()
    ring.consumed(number)
    ring.close(300)


def expected_images(slot: ImageSlot, memory: Any, mean: Any, scale: float) -> tuple[Any, Any]:
    """(images, labels): each pixel less the mean at its place in the whole image, times the scale, mirrored or not."""
    labels, crops, pixels = slot.parts(memory)
    images = np.zeros(slot.shape, np.float32)
    for n, (mirrored, top, left) in enumerate(crops.tolist()):
        part = mean[:, top : top + slot.height, left : left + slot.width] if mean[0].size > 1 else mean
        image = (pixels[n].astype(np.float32) - part) * np.float32(scale)
        images[n] = image[:, :, ::-1] if mirrored else image
    return images, labels.copy()


@pytest.mark.parametrize("whole_mean", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_images(backend: Backend, dtype: str, shape: tuple[int, int, int, int], whole_mean: bool) -> None:
    slot = ImageSlot(*shape)
    whole = (slot.height + 3, slot.width + 2)
    mean = np.random.default_rng(1).random((slot.channels, *(whole if whole_mean else (1, 1))), np.float32) * 200
    memory = random_slot(slot, whole, mirror=True)
    expected, labels = expected_images(slot, memory, mean, 0.1)
    (ring, given_back), on_mean = _fed(backend, slot.size, 6, 0, memory), backend.zeros(mean.shape)
    backend.from_host(mean, on_mean)
    on_device = to_device(backend, np.array([6, 0], np.uint64), "uint64")
    for counter in ((6, 0), on_device) if backend.captures else ((6, 0),):
        images, found = backend.zeros(shape, dtype), backend.zeros((slot.count,))
        backend.take_images(ring, counter, slot, on_mean, 0.1, images, found)
        np.testing.assert_array_equal(backend.to_host(images), rounded(expected, dtype))
        np.testing.assert_array_equal(backend.to_host(found), labels)
    size = int(np.prod(shape))
    shifted = backend.view(backend.zeros((size + 1,), dtype)[1:], shape)
    backend.take_images(ring, (6, 0), slot, on_mean, 0.1, shifted, None)
    np.testing.assert_array_equal(backend.to_host(shifted), rounded(expected, dtype))
    _close(backend, ring, 6)
    assert given_back == [6]


@pytest.mark.parametrize("shape", [(), (1,), (7,), (64,), (6,), (3, 5), (2, 3, 4, 5), (1, 2, 3, 4, 5), (33, 3, 9, 9)])
def test_values_are_rounded_once(backend: Backend, dtype: str, shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32) * 100
    last = (0, *range(2, len(shape)), 1) if len(shape) in (4, 5) else tuple(range(len(shape)))
    in_memory = np.ascontiguousarray(values.transpose(last)).reshape(-1)
    ring, given_back = _fed(backend, 256 + aligned_size(4 * values.size), 3, 256, in_memory.view(np.uint8))
    out = backend.zeros(shape, dtype)
    backend.take_values(ring, (3, 0), 256, out)
    assert out.dtype == element_dtype(dtype)
    np.testing.assert_array_equal(backend.to_host(out), rounded(values, dtype))
    _close(backend, ring, 3)
    assert given_back == [3]
