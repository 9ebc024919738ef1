"""Nets for tests of ONNX: small texts with random parameters that keep outputs of a sensible size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from google.protobuf import text_format

from caffepy.backend import create_backend
from caffepy.export.check import compare, random_inputs, run_net
from caffepy.export.onnx.libraries import run_model
from caffepy.export.onnx.write import serialised, to_model
from caffepy.export.onnx_import.read import build_imported
from caffepy.export.prepare import Settings, build, inference_net
from caffepy.formats.proto import caffe_pb2
from caffepy.net import Net

Arrays = dict[str, np.ndarray]
BACKEND = create_backend(None, 2)


POSITIVE = {("BatchNorm", 1), ("BatchNorm", 2), ("BN", 0), ("BN", 3), ("Scale", 0), ("Normalize", 0)}
"""Parameters, by layer type and index, whose random values are positive."""


def random_parameters(net: Net, seed: int = 1) -> Net:
    """Fill all parameters such that activations keep their size from layer to layer; returns the net."""
    rng = np.random.default_rng(seed)
    for layer in net.layers:
        for index, blob in enumerate(layer.blobs):
            values = 0.1 * rng.standard_normal(blob.shape)
            if (layer.type, index) in POSITIVE:
                values = rng.uniform(0.5, 1.5, blob.shape)
            elif len(blob.shape) > 1:
                values = rng.standard_normal(blob.shape) * np.sqrt(2 / np.prod(blob.shape[1:]))
            net.backend.from_host(values.astype(np.float32), blob.data)
    return net


def even_out(net: Net) -> Net:
    """Divide the weights of each layer by what its top's deviation is on random input, so that no output saturates."""
    inputs = random_inputs(net, seed=2)
    with net.backend.activate():
        for name, values in inputs.items():
            net.backend.from_host(values, net.blobs[name].data)
        net.prepare()
        for node in net.nodes:
            net.forward_node(node)
            if node.layer.type in ("Convolution", "InnerProduct", "Deconvolution"):
                blob = node.layer.blobs[0]
                spread = float(node.tops[0].host_data().std())
                net.backend.from_host((blob.host_data() / max(spread, 1e-6)).astype(np.float32), blob.data)
                net.forward_node(node)
    return net


def net_of(text: str) -> Net:
    """The net of a prototxt's text with random parameters."""
    param = inference_net(text_format.Parse(text, caffe_pb2.NetParameter()), Settings())
    return random_parameters(build(param, BACKEND))


def layer_net(layer: str, *shapes: tuple[int, ...]) -> Net:
    """A net of inputs `x0`, `x1`, … and one layer that reads them, of which only type and settings are given."""
    return net_of(layer_text(layer, *shapes))


def layer_text(layer: str, *shapes: tuple[int, ...]) -> str:
    """The prototxt of `layer_net`."""
    inputs = "".join(
        f'layer {{ name: "x{i}" type: "Input" top: "x{i}" input_param {{ shape {{ '
        + " ".join(f"dim: {size}" for size in shape)
        + " } } } "
        for i, shape in enumerate(shapes)
    )
    bottoms = " ".join(f'bottom: "x{i}"' for i in range(len(shapes)))
    tops = "" if "top:" in layer else 'top: "y"'
    return f'name: "small" {inputs} layer {{ name: "it" {bottoms} {tops} {layer} }}'


def assert_exported(net: Net, tolerance: float = 1e-5, inputs: Arrays | None = None, opset: int = 17) -> bytes:
    """Whether onnxruntime gives the exported net's numbers; returns the file's content."""
    content = serialised(to_model(net, opset))
    inputs = random_inputs(net) if inputs is None else inputs
    read = {bottom.name for node in net.nodes for bottom in node.bottoms}
    wanted = run_net(net, inputs)
    for one in compare(run_model(content, {name: v for name, v in inputs.items() if name in read}), wanted):
        assert one.relative <= tolerance, one
    return content


def assert_round_trip(net: Net, folder: Path, tolerance: float = 1e-5, inputs: Arrays | None = None) -> Net:
    """Whether the exported net, read back, gives the same numbers; returns it."""
    path = folder / "net.onnx"
    path.write_bytes(assert_exported(net, tolerance, inputs))
    _, again = build_imported(path, "again")
    inputs = random_inputs(net) if inputs is None else inputs
    for one in compare(run_net(again, inputs), run_net(net, inputs)):
        assert one.relative <= tolerance, one
    return again
