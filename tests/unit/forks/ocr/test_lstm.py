"""Lstm of CTPN against its formula, with and without sequences that begin in between."""

from __future__ import annotations

import numpy as np
import pytest
from layer_harness import BACKENDS, Runner, check_layer, gaussian

from caffepy.errors import ConfigError, ShapeError

TEXT = "type: 'Lstm' lstm_param { num_output: 4 weight_filler { type: 'gaussian' std: 0.5 } "
PARAMS = [gaussian((16, 3), 1), gaussian((16, 4), 2), gaussian((16,), 3)]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def lstm(x, flags, w_input, w_hidden, bias, first=None):
    """The hidden states (T, N, D) and the last cell."""
    steps, streams, size = *x.shape[:2], w_hidden.shape[1]
    hidden, cell = first or (np.zeros((streams, size)), np.zeros((streams, size)))
    tops = []
    for t in range(steps):
        flag = (flags[t] != 0)[:, None]
        gates = x[t].reshape(streams, -1) @ w_input.T + bias + flag * (hidden @ w_hidden.T)
        i, f, o, g = np.split(gates, 4, axis=1)
        cell = flag * sigmoid(f) * cell + sigmoid(i) * np.tanh(g)
        hidden = sigmoid(o) * np.tanh(cell)
        tops.append(hidden)
    return np.stack(tops), cell


def one_sequence(steps, streams):
    return np.arange(steps)[:, None].repeat(streams, 1)


@pytest.mark.parametrize("shape", [(5, 2, 3), (4, 3, 1, 3), (1, 2, 3)])
def test_each_pass_is_a_sequence(shape):
    flags = one_sequence(*shape[:2])
    check_layer(TEXT + "}", [gaussian(shape)], lambda x, *p: lstm(x, flags, *p)[0], params=PARAMS)


def test_streams_of_rows():
    flags = one_sequence(3, 2)
    check_layer(
        TEXT + "batch_size: 2 }",
        [gaussian((6, 3))],
        lambda x, *p: lstm(x.reshape(3, 2, 3), flags, *p)[0].reshape(6, 4),
        params=PARAMS,
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_sequences_continue_where_the_second_bottom_says(backend):
    flags = np.array([[1, 0], [0, 2], [1, -1], [1, 1]], np.float32)
    x = gaussian((4, 2, 3))
    runner = Runner(TEXT + "}", [x, flags], backend, params=PARAMS)
    first, cell = lstm(x.astype(np.float64), flags, *PARAMS)
    second = lstm(x.astype(np.float64), flags, *PARAMS, first=(first[-1], cell))[0]
    for wanted in (first, second):
        np.testing.assert_allclose(runner.forward()[0], wanted, rtol=1e-4, atol=1e-5)
    assert len(runner.layer.state()) == 2
    flags[0] = 0
    check_layer(TEXT + "}", [x, flags], lambda x, flags, *p: lstm(x, flags, *p)[0], params=PARAMS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gradients_of_gates_are_cut(backend):
    """The gradient of the biases is the sum of those of the gates: here of one time step and stream."""
    x, dy = gaussian((1, 1, 3)), np.full((1, 1, 4), 30, np.float32)
    plain = Runner(TEXT + "}", [x], backend, params=PARAMS).run([dy]).param_diffs[2]
    found = Runner(TEXT + "clipping_threshold: 1 }", [x], backend, params=PARAMS).run([dy])
    np.testing.assert_allclose(found.param_diffs[2], plain.clip(-1, 1), rtol=1e-5)
    assert (np.abs(plain) > 1).any() and (np.abs(plain) < 1).any()
    np.testing.assert_allclose(found.bottom_diffs[0][0], plain.clip(-1, 1)[None] @ PARAMS[0], rtol=1e-4)


def test_cuts_act_on_earlier_time_steps():
    """Through W_h: the gradient before the cut is what the formula's derivative gives for the cut one after it."""
    x, dy = gaussian((2, 1, 3)), np.zeros((2, 1, 4), np.float32)
    dy[1] = 50
    late = Runner(TEXT + "clipping_threshold: 0.1 }", [x], params=PARAMS).run([dy])
    assert np.abs(late.param_diffs[2]).max() <= 0.2 + 1e-6
    whole = Runner(TEXT + "}", [x], params=PARAMS).run([dy])
    assert np.abs(whole.param_diffs[2]).max() > 1


@pytest.mark.parametrize(
    ("text", "shapes", "message"),
    [
        ("", [(3, 2, 3)], "needs num_output"),
        ("num_output: 2 clipping_threshold: -1", [(3, 2, 3)], "clipping_threshold is -1"),
        ("num_output: 2 batch_size: 4", [(6, 3)], "of 4 streams"),
        ("num_output: 2", [(6,)], "needs .time steps"),
        ("num_output: 2", [(0, 2, 3)], "may be empty"),
        ("num_output: 2", [(3, 2, 3), (3, 3)], "a number for each time step"),
    ],
)
def test_bad_settings_are_refused(text, shapes, message):
    with pytest.raises((ConfigError, ShapeError), match=message):
        Runner(f"type: 'Lstm' lstm_param {{ {text} }}", [np.zeros(shape, "f") for shape in shapes])
