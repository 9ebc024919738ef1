"""DenseBlock against its formula, with and without convolutions of 1 x 1."""

from __future__ import annotations

import numpy as np
import pytest
from layer_harness import BACKENDS, TEST, Runner, assert_near, check_layer, gaussian, spread
from training import build_net

from caffepy.errors import ConfigError, OutOfMemoryError, ShapeError
from caffepy.formats.proto import caffe_pb2

SHAPE = (3, 2, 4, 5)
TRANSITIONS, GROWTH = 2, 3
FILLERS = "Filter_Filler { type: 'msra' } BN_Scaler_Filler { value: 1 } BN_Bias_Filler { value: 0 }"


def text(more="", transitions=TRANSITIONS, growth=GROWTH):
    sizes = f"numTransition: {transitions} growthRate: {growth}"
    return f"type: 'DenseBlock' denseblock_param {{ {sizes} {FILLERS} {more} }}"


def params(narrow=False):
    """As the layer has them, with statistics unlike the first ones."""
    wide = [SHAPE[1] + GROWTH * i for i in range(TRANSITIONS)]
    shapes = [(GROWTH, 4 * GROWTH if narrow else channels, 3, 3) for channels in wide]
    shapes += [(channels,) for _ in range(4) for channels in wide]
    if narrow:
        shapes += [(4 * GROWTH, channels, 1, 1) for channels in wide] + [(4 * GROWTH,)] * 8
    shapes += [(1,)]
    values = [gaussian(shape, seed=seed) for seed, shape in enumerate(shapes)]
    for i, value in enumerate(values[:-1]):
        if i // TRANSITIONS % 5 in (1, 4):  # scales and variances
            values[i] = np.abs(value) + 0.5
    return values


def convolved(x, weights):
    """True convolution with as many zeros around x as keep its size."""
    kernel = weights.shape[2]
    padded = np.pad(x, ((0, 0), (0, 0), *[(kernel // 2, kernel // 2)] * 2))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (kernel, kernel), axis=(2, 3))
    return np.einsum("nchwij,ocij->nohw", windows, weights[:, :, ::-1, ::-1])


def unit(x, weights, scale, bias, mean, variance, phase):
    if phase != TEST:
        mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3))
    each = [value[:, None, None] for value in (scale, bias, mean, variance)]
    return convolved(np.maximum((x - each[2]) / np.sqrt(each[3] + 1e-5) * each[0] + each[1], 0), weights)


def block(x, *values, phase=None):
    """The formula; with 21 parameters there are convolutions of 1 x 1."""
    groups = [values[i : i + TRANSITIONS] for i in range(0, len(values) - 1, TRANSITIONS)]
    for i in range(TRANSITIONS):
        weights, *norm = (group[i] for group in groups[:5])
        added = x
        if len(groups) > 5:
            narrow, *second = (group[i] for group in groups[5:])
            added = unit(unit(added, narrow, *norm, phase), weights, *second, phase)
        else:
            added = unit(added, weights, *norm, phase)
        x = np.concatenate([x, added], axis=1)
    return x


@pytest.mark.parametrize("narrow", [False, True])
def test_formula_and_gradients(narrow):
    more = "use_BC: true" if narrow else ""
    check_layer(text(more), [gaussian(SHAPE, seed=50)], block, params=params(narrow))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("narrow", [False, True])
def test_stored_statistics(narrow, backend):
    values = params(narrow)
    found = Runner(text("use_BC: true" if narrow else ""), [spread(SHAPE)], backend, phase=TEST, params=values)
    assert_near(found.forward()[0], block(spread(SHAPE), *values, phase=TEST), 1e-5, "y")
    assert not found.layer.running_statistics()


@pytest.mark.parametrize("backend", BACKENDS)
def test_statistics_move(backend):
    x = spread(SHAPE)
    runner = Runner(text("moving_average_fraction: 0.25 use_BC: true"), [x], backend)
    runner.forward()
    blobs = [blob.host_data() for blob in runner.layer.blobs]
    np.testing.assert_allclose(blobs[6], 0.25 * x.mean((0, 2, 3)), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(blobs[8], 0.75 + 0.25 * x.var((0, 2, 3), ddof=1), rtol=1e-5)
    assert list(runner.layer.running_statistics()) == [6, 7, 8, 9, 16, 17, 18, 19]
    rates = [spec.lr_mult for spec in runner.layer.param.param]
    assert [i for i, rate in enumerate(rates) if not rate] == [6, 7, 8, 9, 16, 17, 18, 19, 20]


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout(backend):
    """What a transition adds is dropped or twice as large; the bottom's channels and TEST drop nothing."""
    x, values = spread(SHAPE), params()
    runner = Runner(text("use_dropout: true dropout_amount: 0.5"), [x], backend, params=values)
    plain = Runner(text("dropout_amount: 0.5"), [x], backend, params=values).forward()[0]
    first = slice(SHAPE[1], SHAPE[1] + GROWTH)
    found = runner.forward()[0][:, first]
    kept = found != 0
    np.testing.assert_allclose(found[kept], 2 * plain[:, first][kept], rtol=1e-5)
    assert 0.3 < kept.mean() < 0.7
    np.testing.assert_array_equal(plain[:, : SHAPE[1]], x)
    dy = np.zeros_like(plain)
    dy[:, SHAPE[1] + GROWTH :] = 1
    dropped = runner.forward()[0][:, SHAPE[1] + GROWTH :] == 0
    found = runner.backward([dy])[0]
    dy[:, SHAPE[1] + GROWTH :][dropped] = 77
    np.testing.assert_array_equal(found, runner.backward([dy])[0])


@pytest.mark.parametrize(
    ("given", "shape", "message"),
    [
        (text(), (3, 2), "four axes"),
        (text(transitions=0), SHAPE, "numTransition is 0"),
        (text(growth=-1), SHAPE, "growthRate -1"),
        (text("use_dropout: true dropout_amount: 1"), SHAPE, "dropout_ratio is 1"),
        (text("moving_average_fraction: 2"), SHAPE, "moving_average_fraction is 2"),
        (text(transitions=9999999), SHAPE, "transitions"),
    ],
)
def test_bad_settings_are_refused(given, shape, message):
    with pytest.raises((ConfigError, ShapeError, OutOfMemoryError), match=message):
        Runner(given, [np.zeros(shape, np.float32)])


def test_other_channels_are_refused():
    runner = Runner(text(), [spread(SHAPE)])
    runner.bottom[0].reshape((3, 3, 4, 5))
    with pytest.raises(ShapeError, match="as many channels"):
        runner.layer.reshape(runner.bottom, runner.top)


def test_a_file_of_caffe_ocr_is_read():
    """There scales, biases, means and variances have the shape (1, C, 1, 1)."""
    net = build_net(
        'layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 3 dim: 2 dim: 4 dim: 5 } } } '
        f'layer {{ name: "block" bottom: "x" top: "y" {text()} }}',
        phase=TEST,
    )
    file = caffe_pb2.NetParameter()
    layer, values = file.layer.add(name="block", type="DenseBlock"), params()
    for value in values:
        shape = value.shape if value.ndim == 4 or value.size == 1 else (1, value.size, 1, 1)
        layer.blobs.add(data=value.ravel()).shape.dim.extend(shape)
    net.copy_trained_layers_from(file, "file")
    net.blobs["x"].data[...] = spread(SHAPE)
    net.forward()
    assert_near(net.blobs["y"].host_data(), block(spread(SHAPE), *values, phase=TEST), 1e-5, "y")
