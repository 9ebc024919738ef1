"""Chains of layers in place: the gradients are those of the same chain with a blob for each layer."""

from __future__ import annotations

import numpy as np
import pytest
from google.protobuf import text_format
from layer_harness import BACKENDS, assert_near, backend_named, gaussian

from caffepy.errors import ConfigError
from caffepy.formats.proto import caffe_pb2
from caffepy.layers import LayerContext
from caffepy.net.graph import overwritten_tops
from caffepy.net.net import Net

INPUT = "force_backward: true layer { name: 'x' type: 'Input' top: 'x' input_param { shape { dim: 4 dim: 6 } } } "
CHAINS = [
    ["Sigmoid", "Dropout"],
    ["TanH", "Scale", "ReLU"],
    ["BatchNorm", "Scale", "ReLU"],
    ["ELU", "Power", "PReLU", "Exp"],
    ["Softmax", "Bias", "AbsVal"],
    ["Reshape", "ReLU", "Dropout"],
    ["Flatten", "ReLU"],
]
SETTINGS = {"Power": "power_param { power: 2 shift: 0.5 }", "Reshape": "reshape_param { shape { dim: 0 dim: -1 } }"}


def chain(types: list[str], in_place: bool) -> str:
    """A product of x and what the chain makes of it, so that x has two readers."""
    text, bottom = INPUT, "x"
    for i, kind in enumerate(types):
        top = bottom if in_place and i else f"t{i}"
        text += f"layer {{ name: 'l{i}' type: '{kind}' bottom: '{bottom}' top: '{top}' {SETTINGS.get(kind, '')} }} "
        bottom = top
    return text + (
        f"layer {{ name: 'y' type: 'Eltwise' bottom: '{bottom}' bottom: 'x' top: 'y' "
        "eltwise_param { operation: PROD } }"
    )


def gradient(text: str, backend_name: str) -> np.ndarray:
    backend = backend_named(backend_name)
    with backend.activate():
        net = Net(text_format.Parse(text, caffe_pb2.NetParameter()), LayerContext(backend, seed=3))
        backend.from_host(gaussian((4, 6)), net.blobs["x"].data)
        net.forward()
        backend.from_host(gaussian((4, 6), 1), net.blobs["y"].diff)
        net.backward()
        return net.blobs["x"].host_diff()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("types", CHAINS, ids="-".join)
def test_in_place_gives_the_same_gradient(types: list[str], backend: str) -> None:
    wanted = gradient(chain(types, in_place=False), backend)
    assert np.abs(wanted).max() > 0.1
    assert_near(gradient(chain(types, in_place=True), backend), wanted, 1e-6, "gradient")


def joined(operation: str, in_place: bool, count: int) -> str:
    """Branches that an Eltwise joins, in place on the first of them or not, between layers that need their tops."""
    text = INPUT
    for number in range(count):
        text += f"layer {{ name: 'b{number}' type: 'TanH' bottom: 'x' top: 'b{number}' }} "
        text += f"layer {{ name: 's{number}' type: 'Scale' bottom: 'b{number}' top: 's{number}' scale_param {{ "
        text += f"bias_term: true filler {{ value: {number + 0.5} }} bias_filler {{ value: {0.1 * number} }} }} }} "
        text += f"layer {{ name: 'e{number}' type: 'ELU' bottom: 's{number}' top: 's{number}' }} "
    bottoms = "".join(f"bottom: 's{number}' " for number in range(count))
    top = "s0" if in_place else "joined"
    return text + (
        f"layer {{ name: 'join' type: 'Eltwise' {bottoms} top: '{top}' eltwise_param {{ {operation} }} }} "
        f"layer {{ name: 'behind' type: 'Sigmoid' bottom: '{top}' top: '{top}' }} "
        f"layer {{ name: 'y' type: 'Power' bottom: '{top}' top: 'y' power_param {{ power: 2 shift: 1 }} }}"
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("operation", "count"),
    [
        ("", 2),
        ("coeff: -1 coeff: 0.5", 2),
        ("coeff: 2 coeff: 1 coeff: -3", 3),
        ("operation: PROD", 3),
        ("operation: PROD stable_prod_grad: false", 2),
        ("operation: MAX", 3),
    ],
)
def test_eltwise_in_place_gives_the_same_gradient(operation: str, count: int, backend: str) -> None:
    wanted = gradient(joined(operation, False, count), backend)
    assert np.abs(wanted).max() > 0.01
    assert_near(gradient(joined(operation, True, count), backend), wanted, 1e-6, "gradient")


def test_in_place_on_another_bottom_than_the_first_is_refused_as_in_caffe() -> None:
    text = joined("", True, 2).replace("bottom: 's0' bottom: 's1'", "bottom: 's1' bottom: 's0'")
    with pytest.raises(ConfigError, match="top blob 's0' is already produced.*bottom in the same place"):
        gradient(text, "cpu")


def test_in_place_on_a_blob_with_other_readers_is_refused_as_in_caffe() -> None:
    """Its readers have tops of a Split, so that its name is no bottom any more."""
    text = INPUT + "layer { name: 'a' type: 'TanH' bottom: 'x' top: 'a' } "
    text += "layer { name: 'b' type: 'TanH' bottom: 'a' top: 'b' } "
    text += "layer { name: 'join' type: 'Eltwise' bottom: 'a' bottom: 'b' top: 'a' }"
    with pytest.raises(ConfigError, match="layer 'join' .Eltwise.: works in place on 'a', which another layer before"):
        gradient(text, "cpu")


def test_overwritten_tops() -> None:
    text = """
        layer { name: "a" top: "a" } layer { name: "b" bottom: "a" top: "b" } layer { name: "c" bottom: "b" top: "b" }
        layer { name: "d" bottom: "b" top: "b" } layer { name: "e" bottom: "b" top: "e" top: "a" }
    """
    layers = text_format.Parse(text, caffe_pb2.NetParameter()).layer
    assert overwritten_tops(layers) == [False, True, True, False, False]
