"""A scale and a bias of one name are one parameter, whose gradient is the sum of both."""

from __future__ import annotations

import numpy as np
import pytest
from training import CPU

from caffepy.formats.proto import caffe_pb2
from caffepy.formats.prototxt import parse_text
from caffepy.layers.layer import LayerContext
from caffepy.net import Net

SHAPE = (4, 3, 2, 2)
DATA = """
layer { name: "x" type: "Input" top: "x" top: "t" input_param { shape { dim: 4 dim: 3 dim: 2 dim: 2 } } }
layer { name: "v" type: "Input" top: "v" input_param { shape { dim: 4 dim: 3 } } }
"""
OWNER = """layer { name: "owner" type: "InnerProduct" bottom: "v" top: "o" param { name: "s" }
  inner_product_param { num_output: 1 bias_term: false } }
layer { name: "silence" type: "Silence" bottom: "o" }"""
CONVOLUTION = """layer { name: "conv" type: "Convolution" bottom: "x" top: "c"
  convolution_param { num_output: 3 kernel_size: 1 weight_filler { type: "gaussian" std: 1 } } }"""
NORM = 'layer { name: "bn" type: "BatchNorm" bottom: "c" top: "n" }'
SCALE = """layer { name: "scale" type: "Scale" bottom: "%s" top: "y" param { name: "s" share_mode: PERMISSIVE }
  param { name: "s" share_mode: PERMISSIVE } scale_param { bias_term: true } }"""
LOSS = 'layer { name: "loss" type: "EuclideanLoss" bottom: "y" bottom: "t" top: "loss" }'


def net_of(text: str, fuse: bool = False) -> Net:
    net = Net(parse_text(DATA + text + LOSS, caffe_pb2.NetParameter(), "net"), LayerContext(CPU), fuse=fuse)
    rng = np.random.default_rng(3)
    for name in ("x", "t"):
        CPU.from_host(rng.standard_normal(SHAPE).astype(np.float32), net.blobs[name].data)
    return net


def run(net: Net, passes: int) -> None:
    net.clear_param_diffs()
    for _ in range(passes):
        net.forward()
        net.backward()


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("owner", ["", OWNER])
def test_both_gradients_are_added_up(passes: int, owner: str) -> None:
    """Also where another layer owns the parameter in another shape."""
    net = net_of(owner + SCALE % "x")
    parameter = next(layer for layer in net.layers if layer.name == "scale").blobs[0]
    CPU.fill(parameter.data, 0.5)
    run(net, passes)
    x, t = net.blobs["x"].host_data(), net.blobs["t"].host_data()
    dy = (0.5 * x + 0.5 - t) / 4
    wanted = passes * (dy * x + dy).sum(axis=(0, 2, 3))
    np.testing.assert_allclose(parameter.host_diff(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("passes", [1, 2])
def test_fused_behind_a_normalisation_too(passes: int) -> None:
    found = []
    for fuse in (False, True):
        net = net_of(CONVOLUTION + NORM + SCALE % "n", fuse)
        run(net, passes)
        layers = {layer.name: layer for layer in net.layers}
        found.append([layers["scale"].blobs[0].host_diff(), layers["conv"].blobs[0].host_diff()])
    normal, t = net_of(CONVOLUTION + NORM + SCALE % "n"), net.blobs["t"].host_data()
    normal.forward()
    n = normal.blobs["n"].host_data()
    dy = (n + 1 - t) / 4
    np.testing.assert_allclose(found[0][0], passes * (dy * n + dy).sum(axis=(0, 2, 3)), rtol=1e-4, atol=1e-5)
    for plain, fused in zip(*found, strict=True):
        np.testing.assert_allclose(fused, plain, rtol=1e-4, atol=1e-5)
