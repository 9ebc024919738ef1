"""Loss weights: what a net reports as its loss, and the gradients that come of it in every pass."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from training import CPU

from caffepy.formats.proto import caffe_pb2
from caffepy.formats.prototxt import parse_text
from caffepy.layers.layer import LayerContext
from caffepy.net import Net

DATA = """
layer { name: "data" type: "Input" top: "data" top: "target" input_param { shape { dim: 4 dim: 3 }
  shape { dim: 4 dim: 2 } } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip"
  inner_product_param { num_output: 2 weight_filler { type: "gaussian" std: 1 } } }
"""
DISTANCE = 'layer { name: "loss" type: "EuclideanLoss" bottom: "ip" bottom: "target" top: "loss" %s }\n'
HALF = 'layer { name: "half" type: "Power" bottom: "loss" top: "%s" power_param { scale: 0.5 } %s }\n'


def net_of(text: str, fuse: bool = False) -> Net:
    return Net(parse_text(text, caffe_pb2.NetParameter(), "net"), LayerContext(CPU), fuse=fuse)


def feed(net: Net, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    for name in ("data", "target"):
        blob = net.blobs[name]
        CPU.from_host(rng.standard_normal(blob.shape).astype(np.float32), blob.data)


def run(net: Net) -> tuple[float, NDArray[np.float32]]:
    """The loss, and the gradient of the InnerProduct's weights."""
    net.clear_param_diffs()
    net.forward()
    loss = net.loss()
    net.backward()
    return loss, next(layer for layer in net.layers if layer.name == "ip").blobs[0].host_diff()


def distance(net: Net) -> tuple[float, NDArray[np.float32]]:
    """The EuclideanLoss and the gradient that it has with weight 1, by NumPy."""
    ip = next(layer for layer in net.layers if layer.name == "ip")
    data, target = net.blobs["data"].host_data(), net.blobs["target"].host_data()
    difference = data @ ip.blobs[0].host_data().T - target
    return float((difference**2).sum() / 8), difference.T @ data / 4


@pytest.mark.parametrize(
    ("own", "reader", "in_loss", "in_gradient"),
    [
        ("loss_weight: 0.3", "", 0.3, 0.3),
        ("loss_weight: 0.3", "loss_weight: 1", 0.8, 0.8),
        # A weight that nobody wrote counts in what is reported; the reader's gradient stands, as in Caffe.
        ("", "loss_weight: 1", 1.5, 0.5),
    ],
)
def test_a_loss_that_is_read_elsewhere(own: str, reader: str, in_loss: float, in_gradient: float) -> None:
    net = net_of(DATA + DISTANCE % own + HALF % ("half", reader))
    feed(net)
    for _ in range(2):
        loss, gradient = run(net)
        whole, plain = distance(net)
        assert loss == pytest.approx(in_loss * whole, rel=1e-5)
        np.testing.assert_allclose(gradient, in_gradient * plain, rtol=1e-4, atol=1e-6)


def test_a_loss_that_a_layer_overwrites_is_reported_as_it_was() -> None:
    """Power in place halves the number that EuclideanLoss's weight of 1 stands for."""
    net = net_of(DATA + DISTANCE % "" + HALF % ("loss", "loss_weight: 1"))
    feed(net)
    total = CPU.zeros(())
    for _ in range(2):
        loss, gradient = run(net)
        whole, plain = distance(net)
        net.add_loss(total, accumulate=False)
        assert loss == pytest.approx(1.5 * whole, rel=1e-5)
        assert float(total) == pytest.approx(loss, rel=1e-5)
        np.testing.assert_allclose(gradient, 0.5 * plain, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("top", ["ip", "relu"])
@pytest.mark.parametrize("reader", ["", 'layer { name: "a" type: "AbsVal" bottom: "%s" top: "a" loss_weight: 1 }'])
def test_a_weight_at_a_relu_is_the_same_in_every_pass(top: str, reader: str, fuse: bool) -> None:
    relu = f'layer {{ name: "relu" type: "ReLU" bottom: "ip" top: "{top}" loss_weight: 2 }}\n'
    net = net_of(DATA.replace('top: "target"', 'top: "target" ') + relu + reader.replace("%s", top), fuse)
    for number in range(4):
        feed(net, number)
        loss, gradient = run(net)
        data = net.blobs["data"].host_data()
        ip = next(layer for layer in net.layers if layer.name == "ip")
        y = data @ ip.blobs[0].host_data().T
        weight = 3 if reader else 2
        assert loss == pytest.approx(weight * float(y[y > 0].sum()), rel=1e-5)
        np.testing.assert_allclose(gradient, weight * (y > 0).T @ data, rtol=1e-4, atol=1e-6)


def test_a_weight_at_a_normalised_group_comes_back_in_every_pass() -> None:
    chain = """layer { name: "bn" type: "BatchNorm" bottom: "ip" top: "ip" }
        layer { name: "scale" type: "Scale" bottom: "ip" top: "ip" loss_weight: 2 }"""
    nets = [net_of(DATA + chain, fuse) for fuse in (False, True)]
    for number in range(3):
        found = []
        for net in nets:
            feed(net, number)
            run(net)
            found.append(next(layer for layer in net.layers if layer.name == "scale").blobs[0].host_diff())
            normal = net.blobs["ip"].host_data()
            np.testing.assert_allclose(found[-1], 2 * normal.sum(axis=0), rtol=1e-3, atol=1e-5)


def test_the_other_tops_keep_their_weights() -> None:
    """Caffe forgets all of a layer's weights with the one that goes to a Split."""
    net = net_of(
        DATA
        + """layer { name: "slice" type: "Slice" bottom: "ip" top: "a" top: "b" loss_weight: 2 loss_weight: 3 }
        layer { name: "abs" type: "AbsVal" bottom: "b" top: "c" }"""
    )
    feed(net)
    loss, gradient = run(net)
    data = net.blobs["data"].host_data()
    y = data @ next(layer for layer in net.layers if layer.name == "ip").blobs[0].host_data().T
    assert loss == pytest.approx(float(2 * y[:, 0].sum() + 3 * y[:, 1].sum()), rel=1e-4)
    np.testing.assert_allclose(gradient, np.outer([2, 3], data.sum(axis=0)), rtol=1e-4)


@pytest.mark.parametrize("reader", ["", 'layer { name: "s" type: "Silence" bottom: "p" }'])
def test_a_weight_at_the_probabilities_counts_in_the_loss_alone(reader: str, caplog: pytest.LogCaptureFixture) -> None:
    def losses(weight: float) -> tuple[float, np.ndarray]:
        net = net_of(
            DATA
            + 'layer { name: "label" type: "Input" top: "label" input_param { shape { dim: 4 } } }'
            + 'layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" top: "p" '
            + f"loss_weight: 1 loss_weight: {weight} }}{reader}"
        )
        feed(net)
        return run(net)

    (plain, gradient), (weighted, same) = losses(0), losses(0.5)
    assert weighted == pytest.approx(plain + 0.5 * 4, rel=1e-5)  # probabilities of four samples
    np.testing.assert_array_equal(same, gradient)
    [line] = [message for message in caplog.messages if "no gradient" in message]
    assert line.startswith("layer 'loss' (SoftmaxWithLoss): loss_weight 0.5 at its top 'p' (top 1) counts in the loss")
