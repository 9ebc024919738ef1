"""ContinuationIndicator and ReverseTime."""

from __future__ import annotations

import numpy as np
import pytest
from layer_harness import BACKENDS, Runner, check_layer, gaussian

from caffepy.errors import ConfigError, DataError, ShapeError

INDICATOR = "type: 'ContinuationIndicator' continuation_indicator_param { time_step: 3 batch_size: 2 }"
REVERSE = "type: 'ReverseTime'"
COPYING = REVERSE + " reverse_time_param { copy_remaining: true }"
LENGTHS = np.array([5, 3, 0], np.float32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_pass_begins_sequences(backend):
    np.testing.assert_array_equal(Runner(INDICATOR, [], backend).forward()[0], [[0, 0], [1, 1], [1, 1]])


@pytest.mark.parametrize("sizes", ["time_step: 3", "batch_size: 2", "time_step: 0 batch_size: 2"])
def test_sizes_are_needed(sizes):
    with pytest.raises(ConfigError, match="needs time_step and batch_size"):
        Runner(f"type: 'ContinuationIndicator' continuation_indicator_param {{ {sizes} }}", [])


@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 2), (5, 3, 2, 3, 4)])
@pytest.mark.parametrize("text", [REVERSE, COPYING])
def test_each_sequence_is_reversed(text, shape):
    def reference(x, lengths):
        y = x.copy() if text == COPYING else np.zeros_like(x)
        for n, length in enumerate(lengths.astype(int)):
            y[:length, n] = x[:length, n][::-1]
        return y

    check_layer(text, [gaussian(shape), LENGTHS], reference)


def test_what_stands_behind_a_sequence_does_not_show():
    x = gaussian((5, 3, 2))
    x[3:, 1] = x[:, 2] = np.nan
    assert np.isfinite(Runner(REVERSE, [x, LENGTHS]).forward()[0]).all()


@pytest.mark.parametrize("shapes", [((5,), (5,)), ((5, 3), (5,)), ((5, 3), (3, 1))])
def test_shapes_that_do_not_fit(shapes):
    with pytest.raises(ShapeError, match="a length for each sequence"):
        Runner(REVERSE, [np.zeros(shape, np.float32) for shape in shapes])


def test_a_length_beyond_the_time_steps():
    runner = Runner(REVERSE, [gaussian((5, 3, 2)), np.array([5, 6, 1], np.float32)])
    runner.forward()
    with pytest.raises(DataError, match="exceeds the time steps"):
        runner.layer.raise_device_errors()
