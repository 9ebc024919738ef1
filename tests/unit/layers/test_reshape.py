"""Flatten and Reshape, and elements in logical order whatever the order in memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_harness import BACKENDS, Runner, backend_named, check_layer, gaussian

from caffepy.errors import ConfigError, ShapeError
from caffepy.layers.layer import LayoutAdapter

shapes = st.lists(st.integers(1, 4), min_size=1, max_size=5).map(tuple)


@settings(max_examples=20)
@given(shape=shapes, data=st.data())
def test_flatten(shape, data):
    axis = data.draw(st.integers(0, len(shape) - 1))
    end = data.draw(st.integers(axis, len(shape) - 1))
    text = f"type: 'Flatten' flatten_param {{ axis: {axis} end_axis: {end - len(shape)} }}"
    check_layer(text, [gaussian(shape)], lambda x: x.reshape((*shape[:axis], -1, *shape[end + 1 :])))


RESHAPES = [
    ((2, 8), "shape { dim: 0 dim: 2 dim: 4 }", (2, 2, 4)),
    ((2, 8), "shape { dim: 2 dim: 2 dim: -1 }", (2, 2, 4)),
    ((2, 8), "shape { dim: 2 dim: 2 dim: 4 } axis: 0", (2, 2, 4)),
    ((2, 8), "shape { dim: 2 dim: 4 } axis: 1", (2, 2, 4)),
    ((2, 8), "shape { dim: 2 dim: 4 } axis: -2", (2, 2, 4)),
    ((2, 8), "shape { dim: 1 } axis: -1 num_axes: 0", (2, 8, 1)),
    ((2, 8), "shape { dim: 1 dim: 1 } axis: 1 num_axes: 0", (2, 1, 1, 8)),
    ((2, 3, 4, 5), "shape { dim: 0 dim: 4 dim: 3 dim: 5 }", (2, 4, 3, 5)),
    ((2, 3, 4, 5), "shape { dim: -1 } axis: 1 num_axes: 2", (2, 12, 5)),
    ((2, 60), "shape { dim: 3 dim: 4 dim: -1 } axis: 1", (2, 3, 4, 5)),
    ((2, 3, 4, 5), "shape { dim: 0 dim: 0 dim: 0 dim: 0 }", (2, 3, 4, 5)),
]


@pytest.mark.parametrize(("shape", "text", "wanted"), RESHAPES)
def test_reshape(shape, text, wanted):
    check_layer(f"type: 'Reshape' reshape_param {{ {text} }}", [gaussian(shape)], lambda x: x.reshape(wanted))


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_is_shared_where_its_order_allows(backend):
    for shape, shared in (((2, 6), True), ((2, 6, 1, 1), True), ((2, 6, 2, 2), False)):
        runner = Runner("type: 'Flatten'", [gaussian(shape)], backend)
        runner.forward()
        device = runner.layer.backend
        with device.activate():
            device.fill(runner.bottom[0].data, 7)
            assert (runner.top[0].host_data() == 7).all() == shared


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("shape { dim: 5 }", ShapeError, r"16 elements cannot take the shape 5 \('a' is 2 8 \(16\)\)"),
        ("shape { dim: 3 dim: -1 }", ShapeError, "16 elements cannot take the shape 3 -1"),
        ("shape { dim: 0 dim: 8 dim: 0 }", ShapeError, "shape 0 8 0 .*axis 2"),
        ("shape { dim: -1 dim: -1 }", ConfigError, "may hold one -1"),
        ("shape { dim: 16 } axis: 3", ShapeError, "axis 3 and num_axes -1 go past"),
        ("shape { dim: 16 } num_axes: 3", ShapeError, "axis 0 and num_axes 3 go past"),
    ],
)
def test_reshape_refusals(text, error, message):
    with pytest.raises(error, match=message):
        Runner(f"type: 'Reshape' reshape_param {{ {text} }}", [gaussian((2, 8))])


def test_flatten_refusals():
    with pytest.raises(ShapeError, match="axis 2 comes after end_axis 1"):
        Runner("type: 'Flatten' flatten_param { axis: 2 end_axis: 1 }", [gaussian((2, 3, 4))])
    with pytest.raises(ConfigError, match="cannot work in place"):
        Runner("type: 'Flatten'", [gaussian((2, 3))], in_place=True)


@settings(max_examples=30)
@given(shape=shapes, other=st.sampled_from(["row", "4-D"]))
def test_reordered_there_and_back(shape, other):
    backend = backend_named("cpu")
    target = (int(np.prod(shape)),) if other == "row" else (1, int(np.prod(shape)), 1, 1)
    values = gaussian(shape)
    array, back = backend.zeros(shape), backend.zeros(shape)
    backend.from_host(values, array)
    reordered = LayoutAdapter(backend, shape, target)
    loaded = backend.to_host(reordered.load(array))
    assert np.array_equal(loaded, values.reshape(target))
    backend.from_host(2 * loaded, reordered.target(back))
    reordered.store(back)
    assert np.array_equal(backend.to_host(back), 2 * values)
