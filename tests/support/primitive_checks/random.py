"""Random numbers and dropout."""

from __future__ import annotations

import backend_oracle as oracle
import numpy as np
import pytest
from backend_arrays import dirty, rounded, stored, to_device
from hypothesis import given
from hypothesis import strategies as st

from caffepy.backend import Backend, RandomStream
from primitive_checks.strategies import SIZES, some


def check_random_uniform(
    backend: Backend, shape: tuple[int, ...], seed: int, stream: int, pass_number: int, first_sample: int
) -> None:
    """The same bits as the oracle."""
    out = dirty(backend, shape)
    backend.random_uniform(out, RandomStream(seed, stream), (pass_number, first_sample))
    expected = oracle.random_uniform(shape, seed, stream, pass_number, first_sample)
    assert np.array_equal(backend.to_host(out), expected)
    assert expected.min() >= 0 and expected.max() < 1


@some
@given(
    shape=st.lists(SIZES, min_size=1, max_size=4),
    seed=st.integers(0, 2**64 - 1),
    stream=st.integers(0, 2**32 - 1),
    pass_number=st.integers(0, 2**32 - 1),
    first=st.integers(0, 2**40),
)
def test_random_uniform(
    backend: Backend, shape: list[int], seed: int, stream: int, pass_number: int, first: int
) -> None:
    check_random_uniform(backend, tuple(shape), seed, stream, pass_number, first)


@pytest.mark.parametrize(
    "shape",
    [
        (3,),
        (4, 7),
        (3, 500),
        (2, 3, 5, 4),
        (2, 1, 5, 3),
        (2, 6, 1, 1),
        (2, 3, 2, 2, 2),
        (2, 32, 6, 6),
        (1, 8, 2, 2),
        (3, 70, 5, 4),
        (2, 9, 4, 3, 2),
        (3, 2052),
        (2, 1, 60, 60),
    ],
)
@pytest.mark.parametrize("first_sample", [0, 2**32 - 1, 2**40])
def test_random_uniform_shapes(backend: Backend, shape: tuple[int, ...], first_sample: int) -> None:
    check_random_uniform(backend, shape, 2**63 + 12345, 0xDEADBEEF, 7, first_sample)


def test_random_numbers_do_not_depend_on_how_samples_are_spread(backend: Backend) -> None:
    whole, part, stream = backend.zeros((6, 3, 5, 5)), backend.zeros((2, 3, 5, 5)), RandomStream(2**63 + 5, 77)
    backend.random_uniform(whole, stream, (9, 100))
    backend.random_uniform(part, stream, (9, 104))
    assert np.array_equal(backend.to_host(whole)[4:], backend.to_host(part))


@some
@given(shape=st.lists(SIZES, min_size=1, max_size=4), first_sample=st.sampled_from([0, 3, 2**32 - 1]))
def test_dropout(backend: Backend, dtype: str, shape: list[int], first_sample: int) -> None:
    """Elements whose documented random number is at least the ratio are kept, wherever the counter lies."""
    x, values = stored(backend, 1, tuple(shape), dtype)
    stream = RandomStream(2**40 + 5, 0xDEADBEEF)
    chances = oracle.random_uniform(tuple(shape), 2**40 + 5, 0xDEADBEEF, 7, first_sample)
    expected = rounded(np.where(chances >= 0.4, values * np.float32(1 / 0.6), 0).astype(np.float32), dtype)
    on_device = to_device(backend, np.array([7, first_sample], np.uint64), "uint64")
    counters = [(7, first_sample), on_device] if backend.captures else [(7, first_sample)]
    for counter in counters:
        out, uniform = dirty(backend, tuple(shape), dtype), dirty(backend, tuple(shape))
        backend.dropout(x, out, 0.4, stream, counter)
        assert np.array_equal(backend.to_host(out), expected)
        backend.random_uniform(uniform, stream, counter)
        assert np.array_equal(backend.to_host(uniform), chances)
    backend.dropout(x, x, 0.4, stream, counters[-1])
    assert np.array_equal(backend.to_host(x), expected)
