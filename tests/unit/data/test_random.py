import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caffepy.data.random import below, permutation, philox, rand_skip_count, sample_words

# Counter, key and result: the known answers of Random123's kat_vectors.
KNOWN = [
    ([0, 0, 0, 0], (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, (0xFFFFFFFF, 0xFFFFFFFF), [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        (0xA4093822, 0x299F31D0),
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_known_answers(counter, key, expected):
    assert philox(np.array(counter, np.uint64).reshape(4, 1), key).ravel().tolist() == expected


@given(first=st.integers(0, 2**40), cut=st.integers(1, 9), seed=st.integers(0, 2**64 - 1))
def test_words_of_a_sample_do_not_depend_on_the_batch_it_is_in(first, cut, seed):
    samples = np.arange(first, first + 10)
    whole = sample_words(seed, 7, samples)
    parts = [sample_words(seed, 7, samples[:cut]), sample_words(seed, 7, samples[cut:])]
    np.testing.assert_array_equal(whole, np.concatenate(parts, axis=1))


def test_words_differ_between_samples_streams_and_seeds():
    words = [
        sample_words(seed, stream, np.array([sample])).tobytes()
        for seed in (0, 2**32) for stream in (1, 2) for sample in (0, 1)
    ]  # fmt: skip
    assert len(set(words)) == 8


@given(limit=st.integers(1, 1000), seed=st.integers(0, 2**32))
def test_below_stays_below(limit, seed):
    numbers = below(sample_words(seed, 0, np.arange(50))[0], limit)
    assert numbers.min() >= 0
    assert numbers.max() < limit


def test_below_reaches_every_number_about_equally_often():
    counts = np.bincount(below(sample_words(1, 2, np.arange(30000))[1], 30))
    assert counts.size == 30
    assert abs(counts - 1000).max() < 150


@given(length=st.integers(1, 300), epoch=st.integers(0, 2**33), seed=st.integers(0, 2**64 - 1))
def test_permutation_holds_every_record_once(length, epoch, seed):
    assert sorted(permutation(seed, 3, epoch, length).tolist()) == list(range(length))


def test_permutation_differs_between_epochs():
    orders = {permutation(5, 3, epoch, 50).tobytes() for epoch in range(20)}
    assert len(orders) == 20


def test_skip_is_settled_by_the_seed():
    skips = [rand_skip_count(seed, 9, 10) for seed in range(100)]
    assert skips == [rand_skip_count(seed, 9, 10) for seed in range(100)]
    assert set(skips) == set(range(10))
