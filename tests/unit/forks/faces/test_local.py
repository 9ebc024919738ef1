"""Local."""

from __future__ import annotations

import numpy as np
import pytest
from layer_harness import Floats, Runner, check_layer, gaussian

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
def test_formula_and_gradients(kernel: int, stride: int, pad: int) -> None:
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


def test_bad_input() -> None:
    x = gaussian((2, 3, 5, 6))
    for missing in ("num_output: 2", "kernel_size: 3"):
        with pytest.raises(ConfigError, match="at least 1"):
            Runner(f"type: 'Local' local_param {{ {missing} }}", [x])
    with pytest.raises(ShapeError, match="from 9 on"):
        Runner("type: 'Local' local_param { num_output: 2 kernel_size: 9 }", [x])
    with pytest.raises(ShapeError, match="from 3 on"):
        Runner("type: 'Local' local_param { num_output: 2 kernel_size: 3 }", [x[0]])
