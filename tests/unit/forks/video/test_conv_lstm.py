"""ConvLSTM against its formula, with the settings of the fork's own net."""

from __future__ import annotations

import numpy as np
import pytest
from layer_harness import BACKENDS, Runner, check_layer, gaussian
from training import build_net

from caffepy.errors import ConfigError, OutOfMemoryError, ShapeError
from caffepy.formats.proto import caffe_pb2

STEPS, STREAMS, CHANNELS, SIZE, HEIGHT, WIDTH = 3, 2, 2, 3, 4, 5
X = gaussian((STEPS, STREAMS, CHANNELS, HEIGHT, WIDTH), 1)
CONT = np.array([[0, 1], [1, 0], [1, 1]], np.float32)
STATE = (1, STREAMS, SIZE, HEIGHT, WIDTH)
STATES = [gaussian(STATE, seed) for seed in (10, 11)]
CONV = "num_output: 3 kernel_size: 3 pad: 1 weight_filler { type: 'gaussian' std: 0.2 }"
EXPOSED = "recurrent_param { expose_hidden: true } "
IDLE = [np.zeros(1, np.float32)] * 2
X_WEIGHTS, BIAS = 0.3 * gaussian((12, CHANNELS, 3, 3), 2), gaussian((12,), 4)
H_WEIGHTS = 0.3 * gaussian((12, SIZE, 3, 3), 3)
PEEPHOLES = [gaussian((HEIGHT, WIDTH), seed) for seed in (5, 6, 7)]
PARAMS = [X_WEIGHTS, *IDLE, H_WEIGHTS, BIAS, *PEEPHOLES, *IDLE]
LEARNED = [0, 3, 4, 5, 6, 7]


