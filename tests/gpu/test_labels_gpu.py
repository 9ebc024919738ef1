"""Labels of half-precision nets on a GPU: losses see them as they were given."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from training import build_solver

from caffepy.backend import Backend
from caffepy.formats.proto import caffe_pb2
from caffepy.formats.prototxt import parse_text
from caffepy.layers.layer import LayerContext
from caffepy.net import Net

HALVES = ("FLOAT16", "BFLOAT16")
CLASSES = 4000
LABELS = np.array([3001, 2049, 0, 3999, 257, 2047], np.float32)
LABELS_FROM = {
    "alone": 'layer { name: "l" type: "Input" top: "label" input_param { shape { dim: 6 } } }',
    "slice": """layer { name: "l" type: "Input" top: "two" input_param { shape { dim: 12 } } }
        layer { name: "slice" type: "Slice" bottom: "two" top: "label" top: "rest" slice_param { axis: 0 } }
        layer { name: "silence" type: "Silence" bottom: "rest" }""",
    "concat": """layer { name: "l" type: "Input" top: "a" top: "b" input_param { shape { dim: 3 } } }
        layer { name: "concat" type: "Concat" bottom: "a" bottom: "b" top: "label" concat_param { axis: 0 } }""",
    "many": """layer { name: "l" type: "Input" top: "two" input_param { shape { dim: 12 } } }
        layer { name: "slice" type: "Slice" bottom: "two" top: "a" top: "b" slice_param { axis: 0 } }
        layer { name: "sum" type: "Eltwise" bottom: "a" bottom: "b" top: "sum" eltwise_param { coeff: 1 coeff: 0 } }
        layer { name: "in" type: "Power" bottom: "sum" top: "sum" power_param { shift: 1 } }
        layer { name: "out" type: "Power" bottom: "sum" top: "less" power_param { shift: -1 } }
        layer { name: "reshape" type: "Reshape" bottom: "less" top: "column" reshape_param { shape { dim: 6 dim: 1 } } }
        layer { name: "flatten" type: "Flatten" bottom: "column" top: "label" }""",
}
LOSSES = """
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "scores" bottom: "label" top: "loss" }
layer { name: "accuracy" type: "Accuracy" bottom: "scores" bottom: "label" top: "accuracy" }
"""


def half_net(text: str, kind: str, backend: Backend, fuse: bool = True) -> Net:
    param = parse_text(
        f"default_forward_type: {kind} default_backward_type: {kind} {text}", caffe_pb2.NetParameter(), "net"
    )
    return Net(param, LayerContext(backend, phase=caffe_pb2.TRAIN), fuse=fuse)


def give(net: Net, name: str, values: NDArray[np.float32]) -> None:
    net.backend.from_host(np.ascontiguousarray(values, np.float32), net.blobs[name].data)


@pytest.mark.parametrize("kind", HALVES)
@pytest.mark.parametrize("way", list(LABELS_FROM))
def test_class_numbers_above_2048_are_not_rounded(backend: Backend, way: str, kind: str) -> None:
    scores = f'layer {{ name: "s" type: "Input" top: "scores" input_param {{ shape {{ dim: 6 dim: {CLASSES} }} }} }}'
    net = half_net(scores + LABELS_FROM[way] + LOSSES, kind, backend)
    values = np.zeros((6, CLASSES), np.float32)
    values[np.arange(6), LABELS.astype(int)] = 16
    give(net, "scores", values)
    if way == "alone":
        give(net, "label", LABELS)
    elif way == "concat":
        give(net, "a", LABELS[:3])
        give(net, "b", LABELS[3:])
    else:
        give(net, "two", np.concatenate([LABELS, 1 + LABELS[::-1] % 7]))
    net.forward()
    reader = next(node for node in net.schedule if node.layer.name == "loss")
    np.testing.assert_array_equal(reader.bottoms[1].host_data().reshape(-1), LABELS)
    assert net.loss() == pytest.approx(np.log(1 + (CLASSES - 1) * np.exp(-16.0)), rel=1e-3)
    assert float(net.blobs["accuracy"].host_data()) == 1


@pytest.mark.parametrize("kind", HALVES)
@pytest.mark.parametrize("loss", ["SoftmaxWithLoss", "SigmoidCrossEntropyLoss"])
@pytest.mark.parametrize("cut", [False, True])
def test_binary_masks(backend: Backend, kind: str, loss: str, cut: bool) -> None:
    """Masks of their own Input, and masks that are the last channel of the images."""
    rng = np.random.default_rng(2)
    shape = "shape { dim: 3 dim: %d dim: 9 dim: 7 }"
    channels = 2 if loss == "SoftmaxWithLoss" else 1
    text = f'layer {{ name: "s" type: "Input" top: "scores" input_param {{ {shape % channels} }} }}'
    if cut:
        text += f"""layer {{ name: "l" type: "Input" top: "both" input_param {{ {shape % 4} }} }}
            layer {{ name: "slice" type: "Slice" bottom: "both" top: "image" top: "label"
            slice_param {{ slice_point: 3 }} }} layer {{ name: "silence" type: "Silence" bottom: "image" }}"""
    else:
        text += f'layer {{ name: "l" type: "Input" top: "label" input_param {{ {shape % 1} }} }}'
    net = half_net(
        text + f'layer {{ name: "loss" type: "{loss}" bottom: "scores" bottom: "label" top: "loss" }}', kind, backend
    )
    scores = rng.integers(-8, 9, (3, channels, 9, 7)).astype(np.float32) / 4
    mask = rng.integers(0, 2, (3, 1, 9, 7)).astype(np.float32)
    give(net, "scores", scores)
    give(net, "both" if cut else "label", np.concatenate([rng.random((3, 3, 9, 7)), mask], axis=1) if cut else mask)
    net.forward()
    x = scores.astype(np.float64)
    if loss == "SoftmaxWithLoss":
        wrong = np.where(mask[:, 0] > 0, x[:, 0] - x[:, 1], x[:, 1] - x[:, 0])
        wanted = np.log1p(np.exp(wrong)).mean()
    else:
        wanted = (np.log1p(np.exp(x)) - x * mask).sum() / 3
    assert net.loss() == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("kind", HALVES)
def test_training_on_such_labels(backend: Backend, kind: str) -> None:
    """In captured graphs: the scores of class 3001 grow, those of its neighbours fall."""
    net = f"""default_forward_type: {kind} default_backward_type: {kind}
        layer {{ name: "x" type: "DummyData" top: "x" dummy_data_param {{ shape {{ dim: 8 dim: 16 }}
          data_filler {{ type: "constant" value: 0.5 }} }} }}
        layer {{ name: "l" type: "DummyData" top: "two" dummy_data_param {{ shape {{ dim: 16 }}
          data_filler {{ type: "constant" value: 3001 }} }} }}
        layer {{ name: "slice" type: "Slice" bottom: "two" top: "a" top: "b" slice_param {{ axis: 0 }} }}
        layer {{ name: "silence" type: "Silence" bottom: "b" }}
        layer {{ name: "ip" type: "InnerProduct" bottom: "x" top: "scores"
          inner_product_param {{ num_output: {CLASSES} }} }}
        layer {{ name: "loss" type: "SoftmaxWithLoss" bottom: "scores" bottom: "a" top: "loss" }}"""
    with build_solver('base_lr: 1 lr_policy: "fixed" max_iter: 100', net, backend) as solver:
        solver.step(20)
        assert solver.graph_executor.captured
        bias = next(layer for layer in solver.net.layers if layer.name == "ip").blobs[1].host_data()
        assert int(bias.argmax()) == 3001
        assert bias[3000] < 0 and bias[3002] < 0
        assert solver.net.loss() < 1
