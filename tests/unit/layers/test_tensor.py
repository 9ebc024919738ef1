"""Permute, Crop, Tile, Flatten, Reshape, Reduction and ArgMax: every field, odd shapes, what is refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_harness import BACKENDS, Runner, backend_named, check_layer, gaussian, spread

from caffepy.errors import ConfigError, ShapeError
from caffepy.layers.layer import LayoutAdapter


@settings(max_examples=25)
@given(
    st.integers(1, 5).flatmap(
        lambda n: st.tuples(
            st.lists(st.integers(1, 4), min_size=n, max_size=n), st.permutations(range(n)), st.integers(0, n)
        )
    )
)
def test_permute(case):
    shape, order, named = case
    fields = " ".join(f"order: {axis}" for axis in order[:named])
    full = [*order[:named], *(axis for axis in range(len(shape)) if axis not in order[:named])]
    check_layer(f"type: 'Permute' permute_param {{ {fields} }}", [gaussian(tuple(shape))], lambda x: x.transpose(full))


@pytest.mark.parametrize("fields", ["order: 1 order: 1", "order: 3"])
def test_permute_refuses(fields):
    with pytest.raises(ConfigError, match=r"layer 'L' \(Permute\): permute_param.order is .* below 3, each once"):
        Runner(f"type: 'Permute' permute_param {{ {fields} }}", [gaussian((2, 3, 4))])


CROPS = [
    ("", (slice(None), slice(None), slice(0, 3), slice(0, 2))),
    ("axis: 2 offset: 1", (slice(None), slice(None), slice(1, 4), slice(1, 3))),
    ("axis: -1 offset: 4", (slice(None), slice(None), slice(None), slice(4, 6))),
    ("axis: 1 offset: 2 offset: 0 offset: 3", (slice(None), slice(2, 3), slice(0, 3), slice(3, 5))),
    ("axis: 0 offset: 1 offset: 0 offset: 2 offset: 1", (slice(1, 2), slice(0, 1), slice(2, 5), slice(1, 3))),
]


@pytest.mark.parametrize(("fields", "part"), CROPS)
def test_crop(fields, part):
    small = gaussian((1, 1, 3, 2), 1)
    check_layer(f"type: 'Crop' crop_param {{ {fields} }}", [gaussian((2, 3, 5, 6)), small], lambda x, _: x[part])


def test_crop_of_three_axes():
    part = (slice(None), slice(1, 3), slice(1, 3))
    inputs = [gaussian((2, 4, 5)), gaussian((9, 2, 2), 1)]
    check_layer("type: 'Crop' crop_param { axis: 1 offset: 1 }", inputs, lambda x, _: x[part])


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ("axis: 2 offset: 1 offset: 2 offset: 3", ConfigError, "crop_param has 3 offsets; give one, or one for each"),
        ("axis: 2 offset: 3", ShapeError, "axis 2: .* 3 elements from offset 3"),
        ("axis: 4", ShapeError, "axis 4 does not exist"),
    ],
)
def test_crop_refuses(fields, kind, message):
    with pytest.raises(kind, match=message):
        Runner(f"type: 'Crop' crop_param {{ {fields} }}", [gaussian((2, 3, 5, 6)), gaussian((2, 3, 3, 2))])


@pytest.mark.parametrize(
    ("shape", "axis", "tiles"),
    [((2, 3), 1, 4), ((2, 3, 2, 2), -1, 3), ((2, 3, 2, 2), 0, 2), ((2, 3, 4, 1, 2), 2, 3), ((3,), 0, 1)],
)
def test_tile(shape, axis, tiles):
    repeat = [1] * len(shape)
    repeat[axis] = tiles
    check_layer(
        f"type: 'Tile' tile_param {{ axis: {axis} tiles: {tiles} }}", [gaussian(shape)], lambda x: np.tile(x, repeat)
    )


def test_tile_refuses():
    with pytest.raises(ConfigError, match="tile_param.tiles is 0; give the number of copies"):
        Runner("type: 'Tile'", [gaussian((2, 3))])


@pytest.mark.parametrize(("backend", "kind"), list(itertools.product(BACKENDS, ("Permute", "Tile", "ShuffleChannel"))))
def test_in_place_is_refused(backend, kind):
    text = f"type: '{kind}' tile_param {{ tiles: 2 }}"
    with pytest.raises(ConfigError, match="cannot work in place"):
        Runner(text, [gaussian((2, 3, 4, 5))], backend, in_place=True)


# -- Flatten and Reshape ---------------------------------------------------------------------------------


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


# -- Reduction -------------------------------------------------------------------------------------------


OPERATIONS = {
    "SUM": lambda x, axes: x.sum(axes),
    "ASUM": lambda x, axes: np.abs(x).sum(axes),
    "SUMSQ": lambda x, axes: (x * x).sum(axes),
    "MEAN": lambda x, axes: x.mean(axes),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((2, 3, 4, 5), 0),
        ((2, 3, 4, 5), 1),
        ((2, 3, 4, 5), 2),
        ((2, 3, 4, 5), -1),
        ((3, 4), -2),
        ((6,), 0),
        ((2, 3, 4), 1),
        ((2, 3, 2, 2, 2), 4),
        ((2, 3, 2, 2, 2), -4),
    ],
)
def test_reduction(operation, shape, axis):
    axes = tuple(range(axis % len(shape), len(shape)))
    for coeff in (1, -0.5):
        text = f"type: 'Reduction' reduction_param {{ operation: {operation} axis: {axis} coeff: {coeff} }}"
        check_layer(text, [spread(shape)], lambda x, c=coeff: c * OPERATIONS[operation](x, axes))


def test_sign_of_zero_is_zero():
    from layer_harness import Runner

    runner = Runner("type: 'Reduction' reduction_param { operation: ASUM }", [np.array([0, -2, 3], np.float32)])
    runner.forward()
    assert np.array_equal(runner.backward([np.float32(2)])[0], [0, -2, 2])


# -- ArgMax ----------------------------------------------------------------------------------------------


def best(x, axis, count):
    """Indices of the largest, the larger index first where two are equal."""
    return np.take(np.flip(np.argsort(x, axis=axis, kind="stable"), axis=axis), range(count), axis=axis)


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((3, 7), 1),
        ((3, 7), -2),
        ((2, 5, 3, 4), 1),
        ((2, 5, 3, 4), 2),
        ((2, 5, 3, 4), -1),
        ((2, 3, 4, 5, 2), 3),
        ((6,), 0),
    ],
)
@pytest.mark.parametrize("values", [False, True])
def test_along_an_axis(shape, axis, values):
    x = np.round(gaussian(shape) * 2)
    for count in (1, shape[axis]):
        text = f"argmax_param {{ axis: {axis} top_k: {count} out_max_val: {str(values).lower()} }}"
        reference = (
            (lambda x, n=count: np.take_along_axis(x, best(x, axis, n), axis))
            if values
            else (lambda x, n=count: best(x, axis, n))
        )
        check_layer(f"type: 'ArgMax' {text}", [x], reference)


@pytest.mark.parametrize("shape", [(3, 7), (3, 2, 4), (2, 3, 4, 5), (2, 3, 1, 2, 2), (4,)])
def test_over_whole_samples(shape):
    x = gaussian(shape)
    rows = x.reshape(shape[0], -1)
    count = min(3, rows.shape[1])
    tail = (1,) * max(len(shape) - 3, 0)
    check_layer(
        f"type: 'ArgMax' argmax_param {{ top_k: {count} }}",
        [x],
        lambda x: best(x.reshape(rows.shape), 1, count).reshape(shape[0], 1, count, *tail),
    )
    both = f"type: 'ArgMax' argmax_param {{ out_max_val: true top_k: {count} }}"
    check_layer(
        both,
        [x],
        lambda x: np.stack(
            [best(x.reshape(rows.shape), 1, count), -np.sort(-x.reshape(rows.shape))[:, :count]], 1
        ).reshape(shape[0], 2, count, *tail),
    )


def test_arg_max_refuses():
    with pytest.raises(ConfigError, match=r"layer 'L' \(ArgMax\): argmax_param.top_k is 0; give at least 1"):
        Runner("type: 'ArgMax' argmax_param { top_k: 0 }", [gaussian((2, 3))])
    with pytest.raises(ShapeError, match="top_k is 4, but there are only 3 elements"):
        Runner("type: 'ArgMax' argmax_param { top_k: 4 axis: 1 }", [gaussian((2, 3, 5))])
    with pytest.raises(ShapeError, match="axis 3 does not exist"):
        Runner("type: 'ArgMax' argmax_param { axis: 3 }", [gaussian((2, 3, 5))])
