import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caffepy.data.random import (
    SampleRng,
    below,
    more_words,
    permutation,
    philox,
    rand_skip_count,
    sample_rngs,
    sample_words,
)

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
        for seed in (0, 2**32)
        for stream in (1, 2)
        for sample in (0, 1)
    ]
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


# -- of a sample -----------------------------------------------------------------------------------------


def test_a_sequence_does_not_depend_on_how_it_is_asked_for():
    whole = SampleRng(1, 2, 3).words(500)
    other = SampleRng(1, 2, 3)
    parts = [other.words(count) for count in (1, 3, 64, 200, 232)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    assert len(set(whole.tolist())) > 495


def test_seed_stream_and_sample_each_give_another_sequence():
    keys = [(1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4), (1, 2, 3 + 2**40)]
    assert len({tuple(SampleRng(*key).words(4).tolist()) for key in keys}) == len(keys)


def test_the_words_that_mirror_and_crop_are_others():
    own = set(sample_words(1, 2, np.array([3]))[:, 0].tolist())
    assert not own & set(SampleRng(1, 2, 3).words(1000).tolist())
    np.testing.assert_array_equal(more_words(1, 2, 3, 1, 2), SampleRng(1, 2, 3).words(8))


def test_distributions():
    rng = SampleRng(4, 5, 6)
    values = rng.uniforms(-2, 4, 20000)
    assert values.dtype == np.float32
    assert values.min() >= -2
    assert values.max() <= 4
    assert abs(values.mean() - 1) < 0.05
    assert abs(values.std() - 6 / 12**0.5) < 0.03
    counts = np.bincount(rng.integers(3, 9000), minlength=3)
    assert counts.size == 3
    assert counts.min() > 2800
    assert {rng.below(2) for _ in range(50)} == {0, 1}
    assert rng.uniform(0.6, 0.6) == np.float32(0.6)


def test_upper_bounds_may_differ():
    found = SampleRng(0, 0, 0).uniforms(0, np.array([0, 1, 2], np.float32), 3)
    words = SampleRng(0, 0, 0).words(3)
    np.testing.assert_allclose(found, words / 2**32 * [0, 1, 2], rtol=1e-6)
    assert below(words, 1).tolist() == [0, 0, 0]


def test_generators_made_together_are_those_made_alone():
    samples = np.array([3, 2**40, 0])
    for sample, rng in zip(samples.tolist(), sample_rngs(1, 2, samples), strict=True):
        np.testing.assert_array_equal(rng.words(500), SampleRng(1, 2, sample).words(500))
