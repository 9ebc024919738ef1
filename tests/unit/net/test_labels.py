"""Labels in half-precision nets: float32 from where they come from to the layers that read them."""

from __future__ import annotations

import pytest
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st

from caffepy.backend.meta import MetaBackend
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.layer import LayerContext
from caffepy.net import Net
from caffepy.net.graph import Node

HALF = "default_forward_type: FLOAT16 default_backward_type: FLOAT16 "
SCORES = """
layer { name: "image" type: "DummyData" top: "image" dummy_data_param { shape { dim: 4 dim: 3 dim: 6 dim: 6 } } }
layer { name: "conv" type: "Convolution" bottom: "image" top: "conv"
  convolution_param { num_output: 4 kernel_size: 3 pad: 1 } }
"""
PIXELS = "shape { dim: 4 dim: 1 dim: 6 dim: 6 }"
SOURCES = (
    f'layer {{ name: "in" type: "Input" top: "l" input_param {{ {PIXELS} }} }}',
    f'layer {{ name: "in" type: "DummyData" top: "l" dummy_data_param {{ {PIXELS} }} }}',
    f'layer {{ name: "in" type: "Input" top: "l" forward_type: FLOAT16 input_param {{ {PIXELS} }} }}',
)
STEPS = {
    "split": 'layer {{ name: "s{n}" type: "Split" bottom: "{x}" top: "{y}" top: "spare{n}" }}',
    "slice": 'layer {{ name: "c{n}" type: "Concat" bottom: "{x}" bottom: "{x}" top: "c{n}" }}'
    'layer {{ name: "s{n}" type: "Slice" bottom: "c{n}" top: "{y}" top: "spare{n}" }}',
    "reshape": 'layer {{ name: "r{n}" type: "Reshape" bottom: "{x}" top: "{y}" '
    "reshape_param {{ shape {{ dim: 4 dim: 1 dim: 6 dim: -1 }} }} }}",
    "flatten": 'layer {{ name: "f{n}" type: "Flatten" bottom: "{x}" top: "f{n}" }}'
    'layer {{ name: "r{n}" type: "Reshape" bottom: "f{n}" top: "{y}" '
    "reshape_param {{ shape {{ dim: 4 dim: 1 dim: 6 dim: 6 }} }} }}",
    "sum": 'layer {{ name: "e{n}" type: "Eltwise" bottom: "{x}" bottom: "{x}" top: "{y}" '
    "eltwise_param {{ coeff: 2 coeff: -1 }} }}",
    "power": 'layer {{ name: "p{n}" type: "Power" bottom: "{x}" top: "{y}" power_param {{ shift: 1 }} }}',
    "in place": 'layer {{ name: "i{n}" type: "Power" bottom: "{x}" top: "{x}" power_param {{ shift: 1 }} }}'
    'layer {{ name: "q{n}" type: "Power" bottom: "{x}" top: "{y}" }}',
    "pooling": 'layer {{ name: "m{n}" type: "Pooling" bottom: "{x}" top: "{y}" pooling_param {{ kernel_size: 1 }} }}',
}
READERS = {
    "SoftmaxWithLoss": 'layer { name: "loss" type: "SoftmaxWithLoss" bottom: "conv" bottom: "%s" top: "loss" }',
    "Accuracy": 'layer { name: "loss" type: "Accuracy" bottom: "conv" bottom: "%s" top: "loss" }',
    "SigmoidCrossEntropyLoss": """layer { name: "one" type: "Convolution" bottom: "conv" top: "one"
        convolution_param { num_output: 1 kernel_size: 1 } }
        layer { name: "loss" type: "SigmoidCrossEntropyLoss" bottom: "one" bottom: "%s" top: "loss" }""",
}


def dry_net(text: str, fuse: bool = False) -> Net:
    """A net on a device that has every dtype, without memory."""
    param = text_format.Parse(text, caffe_pb2.NetParameter())
    return Net(param, LayerContext(MetaBackend(), phase=caffe_pb2.TRAIN), fuse=fuse)


