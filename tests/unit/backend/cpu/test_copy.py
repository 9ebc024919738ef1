"""Copies of images and volumes between any two orders in memory, and of parts of other arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caffepy.backend import create_backend
from caffepy.backend.cpu.copy import are_lines, is_images
from caffepy.backend.cpu.jit.kernel_graph import KernelGraph
from caffepy.backend.cpu.jit.threads import GRAIN

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


@settings(max_examples=60)
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
def test_they_are_copied_by_kernels(shape: tuple[int, ...]) -> None:
    """NumPy's work cannot be captured for the passes that follow."""
    assert recorded_copy(stored(shape, "channels last"), stored(shape, "channels first"))


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


def cut(shape: tuple[int, ...], axis: int, more: int) -> Any:
    """A part of a larger array, cut along an axis, or with `more` of 0 a whole one."""
    whole = np.full((*shape[:axis], shape[axis] + more, *shape[axis + 1 :]), np.nan, np.float32)
    return whole[(slice(None),) * axis + (slice(more // 2, more // 2 + shape[axis]),)]


def recorded_copy(source: Any, target: Any) -> bool:
    """Capture a copy, make it twice with other numbers; whether kernels alone did it."""
    graph = KernelGraph([lambda: CPU.copy(source, target)])
    for _ in range(2):
        source += 1
        graph.launch()
        np.testing.assert_array_equal(target, source)
    return graph.host_works == 0


@settings(max_examples=60)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=6).map(tuple),
    axes=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    more=st.tuples(st.sampled_from([0, 3]), st.sampled_from([0, 3])),
)
def test_parts_are_copied_by_kernels_where_a_pass_is_written_down(
    shape: tuple[int, ...], axes: tuple[int, int], more: tuple[int, int]
) -> None:
    source, target = (cut(shape, axis % len(shape), extra) for axis, extra in zip(axes, more, strict=True))
    source[...] = np.random.default_rng(1).standard_normal(shape)
    by_kernels = recorded_copy(source, target)
    assert by_kernels or all(more)  # two that are cut along different axes may have no lines in common
    memory = target if target.base is None else target.base
    assert np.isnan(memory).sum() == memory.size - target.size


def test_long_lines_are_shared_out() -> None:
    source, target = cut((2, 3 * GRAIN + 5), 1, 7), cut((2, 3 * GRAIN + 5), 1, 0)
    source[...] = np.arange(source.size).reshape(source.shape)
    assert recorded_copy(source, target)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (np.zeros((4, 3), np.float32).T, np.zeros((3, 4), np.float32)),
        (np.zeros((2, 3, 4), np.float32), np.zeros((2, 3, 1), np.float32)),
        (np.zeros((2, 3), np.float64), np.zeros((2, 3), np.float32)),
        (np.zeros((2, 0), np.float32), np.zeros((2, 0), np.float32)),
        (cut((3, 4, 5), 1, 2), cut((3, 4, 5), 2, 2)),
        ([1.0, 2.0], np.zeros(2, np.float32)),
    ],
)
def test_what_has_no_lines_is_left_to_numpy(source: Any, target: Any) -> None:
    assert not are_lines(source, target)
