"""InnerProduct over any axis, either layout of the weights."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_harness import BACKENDS, TEST, TRAIN, Runner, check_layer, gaussian

from caffepy.errors import ConfigError, ShapeError


@settings(max_examples=25)
@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=5).map(tuple),
    outputs=st.integers(1, 5),
    transpose=st.booleans(),
    bias=st.booleans(),
    data=st.data(),
)
def test_inner_product(shape, outputs, transpose, bias, data):
    axis = data.draw(st.integers(0, len(shape) - 1))
    inputs = int(np.prod(shape[axis:]))
    text = (
        f"type: 'InnerProduct' inner_product_param {{ num_output: {outputs} axis: {axis} "
        f"transpose: {str(transpose).lower()} bias_term: {str(bias).lower()} }}"
    )
    weights = gaussian((inputs, outputs) if transpose else (outputs, inputs), 1)

    def reference(x, weights, bias=0.0):
        rows = x.reshape((*shape[:axis], -1))
        return rows @ (weights if transpose else weights.T) + bias

    check_layer(text, [gaussian(shape)], reference, params=[weights] + ([gaussian((outputs,), 2)] if bias else []))


def test_a_smaller_last_batch_fits():
    runner = Runner(
        "type: 'InnerProduct' inner_product_param { num_output: 2 bias_term: false }", [gaussian((5, 3, 2, 2))]
    )
    x = gaussian((3, 3, 2, 2), 1)
    runner.bottom[0].reshape(x.shape)
    runner.layer.reshape(runner.bottom, runner.top)
    weights = runner.layer.blobs[0].host_data()
    assert np.allclose(runner.forward([x])[0], x.reshape(3, -1) @ weights.T, atol=1e-5)


def test_refusals():
    with pytest.raises(ConfigError, match=r"layer 'L' \(InnerProduct\): inner_product_param needs num_output"):
        Runner("type: 'InnerProduct'", [gaussian((2, 3))])
    with pytest.raises(ShapeError, match="axis 2 does not exist in shape 2 3"):
        Runner("type: 'InnerProduct' inner_product_param { num_output: 2 axis: 2 }", [gaussian((2, 3))])
    runner = Runner("type: 'InnerProduct' inner_product_param { num_output: 2 }", [gaussian((2, 3))])
    runner.bottom[0].reshape((2, 4))
    with pytest.raises(
        ShapeError, match=r"have 4 elements, but the weights need 3 \('a' is 2 4 \(8\); 'L\[0\]' is 2 3"
    ):
        runner.layer.reshape(runner.bottom, runner.top)


# -- normalised weights, of caffe-windows ----------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("transpose", [False, True])
def test_weights_of_length_one(transpose: bool, backend: str) -> None:
    x, w, b = gaussian((4, 6)), gaussian((3, 6), 1), gaussian((3,), 2)
    unit = w / np.linalg.norm(w, axis=1, keepdims=True)
    stored = w.T if transpose else w
    text = (
        f"type: 'InnerProduct' inner_product_param {{ num_output: 3 normalize: true "
        f"transpose: {str(transpose).lower()} weight_filler {{ type: 'xavier' }} }}"
    )
    dy = gaussian((4, 3), 3)
    for phase in (TRAIN, TEST):
        result = Runner(text, [x], backend, params=[stored, b], phase=phase).run([dy])
        np.testing.assert_allclose(result.tops[0], x @ unit.T + b, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(result.bottom_diffs[0], dy @ unit, rtol=1e-4, atol=1e-5)
        diff = dy.T @ x
        np.testing.assert_allclose(result.param_diffs[0], diff.T if transpose else diff, rtol=1e-4, atol=1e-5)
        kept = stored if phase == TEST else (unit.T if transpose else unit)
        np.testing.assert_allclose(result.params[0], kept, rtol=1e-5)
