"""RNN, LSTM and LSTMUnit against NumPy, their gradients, the states between passes, what they refuse."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_harness import BACKENDS, Runner, assert_near, check_layer, gaussian
from recurrent_reference import lstm, rnn, sigmoid

from caffepy.errors import ConfigError, ShapeError

FILLERS = 'weight_filler { type: "gaussian" std: 0.4 } bias_filler { type: "gaussian" std: 0.4 }'


def text(kind: str, size: int, more: str = "") -> str:
    return f'type: "{kind}" recurrent_param {{ num_output: {size} {FILLERS} {more} }}'


def beginnings(steps: int, streams: int, seed: int = 3) -> Any:
    """A `cont` blob in which each stream begins at step 0 and perhaps at others."""
    cont = (np.random.default_rng(seed).random((steps, streams)) < 0.7).astype(np.float32)
    cont[0] = 0
    return cont


def reference(kind: str, size: int, static: bool) -> Any:
    """The layer in NumPy from states of 0, as `check_layer` takes it."""

    def compute(x: Any, cont: Any, *rest: Any) -> Any:
        zero = np.zeros((x.shape[1], size))
        shared, weights = (rest[0], list(rest[1:])) if static else (None, list(rest))
        if kind == "LSTM":
            return lstm(x, cont, weights, zero, zero, shared)[0]
        return rnn(x, cont, weights, zero, shared)[0]

    return compute


@settings(max_examples=8, derandomize=True)
@given(
    kind=st.sampled_from(["LSTM", "RNN"]),
    steps=st.integers(1, 5),
    streams=st.integers(1, 3),
    size=st.integers(1, 4),
    inner=st.sampled_from([(3,), (), (2, 3), (2, 2, 2)]),
    static=st.booleans(),
)
def test_values_and_gradients(
    kind: str, steps: int, streams: int, size: int, inner: tuple[int, ...], static: bool
) -> None:
    inputs = [gaussian((steps, streams, *inner), 1), beginnings(steps, streams)]
    if static:
        inputs.append(gaussian((streams, 2, 3, 2), 2))
    check_layer(text(kind, size), inputs, reference(kind, size, static))


def test_the_unit() -> None:
    inputs = [gaussian((1, 3, 4), 1), gaussian((1, 3, 16), 2), np.array([[1, 0, 1]], np.float32)]

    def unit(before: Any, gates: Any, cont: Any) -> Any:
        i, f, o, g = np.split(gates, 4, axis=2)
        c = cont[..., None] * sigmoid(f) * before + sigmoid(i) * np.tanh(g)
        return c, sigmoid(o) * np.tanh(c)

    check_layer('type: "LSTMUnit"', inputs, unit)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_new_sequence_forgets_what_is_not_finite(backend: str) -> None:
    inputs = [np.full((1, 2, 3), np.inf, np.float32), gaussian((1, 2, 12), 2), np.array([[0, 1]], np.float32)]
    cell, hidden = Runner('type: "LSTMUnit"', inputs, backend).forward()
    assert np.isfinite(cell[0, 0]).all() and np.isfinite(hidden[0, 0]).all()
    assert np.isinf(cell[0, 1]).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["LSTM", "RNN"])
def test_the_state_is_kept_for_the_next_pass(kind: str, backend: str) -> None:
    """Two passes are one over twice the time; gradients end at the border."""
    x, cont = gaussian((6, 2, 3), 4), beginnings(6, 2)
    cont[3] = [1, 0]
    whole = Runner(text(kind, 4), [x, cont], backend).forward()[0]
    halves = Runner(text(kind, 4), [x[:3], cont[:3]], backend)
    found = [halves.forward()[0], halves.forward([x[3:], cont[3:]])[0]]
    assert_near(np.concatenate(found), whole, 1e-6, "two passes")
    dy = gaussian((3, 2, 4), 5)
    second = halves.backward([dy])[0]
    exact = Runner(text(kind, 4), [x, cont], backend)
    exact.forward()
    over_all = exact.backward([np.concatenate([np.zeros_like(dy), dy])])[0]
    assert second is not None and over_all is not None
    assert_near(second, over_all[3:], 1e-5, "gradient of the second half")


@pytest.mark.parametrize("kind", ["LSTM", "RNN"])
def test_another_number_of_streams_begins_anew(kind: str) -> None:
    x, cont = gaussian((3, 2, 3), 4), np.ones((3, 2), np.float32)
    runner = Runner(text(kind, 4), [x, cont])
    runner.forward()
    first = Runner(text(kind, 4), [x[:, :1], cont[:, :1]]).forward()[0]
    for blob, value in zip(runner.bottom, (x[:, :1], cont[:, :1]), strict=True):
        blob.reshape(value.shape)
    runner.layer.reshape(runner.bottom, runner.top)
    assert np.array_equal(runner.forward([x[:, :1], cont[:, :1]])[0], first)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("kind", ["LSTM", "RNN"])
def test_exposed_states(kind: str, static: bool, backend: str) -> None:
    """They come from bottoms and go to tops; nothing is kept, and they get a gradient of 0, as in Caffe."""
    states = 2 if kind == "LSTM" else 1
    x, cont = gaussian((3, 2, 3), 4), np.array([[1, 0], [1, 1], [0, 1]], np.float32)
    hidden = [gaussian((1, 2, 4), 10 + i) for i in range(states)]
    inputs = [x, cont, *([gaussian((2, 5), 6)] if static else []), *hidden]
    runner = Runner(text(kind, 4, "expose_hidden: true"), inputs, backend, tops=1 + states)
    for _ in range(2):
        tops = runner.forward()
    weights = [blob.host_data().astype(np.float64) for blob in runner.layer.blobs]
    shared = inputs[2] if static else None
    first = [h[0] for h in hidden]
    compute = lstm if kind == "LSTM" else rnn
    wanted = compute(x, cont, weights, *first, shared)
    for found, value in zip(tops, wanted, strict=True):
        assert_near(found.reshape(value.shape), value, 1e-5, "tops")
    diffs = runner.backward([gaussian(top.shape, 8) for top in tops])
    assert diffs[0] is not None and diffs[0].any()
    assert all(diff is not None and not diff.any() for diff in diffs[-states:])
    assert not runner.layer.state()


def test_parameters_have_caffes_order_and_shapes() -> None:
    inputs = [gaussian((2, 3, 5, 2), 1), beginnings(2, 3), gaussian((3, 7), 2)]
    shapes = {kind: [b.shape for b in Runner(text(kind, 4), inputs).layer.blobs] for kind in ("LSTM", "RNN")}
    assert shapes == {
        "LSTM": [(16, 10), (16,), (16, 7), (16, 4)],
        "RNN": [(4, 10), (4,), (4, 7), (4, 4), (4, 4), (4,)],
    }


def test_debug_info_shows_the_unrolled_blobs(caplog: pytest.LogCaptureFixture) -> None:
    runner = Runner('name: "net" ' + text("LSTM", 2, "debug_info: true"), [gaussian((2, 1, 3)), np.ones((2, 1))])
    with caplog.at_level(logging.INFO):
        runner.forward()
    assert "[Forward] Layer net_unit_2, top blob c_2 data: " in caplog.text
    assert runner.layer.capture_blocker() == "its debug_info reads numbers on the host"
    assert Runner(text("LSTM", 2), [gaussian((2, 1, 3)), np.ones((2, 1))]).layer.capture_blocker() is None


X, CONT, STATE = gaussian((2, 3, 4)), np.ones((2, 3), np.float32), gaussian((1, 3, 5))


@pytest.mark.parametrize(
    ("kind", "more", "inputs", "tops", "message"),
    [
        ("LSTM", "", [X, CONT], 2, r"layer 'L' \(LSTM\): takes 1 top blobs, has 2 \(expose_hidden: False\)"),
        ("RNN", "expose_hidden: true", [X, CONT, STATE], 1, r"takes 2 top blobs, has 1 \(expose_hidden: True\)"),
        ("LSTM", "", [X, CONT, X, X], 1, "takes 2 bottom blobs, and one more with a static input, has 4"),
        ("LSTM", "expose_hidden: true", [X, CONT, STATE], 3, "takes 4 bottom blobs"),
    ],
)
def test_wrong_numbers_of_blobs(kind: str, more: str, inputs: list[Any], tops: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Runner(text(kind, 5, more), inputs, tops=tops)


@pytest.mark.parametrize(
    ("more", "inputs", "message"),
    [
        ("", [X[0, 0], CONT], "the first bottom needs at least two axes"),
        ("", [X, CONT[:1]], "the second bottom must have the first one's time steps and streams"),
        ("", [X, CONT, gaussian((2, 4))], "the static input must have as many streams as the first bottom"),
        ("expose_hidden: true", [X, CONT, STATE[:, :2]], "a state must have the shape 1 3 5"),
    ],
)
def test_wrong_shapes(more: str, inputs: list[Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        Runner(text("RNN", 5, more), inputs, tops=2 if more else 1)


def test_num_output_is_needed() -> None:
    with pytest.raises(ConfigError, match="recurrent_param needs num_output"):
        Runner('type: "LSTM"', [X, CONT])


def test_the_unit_refuses_other_shapes() -> None:
    with pytest.raises(ShapeError, match="needs bottoms of shapes 1 N D, 1 N 4D and 1 N"):
        Runner('type: "LSTMUnit"', [STATE, gaussian((1, 3, 15)), CONT[:1]])
