import numpy as np

from caffepy.data.random import SampleRng, below, more_words, sample_rngs, sample_words


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
