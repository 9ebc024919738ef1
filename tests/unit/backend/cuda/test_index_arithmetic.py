"""The axes of strided copies: checked by brute force; needs no GPU."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from primitive_checks.strategies import shapes_and_axes

from caffepy.backend.cuda.index_arithmetic import StridedAxis, collapse, widest

ENDS = ("source", "destination")


@settings(max_examples=200)
@given(case=shapes_and_axes(), order=st.randoms(use_true_random=False))
def test_collapsed_axes_walk_along_both_arrays(case: tuple[tuple[int, ...], int, int], order: random.Random) -> None:
    shape = case[0]
    source = np.arange(np.prod(shape)).reshape(shape)
    axes = list(range(len(shape)))
    order.shuffle(axes)
    wide = np.zeros([shape[a] + 1 for a in axes])
    destination = wide[tuple(slice(shape[a]) for a in axes)].transpose(np.argsort(axes))
    assert destination.shape == shape
    steps = [tuple(s // array.itemsize for s in array.strides) for array in (source, destination)]
    flat = wide.reshape(-1)
    joined = collapse(shape, steps[0], steps[1])
    for place in np.ndindex(*(axis.size for axis in joined)):
        at = [sum(i * getattr(axis, end) for i, axis in zip(place, joined, strict=True)) for end in ENDS]
        flat[at[1]] = source.reshape(-1)[at[0]]
    assert np.array_equal(destination, source)


def test_slices_of_channels_last_arrays_have_two_axes() -> None:
    whole, part = (7 * 5 * 64, 1, 5 * 64, 64), (7 * 5 * 16, 1, 5 * 16, 16)
    assert collapse((8, 16, 7, 5), part, whole) == [StridedAxis(8 * 7 * 5, 16, 64), StridedAxis(16, 1, 1)]
    assert collapse((8, 16, 7, 5), part, part) == [StridedAxis(8 * 7 * 5 * 16, 1, 1)]


def test_widest() -> None:
    assert widest([64, 8, 24], 8) == 8 and widest([64, 12], 8) == 4 and widest([7], 8) == 1 and widest([], 4) == 4
