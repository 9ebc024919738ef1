"""Local and ChannelScale."""

from __future__ import annotations

import numpy as np
import pytest
from layer_harness import TEST, Floats, Runner, check_layer, gaussian

from caffepy.errors import ConfigError, ShapeError


def local(x: Floats, weights: Floats, bias: Floats | float, kernel: int, stride: int, pad: int) -> Floats:
    """Position by position."""
    n, _, h, w = x.shape
    outputs = weights.shape[0]
    rows, columns = ((side + 2 * pad - kernel) // stride + 1 for side in (h, w))
    padded = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    y = np.zeros((n, outputs, rows, columns))
    for i in range(rows):
        for j in range(columns):
            window = padded[:, :, i * stride : i * stride + kernel, j * stride : j * stride + kernel]
            y[:, :, i, j] = window.reshape(n, -1) @ weights[:, 0, :, i * columns + j].T
    return y + np.reshape(bias, (1, outputs, rows, columns)) if np.ndim(bias) else y


@pytest.mark.parametrize("kernel, stride, pad", [(3, 1, 0), (2, 2, 1), (3, 2, 1)])
def test_local(kernel: int, stride: int, pad: int) -> None:
    x = gaussian((2, 3, 5, 6))
    text = (
        f"type: 'Local' local_param {{ num_output: 2 kernel_size: {kernel} stride: {stride} pad: {pad} "
        "weight_filler { type: 'xavier' } bias_filler { type: 'gaussian' } }"
    )
    check_layer(text, [x], lambda x, w, b: local(x, w, b, kernel, stride, pad))
    text = text.replace("pad:", "bias_term: false pad:")
    check_layer(text, [x], lambda x, w: local(x, w, 0.0, kernel, stride, pad))


def test_equal_weights_are_a_convolution() -> None:
    x, kernel = gaussian((2, 3, 6, 6)), gaussian((4, 3, 3, 3), 1)
    weights = np.repeat(kernel.reshape(4, 1, 27, 1), 16, axis=3)
    found = Runner("type: 'Local' local_param { num_output: 4 kernel_size: 3 bias_term: false }", [x], params=[weights])
    text = "type: 'Convolution' convolution_param { num_output: 4 kernel_size: 3 bias_term: false }"
    wanted = Runner(text, [x], params=[kernel])
    np.testing.assert_allclose(found.forward()[0], wanted.forward()[0], rtol=1e-4, atol=1e-5)


def test_bad_input_of_local() -> None:
    x = gaussian((2, 3, 5, 6))
    for missing in ("num_output: 2", "kernel_size: 3"):
        with pytest.raises(ConfigError, match="at least 1"):
            Runner(f"type: 'Local' local_param {{ {missing} }}", [x])
    with pytest.raises(ShapeError, match="from 9 on"):
        Runner("type: 'Local' local_param { num_output: 2 kernel_size: 9 }", [x])
    with pytest.raises(ShapeError, match="from 3 on"):
        Runner("type: 'Local' local_param { num_output: 2 kernel_size: 3 }", [x[0]])


# -- ChannelScale ----------------------------------------------------------------------------------------


SHAPES = [(4, 6), (2, 5, 3), (2, 5, 3, 4)]


def scale(more: str = "") -> str:
    return f"type: 'ChannelScale' channel_scale_param {{ {more} }}"


@pytest.mark.parametrize("shape", SHAPES)
def test_channel_scale(shape: tuple[int, ...]) -> None:
    s = gaussian((shape[0], 1, *shape[2:]), 1)
    check_layer(scale(), [gaussian(shape), s], lambda x, s: x * s)


def test_parts_of_channel_scale() -> None:
    x, s, dy = gaussian((2, 3, 2, 2)), gaussian((2, 1, 2, 2), 1), gaussian((2, 3, 2, 2), 2)
    for more, y, dx, ds in (
        ("do_forward: false", x, dy * s, (dy * x).sum(1, keepdims=True)),
        ("do_backward_feature: false", x * s, dy, (dy * x).sum(1, keepdims=True)),
        ("do_backward_scale: false", x * s, dy * s, 0 * s),
    ):
        result = Runner(scale(more), [x, s]).run([dy])
        np.testing.assert_allclose(result.tops[0], y, rtol=1e-5)
        np.testing.assert_allclose(result.bottom_diffs[0], dx, rtol=1e-5)
        np.testing.assert_allclose(result.bottom_diffs[1], ds, rtol=1e-4, atol=1e-6)


def test_global_scale() -> None:
    x, s = gaussian((4, 3)), gaussian((4,), 1)
    runner = Runner(scale("global_scale: true"), [x, s], tops=2)
    mean = np.abs(s).mean()
    for wanted in (mean, mean, 0.99 * mean + 0.01 * 3 * mean):
        if wanted == mean or wanted is mean:
            y, average = runner.forward()
        else:
            y, average = runner.forward([x, 3 * s])
        np.testing.assert_allclose(average, [wanted], rtol=1e-5)
        np.testing.assert_allclose(y, x * wanted, rtol=1e-5)
    for more, wanted in (("max_global_scale: 0.1", 0.1), ("min_global_scale: 7", 7)):
        assert Runner(scale(f"global_scale: true {more}"), [x, s], tops=2).forward()[1] == pytest.approx([wanted])
    tested = Runner(scale("global_scale: true"), [x, s], params=[np.array([2.0])], phase=TEST)
    np.testing.assert_allclose(tested.forward()[0], 2 * x)
    with pytest.raises(ConfigError, match="lr_mult: 0"):
        Runner(scale("global_scale: true") + " param { lr_mult: 1 }", [x, s])


def test_bad_shapes() -> None:
    with pytest.raises(ShapeError, match="one a pixel"):
        Runner(scale(), [gaussian((4, 3)), gaussian((3,))])
    with pytest.raises(ShapeError, match="two to four axes"):
        Runner(scale(), [gaussian((4,)), gaussian((4,))])