def dtypes(net: Net) -> dict[str, str]:
    return {blob.name: blob.dtype for node in net.nodes for blob in node.tops}


def label_path(net: Net) -> list[str]:
    """The dtypes of what the labels come through, from the loss upwards."""
    producers: dict[int, list[Node]] = {}
    for node in net.nodes:
        for top in node.tops:
            producers.setdefault(id(top), []).append(node)
    reader = next(node for node in net.nodes if node.layer.name == "loss")
    blobs, found = [reader.bottoms[1]], []
    while blobs:
        blob = blobs.pop()
        found.append(blob.dtype)
        if earlier := producers.get(id(blob)):
            blobs += earlier.pop().bottoms
    return found


@given(
    source=st.sampled_from(SOURCES),
    steps=st.lists(st.sampled_from(sorted(STEPS)), max_size=4),
    reader=st.sampled_from(sorted(READERS)),
    image_too=st.booleans(),
)
@settings(max_examples=60, derandomize=True)
def test_labels_are_float32_all_the_way(source: str, steps: list[str], reader: str, image_too: bool) -> None:
    text, name = source, "l"
    for number, step in enumerate(steps):
        text += STEPS[step].format(n=number, x=name, y=f"l{number}")
        name = f"l{number}"
    if image_too:
        text += 'layer { name: "also" type: "Convolution" bottom: "l" top: "also" convolution_param { num_output: 4 '
        text += "kernel_size: 1 } }"
    net = dry_net(HALF + text + SCORES + READERS[reader] % name)
    assert set(label_path(net)) == {"float32"}
    found = dtypes(net)
    assert (found["image"], found["conv"]) == ("float16", "float16")
    assert not image_too or found["also"] == "float16"
    assert found["loss"] == "float32"


def test_what_is_cut_from_images_may_be_labels() -> None:
    """A fourth channel with the class of each pixel: the images are rounded behind the Slice, the labels never."""
    net = dry_net(
        HALF
        + """layer { name: "in" type: "Input" top: "both" input_param { shape { dim: 4 dim: 4 dim: 6 dim: 6 } } }
        layer { name: "slice" type: "Slice" bottom: "both" top: "image" top: "l" slice_param { slice_point: 3 } }
        layer { name: "conv" type: "Convolution" bottom: "image" top: "conv"
          convolution_param { num_output: 4 kernel_size: 3 pad: 1 } }"""
        + READERS["SoftmaxWithLoss"] % "l"
    )
    found = dtypes(net)
    assert set(label_path(net)) == {"float32"}
    assert (found["image_as_float16"], found["conv"]) == ("float16", "float16")


def test_labels_that_half_layers_compute_are_cast() -> None:
    """A target that a convolution gives is rounded already: what leads to it stays in half precision."""
    net = dry_net(
        HALF
        + SCORES
        + """layer { name: "teacher" type: "Convolution" bottom: "image" top: "t" param { lr_mult: 0 }
          param { lr_mult: 0 } convolution_param { num_output: 4 kernel_size: 1 } }
        layer { name: "relu" type: "ReLU" bottom: "t" top: "t" }
        layer { name: "loss" type: "SigmoidCrossEntropyLoss" bottom: "conv" bottom: "t" top: "loss" }"""
    )
    found = dtypes(net)
    assert (found["image"], found["t"], found["t_as_float32"]) == ("float16", "float16", "float32")
    assert label_path(net)[0] == "float32"


def test_without_readers_of_labels_nothing_changes() -> None:
    net = dry_net(HALF + SOURCES[0] + SCORES + 'layer { name: "s" type: "Silence" bottom: "l" }')
    assert dtypes(net)["l"] == "float16"


@pytest.mark.parametrize("fuse", [False, True])
def test_a_net_with_such_labels_runs(fuse: bool) -> None:
    net = dry_net(
        HALF + SOURCES[0] + STEPS["slice"].format(n=0, x="l", y="m") + SCORES + READERS["SoftmaxWithLoss"] % "m", fuse
    )
    net.forward()
    net.backward()
    assert net.blobs["loss"].shape == ()
    assert dtypes(net)["m"] == "float32"
