"""Copies of images and volumes between any two orders in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caffepy.backend import create_backend
from caffepy.backend.cpu import backend as cpu_backend
from caffepy.backend.cpu.copying import is_images

CPU = create_backend(None, 2)
ORDERS = ["channels first", "channels last", "some of the channels", "every second column"]


def stored(shape: tuple[int, ...], order: str, values: Any = None) -> Any:
    """An array (N, C, ...) of that order in memory."""
    if order == "channels last":
        array = np.moveaxis(np.zeros((shape[0], *shape[2:], shape[1]), np.float32), -1, 1)
    elif order == "some of the channels":
        array = np.zeros((shape[0], shape[1] + 3, *shape[2:]), np.float32)[:, 2:-1]
    elif order == "every second column":
        array = np.zeros((*shape[:-1], 2 * shape[-1]), np.float32)[..., ::2]
    else:
        array = np.zeros(shape, np.float32)
    if values is not None:
        array[...] = values
    return array


@settings(deadline=None, max_examples=60)
@given(
    shape=st.lists(st.integers(1, 6), min_size=4, max_size=5).map(tuple),
    source=st.sampled_from(ORDERS),
    target=st.sampled_from(ORDERS),
)
def test_all_orders_and_shapes(shape: tuple[int, ...], source: str, target: str) -> None:
    values = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    images, copied = stored(shape, source, values), stored(shape, target)
    assert is_images(images, copied)
    CPU.copy(images, copied)
    np.testing.assert_array_equal(copied, values)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 3, 2, 4, 5)])
def test_they_are_copied_by_kernels(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    """NumPy's work cannot be written down for the passes that follow."""
    monkeypatch.setattr(cpu_backend, "note_host_work", lambda: pytest.fail("copied by NumPy"))
    CPU.copy(stored(shape, "channels last"), stored(shape, "channels first"))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (np.zeros((2, 3, 4), np.float32), np.zeros((2, 3, 4), np.float32)),
        (np.zeros((2, 3, 4, 5), np.float16), np.zeros((2, 3, 4, 5), np.float16)),
        (np.zeros((2, 3, 4, 5), np.float32), np.zeros((2, 3, 4, 1), np.float32)),
    ],
)
def test_what_else_is_left_to_numpy(source: Any, target: Any) -> None:
    assert not is_images(source, target)


def test_overlapping_memory_is_left_to_numpy() -> None:
    memory = np.zeros((2, 3, 4, 6), np.float32)
    assert not is_images(memory[..., :5], memory[..., 1:])
