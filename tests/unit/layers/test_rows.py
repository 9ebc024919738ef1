"""BatchReindex, Filter, Embed and Parameter: gradients, indices that name nothing, what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from google.protobuf import text_format
from layer_harness import BACKENDS, Runner, backend_named, check_layer, gaussian

from caffepy.errors import ConfigError, DataError, ShapeError
from caffepy.formats.proto import caffe_pb2
from caffepy.layers import LayerContext
from caffepy.net.graph import capture_blockers
from caffepy.net.net import Net


@pytest.mark.parametrize("shape", [(4, 3, 2), (4, 5, 3, 2), (4,), (1, 3)])
@pytest.mark.parametrize("count", [1, 7])
def test_batch_reindex(shape, count):
    index = np.random.default_rng(2).integers(0, shape[0], count).astype(np.float32)
    check_layer("type: 'BatchReindex'", [gaussian(shape), index], lambda x, i: x[i.astype(int)])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("index", [[0, -1], [0, 4]])
def test_batch_reindex_names_what_is_not_there(backend, index):
    runner = Runner("type: 'BatchReindex'", [gaussian((4, 2)), np.array(index, np.float32)], backend)
    runner.forward()
    with backend_named(backend).activate():
        with pytest.raises(DataError, match=r"layer 'L' \(BatchReindex\): entry 1 of 'b' .* of 'a'"):
            runner.layer.raise_device_errors()
        runner.layer.raise_device_errors()


def test_batch_reindex_refuses():
    with pytest.raises(ShapeError, match="the second bottom must have one axis"):
        Runner("type: 'BatchReindex'", [gaussian((4, 2)), gaussian((4, 1))])


@pytest.mark.parametrize("selector", [[1, 0, 0, 2, 1], [0, 0, 1, 0, 0], [1, 1, 1, 1, 1], [0.5, 0, 1, 1, -1]])
def test_filter(selector):
    chosen = np.flatnonzero(np.array(selector).astype(int))
    inputs = [gaussian((5, 3, 2, 2)), gaussian((5, 4), 1), np.array(selector, np.float32).reshape(5, 1)]
    for backend in BACKENDS:
        runner = Runner("type: 'Filter'", inputs, backend, tops=2)
        tops = runner.forward()
        dys = [gaussian(top.shape, 9) for top in tops]
        for found, x in zip(tops, inputs, strict=False):
            assert np.array_equal(found, x[chosen])
        for found, dy, x in zip(runner.backward(dys), dys, inputs, strict=False):
            wanted = np.zeros_like(x)
            wanted[chosen] = dy
            assert np.array_equal(found, wanted)
        assert np.array_equal(runner.backward(dys)[2], np.zeros((5, 1)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_filter_changes_shapes_and_is_not_captured(backend):
    text = """layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 4 dim: 3 } } }
      layer { name: "s" type: "Input" top: "s" input_param { shape { dim: 4 } } }
      layer { name: "a" type: "ReLU" bottom: "x" top: "a" }
      layer { name: "f" type: "Filter" bottom: "a" bottom: "s" top: "f" }
      layer { name: "i" type: "InnerProduct" bottom: "f" top: "i" inner_product_param { num_output: 2
        weight_filler { type: "gaussian" } } }"""
    device = backend_named(backend)
    with device.activate():
        net = Net(text_format.Parse(text, caffe_pb2.NetParameter()), LayerContext(device))
        device.from_host(gaussian((4, 3)), net.blobs["x"].data)
        weights = net.layers[net.layer_names.index("i")].blobs[0].host_data()
        for chosen in ([0, 2], [1], [0, 1, 2, 3], []):
            device.from_host(np.isin(range(4), chosen).astype(np.float32), net.blobs["s"].data)
            net.forward()
            wanted = np.maximum(gaussian((4, 3)), 0)[chosen] @ weights.T
            np.testing.assert_allclose(net.blobs["i"].host_data(), wanted, rtol=1e-5, atol=1e-6)
        blockers = dict(zip([node.layer.name for node in net.schedule], capture_blockers(net.schedule), strict=True))
    assert blockers["a"] is None
    assert "number of samples" in str(blockers["f"])
    assert blockers["i"] == "the shapes change from pass to pass behind layer 'f'"


def test_filter_refuses():
    with pytest.raises(ConfigError, match="needs a top for each bottom but the last, the selector: 2"):
        Runner("type: 'Filter'", [gaussian((4, 2)), gaussian((4, 2)), gaussian((4,))], tops=1)
    with pytest.raises(ShapeError, match="the selector, must have one number for each sample"):
        Runner("type: 'Filter'", [gaussian((4, 2)), gaussian((4, 2))])
    with pytest.raises(ShapeError, match="every bottom must have as many samples as the selector"):
        Runner("type: 'Filter'", [gaussian((4, 2)), gaussian((3,))])


@pytest.mark.parametrize("shape", [(5, 2), (6,), (2, 3, 2), (2, 2, 2, 2), ()])
@pytest.mark.parametrize("bias", [True, False])
def test_embed(shape, bias):
    index = np.random.default_rng(5).integers(0, 7, shape).astype(np.float32)
    text = f"type: 'Embed' embed_param {{ num_output: 4 input_dim: 7 bias_term: {str(bias).lower()} }}"
    params = [gaussian((7, 4)), gaussian((4,), 1)][: 1 + bias]
    check_layer(text, [index], lambda i, table, *rest: table[i.astype(int)] + (rest[0] if rest else 0), params=params)


def test_embed_fills_and_refuses():
    two, one = (f"{{ type: 'constant' value: {value} }}" for value in (2, 1))
    filled = f"num_output: 2 input_dim: 3 weight_filler {two} bias_filler {one}"
    runner = Runner(f"type: 'Embed' embed_param {{ {filled} }}", [np.array([0, 3], np.float32)])
    assert np.array_equal(runner.forward()[0], [[3, 3], [1, 1]])
    with pytest.raises(DataError, match="element 1 of 'a' is outside 0 to 2; correct it, or give embed_param a larger"):
        runner.layer.raise_device_errors()
    for missing in ("num_output: 2", "input_dim: 3"):
        with pytest.raises(ConfigError, match=r"embed_param\.(num_output|input_dim) must be at least 1"):
            Runner(f"type: 'Embed' embed_param {{ {missing} }}", [np.zeros(2, np.float32)])


@pytest.mark.parametrize("dims", [(3, 4), (), (2, 3, 2, 2)])
def test_parameter(dims):
    shape = " ".join(f"dim: {size}" for size in dims)
    check_layer(
        f"type: 'Parameter' parameter_param {{ shape {{ {shape} }} }}", [], lambda p: p, params=[gaussian(dims)]
    )


def test_parameter_starts_with_its_filler():
    text = "type: 'Parameter' parameter_param { shape { dim: 3 } blob_filler { type: 'constant' value: 2 } }"
    assert np.array_equal(Runner(text, []).forward()[0], [2, 2, 2])


# -- Filter of channel-pruning ---------------------------------------------------------------------------


X = gaussian((2, 5, 3, 4))


@pytest.mark.parametrize("axis, selector", [(1, [1, 0, 1, 1, 0]), (3, [0, 0, 1, 2.5]), (0, [0, 1])])
def test_filter_by_a_parameter(axis: int, selector: list[float]) -> None:
    chosen = np.flatnonzero(selector)
    text = f"type: 'Filter' filter_param {{ axis: {axis} num_output: {len(chosen)} }}"
    check_layer(text, [X], lambda x, _: np.take(x, chosen, axis), params=[np.array(selector)], learned=[])
    pair = Runner(text, [X, 2 * X], params=[np.array(selector)], tops=2).forward()
    np.testing.assert_array_equal(pair[1], 2 * np.take(X, chosen, axis))


def test_filter_of_all_takes_the_first() -> None:
    runner = Runner("type: 'Filter' filter_param { num_output: 3 }", [X])
    np.testing.assert_array_equal(runner.forward()[0], X[:, :3])
    assert runner.layer.param.param[0].lr_mult == 0


def test_bad_filters() -> None:
    with pytest.raises(ConfigError, match="from 1 to 5"):
        Runner("type: 'Filter' filter_param { num_output: 6 }", [X])
    with pytest.raises(ConfigError, match="a top for each bottom: 2"):
        Runner("type: 'Filter' filter_param { num_output: 3 }", [X, X], tops=1)
    with pytest.raises(ConfigError, match="the selector: 0"):
        Runner("type: 'Filter'", [X])
    with pytest.raises(DataError, match="selects 2 elements"):
        Runner("type: 'Filter' filter_param { num_output: 3 }", [X], params=[np.array([1, 0, 0, 1, 0])]).forward()
