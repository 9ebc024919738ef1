"""Copies that only the CPU makes, and copies that are repeated by a captured pass."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from caffepy.backend import create_backend
from caffepy.backend.cpu.jit.kernel import KernelGraph
from caffepy.backend.cpu.jit.threads import GRAIN

CPU = create_backend(None, 2)


def cut(shape: tuple[int, ...], axis: int, more: int) -> Any:
    """A part of a larger array, cut along an axis, or with `more` of 0 a whole one."""
    whole = np.full((*shape[:axis], shape[axis] + more, *shape[axis + 1 :]), np.nan, np.float32)
    return whole[(slice(None),) * axis + (slice(more // 2, more // 2 + shape[axis]),)]


def check_captured_copy(source: Any, target: Any, by_kernels: bool = True) -> None:
    """Capture a copy, and launch it twice with other numbers; `by_kernels`: NumPy does nothing."""
    graph = KernelGraph([lambda: CPU.copy(source, target)])
    for _ in range(2):
        source += 1
        graph.launch()
        np.testing.assert_array_equal(target, source)
    assert not (by_kernels and graph.host_works)


@settings(max_examples=60)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=6).map(tuple),
    axes=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    more=st.tuples(st.sampled_from([0, 3]), st.sampled_from([0, 3])),
)
def test_captured_copies_of_parts(shape: tuple[int, ...], axes: tuple[int, int], more: tuple[int, int]) -> None:
    one, other = (axis % len(shape) for axis in axes)
    source, target = cut(shape, one, more[0]), cut(shape, other, more[1])
    source[...] = np.random.default_rng(1).standard_normal(shape)
    check_captured_copy(source, target, by_kernels=one == other or 0 in more)
    memory = target if target.base is None else target.base
    assert np.isnan(memory).sum() == memory.size - target.size


def test_captured_copies_of_long_lines() -> None:
    source, target = cut((2, 3 * GRAIN + 5), 1, 7), cut((2, 3 * GRAIN + 5), 1, 0)
    source[...] = np.arange(source.size).reshape(source.shape)
    check_captured_copy(source, target)


def test_mirrored_images() -> None:
    values = np.random.default_rng(1).standard_normal((2, 3, 5, 7)).astype(np.float32)
    memory = np.zeros((2, 5, 7, 3), np.float32)
    target = memory[:, :, ::-1].transpose(0, 3, 1, 2)
    CPU.copy(values, target)
    np.testing.assert_array_equal(target, values)


def test_a_copy_onto_itself_with_a_shift() -> None:
    array = np.arange(48, dtype=np.float32).reshape(1, 1, 6, 8)
    expected = array[:, :, :-1].copy()
    CPU.copy(array[:, :, :-1], array[:, :, 1:])
    np.testing.assert_array_equal(array[:, :, 1:], expected)


def test_one_image_for_all() -> None:
    target = np.zeros((3, 2, 4, 4), np.float32)
    CPU.copy(np.full((1, 2, 1, 1), 4, np.float32), target)
    assert (target == 4).all()


def test_arrays_without_elements_and_other_dtypes() -> None:
    CPU.copy(np.zeros((2, 0), np.float32), np.zeros((2, 0), np.float32))
    target = np.zeros((2, 3), np.float32)
    CPU.copy(np.arange(6, dtype=np.float64).reshape(2, 3), target)
    np.testing.assert_array_equal(target, np.arange(6).reshape(2, 3))
    CPU.copy(np.arange(6, dtype=np.float32).reshape(3, 2).T, target)
    np.testing.assert_array_equal(target, np.arange(6).reshape(3, 2).T)