def text(more="", conv=f"lstm_conv_param {{ {CONV} }}"):
    return f"type: 'ConvLSTM' {conv} {more}"


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def convolved(x, weights):
    """With as many zeros around x as keep its size."""
    pad = [(size // 2, size // 2) for size in weights.shape[2:]]
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(x, [(0, 0), (0, 0), *pad]), weights.shape[2:], (2, 3))
    return np.einsum("nchwij,ocij->nohw", windows, weights)


def conv_lstm(x, cont, w_x, w_h, bias, peepholes, h=None, c=None):
    """All h, the last h and the last c; `w_x` may be None, and `peepholes` empty."""
    zero = np.zeros((x.shape[1], w_h.shape[1], *x.shape[3:]))
    h, c = (zero if state is None else state[0] for state in (h, c))
    outputs = []
    for t in range(len(x)):
        flag = cont[t][:, None, None, None]
        gates = convolved(flag * h, w_h) + bias[:, None, None]
        if w_x is not None:
            gates = gates + convolved(x[t], w_x)
        i, f, o, g = np.split(gates, 4, axis=1)
        if peepholes:
            i, f, o = (gate + w * c for gate, w in zip((i, f, o), peepholes, strict=True))
        c = flag * sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        outputs.append(h)
    return np.stack(outputs), h[None], c[None]


def test_two_convolutions_without_peepholes():
    conv = (
        "lstm_conv_param { type: 'hidden' num_output: 3 kernel_size: 1 } "
        "lstm_conv_param { type: 'input' num_output: 3 kernel_h: 3 kernel_w: 1 pad_h: 1 pad_w: 0 }"
    )
    cont = np.concatenate([np.zeros((1, STREAMS)), CONT[1:]])
    params = [gaussian((12, CHANNELS, 3, 1), 8), *IDLE, gaussian((12, SIZE, 1, 1), 9), BIAS, *IDLE]
    check_layer(
        text("lstm_debug_param { disable_hadamard: true }", conv),
        [X, cont],
        lambda x, cont, w_x, a, b, w_h, bias, *_: conv_lstm(x, cont, w_x, w_h, bias, ())[0],
        params=params,
        learned=[0, 3, 4],
    )


@pytest.mark.parametrize(
    ("axis", "count", "shape"),
    [(2, 1, (SIZE,)), (2, 3, (SIZE, HEIGHT, WIDTH)), (4, 1, (WIDTH,)), (3, 0, ()), (1, 4, STATE[1:]), (0, 5, STATE)],
)
def test_axes_of_the_peepholes(axis, count, shape):
    peepholes = [gaussian(shape or (1,), seed).reshape(shape) for seed in (5, 6, 7)]

    def compute(x, cont, h, c, w_x, _, __, w_h, bias, *others):
        whole = [w.reshape((1,) * axis + w.shape + (1,) * (5 - axis - count))[0] for w in others[:3]]
        return conv_lstm(x, cont, w_x, w_h, bias, whole, h, c)

    params = [X_WEIGHTS, *IDLE, H_WEIGHTS, BIAS, *peepholes, *IDLE]
    more = f"{EXPOSED} lstm_debug_param {{ axis_hadamard: {axis} num_axes_hadamard: {count} }}"
    check_layer(text(more), [X, CONT, *STATES], compute, tops=3, params=params, learned=LEARNED)


@pytest.mark.parametrize("ignored", [False, True])
def test_exposed_states_have_gradients(ignored):
    """As a decoder that reads no x, and as an encoder."""

    def compute(x, cont, h, c, *params):
        w_x, _, _, w_h, bias, *others = (None, *params) if ignored else params
        return conv_lstm(x, cont, w_x, w_h, bias, others[:3], h, c)

    params, learned = (PARAMS[1:], [2, 3, 4, 5, 6]) if ignored else (PARAMS, LEARNED)
    more = EXPOSED + ("lstm_debug_param { ignore_x: true }" if ignored else "")
    check_layer(text(more), [X, CONT, *STATES], compute, tops=3, params=params, learned=learned)


@pytest.mark.parametrize("backend", BACKENDS)
def test_states_continue_in_the_next_pass(backend):
    runner = Runner(text(), [X, CONT], backend, params=PARAMS)
    h = c = None
    for _ in range(2):
        wanted, h, c = conv_lstm(X.astype(np.float64), CONT, X_WEIGHTS, H_WEIGHTS, BIAS, PEEPHOLES, h, c)
        np.testing.assert_allclose(runner.forward()[0], wanted, rtol=1e-4, atol=1e-5)
    assert len(runner.layer.state()) == 2
    assert [spec.lr_mult for spec in runner.layer.param.param] == [1, 0, 0, 1, 1, 1, 1, 1, 0, 0]


def test_no_bias():
    layer = Runner(text(conv=f"lstm_conv_param {{ {CONV} bias_term: false }}"), [X, CONT]).layer
    shapes = [(12, CHANNELS, 3, 3), (1,), (1,), (12, SIZE, 3, 3), *[(HEIGHT, WIDTH)] * 3, (1,), (1,)]
    assert [blob.shape for blob in layer.blobs] == shapes


NET = """
layer { name: "x" type: "Input" top: "x" top: "cont" top: "dummy" top: "cont_dec" top: "dummy_dec" input_param {
  shape { dim: 3 dim: 2 dim: 4 dim: 6 dim: 6 } shape { dim: 3 dim: 2 } shape { dim: 1 dim: 2 dim: 5 dim: 6 dim: 6 }
  shape { dim: 2 dim: 2 } shape { dim: 2 dim: 2 dim: 4 dim: 6 dim: 6 } } }
layer { name: "encode1" type: "ConvLSTM" bottom: "x" bottom: "cont" bottom: "dummy" bottom: "dummy" top: "encode1"
  top: "encode1_h" top: "encode1_c" recurrent_param { expose_hidden: true }
  lstm_debug_param { axis_hadamard: 3 num_axes_hadamard: 2 }
  lstm_conv_param { num_output: 5 kernel_size: 5 pad: 2 weight_filler { type: "uniform" min: -0.1 max: 0.1 }
    bias_filler { type: "constant" value: 0 } } }
layer { name: "decode1" type: "ConvLSTM" bottom: "dummy_dec" bottom: "cont_dec" bottom: "encode1_h" bottom: "encode1_c"
  top: "decode1" top: "decode1_h" top: "decode1_c" recurrent_param { expose_hidden: true }
  lstm_debug_param { ignore_x: true disable_hadamard: false axis_hadamard: 3 num_axes_hadamard: 2 }
  lstm_conv_param { num_output: 5 kernel_size: 5 pad: 2 weight_filler { type: "uniform" min: -0.1 max: 0.1 } } }
layer { name: "silencium" type: "Silence" bottom: "encode1" bottom: "decode1_h" bottom: "decode1_c" }
layer { name: "output" type: "Convolution" bottom: "decode1" top: "output"
  convolution_param { num_output: 4 kernel_size: 1 axis: 2 weight_filler { type: "uniform" min: -0.2 max: 0.2 } } }
layer { name: "loss" type: "EuclideanLoss" bottom: "output" bottom: "dummy_dec" top: "loss" }
"""


def test_a_decoder_trains_its_encoder():
    """The net's form is that of the fork's encode-decode.prototxt."""
    net = build_net(NET, phase=caffe_pb2.TRAIN)
    for seed, name in enumerate(("x", "dummy_dec")):
        net.blobs[name].data[...] = gaussian(net.blobs[name].shape, seed)
    for name in ("cont", "cont_dec"):
        net.blobs[name].data[...] = 1
    net.clear_param_diffs()
    net.forward()
    assert net.blobs["decode1"].shape == (2, 2, 5, 6, 6)
    assert net.blobs["encode1_c"].shape == (1, 2, 5, 6, 6)
    net.backward()
    encoder, decoder = (layer for layer in net.layers if layer.type == "ConvLSTM")
    assert (len(encoder.blobs), len(decoder.blobs)) == (10, 9)
    assert all(np.abs(np.asarray(encoder.blobs[index].diff)).max() > 0 for index in (0, 3, 4, 6))


@pytest.mark.parametrize(
    ("conv", "more", "shapes", "message"),
    [
        ("", "", [], "once or twice.*found .."),
        ("lstm_conv_param { kernel_size: 1 }", "", [], "num_output from 1"),
        ("lstm_conv_param { num_output: 4000000000 kernel_size: 1 }", "", [], "num_output from 1"),
        ("lstm_conv_param { num_output: 400000000 kernel_size: 1 }", "", [], "its states"),
        (f"lstm_conv_param {{ {CONV} type: 'x' }}", "", [], "found .'x'."),
        (f"lstm_conv_param {{ {CONV} type: 'hidden' }}", "", [], 'type "input" or "all"'),
        (f"lstm_conv_param {{ {CONV} }} lstm_conv_param {{ num_output: 2 kernel_size: 1 }}", "", [], r"found \[3, 2\]"),
        ("lstm_conv_param { num_output: 3 kernel_size: 3 }", "", [], "changes the maps' size"),
        (f"lstm_conv_param {{ {CONV} }}", EXPOSED, [], "2 bottoms and 1 tops"),
        (f"lstm_conv_param {{ {CONV} }}", "", [X.shape, CONT.shape, X.shape], "static input is not"),
        (f"lstm_conv_param {{ {CONV} }}", "", [X.shape[1:], CONT.shape], "five axes"),
        (f"lstm_conv_param {{ {CONV} }}", "", [X.shape, (2, 2)], "time steps and streams"),
        (f"lstm_conv_param {{ {CONV} }}", "lstm_debug_param { axis_hadamard: 4 }", [], "goes past"),
        (f"lstm_conv_param {{ {CONV} }}", "lstm_debug_param { num_axes_hadamard: 4294967295 }", [], "goes past"),
    ],
)
def test_bad_settings_are_refused(conv, more, shapes, message):
    with pytest.raises((ConfigError, ShapeError, OutOfMemoryError), match=message):
        Runner(text(more, conv), [np.zeros(shape, np.float32) for shape in shapes or (X.shape, CONT.shape)])


def test_states_of_other_shapes_are_refused():
    with pytest.raises(ShapeError, match="3 channels"):
        Runner(text(EXPOSED), [X, CONT, np.zeros(STATE), np.zeros((1, 2, 3, 4, 4))], tops=3)
