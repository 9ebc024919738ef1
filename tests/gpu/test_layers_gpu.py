"""The golden nets of single layers on a GPU: captured passes give eager ones' bits, half precision what FLOAT gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format

from caffepy.backend import Backend
from caffepy.layers import LayerContext
from caffepy.net.net import Net
from caffepy.proto import caffe_pb2

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = sorted([*(GOLDEN / "layers").glob("*.npz"), *(GOLDEN / "nvidia" / "layers").glob("*.npz")])
ALLOWED = {"FLOAT16": 0.01, "BFLOAT16": 0.08}
"""Allowed distance from FLOAT, root mean square, relative to the blob's own."""
CHOOSING = ("argmax", "accuracy", "nvacc", "pool_max", "spp_max", "threshold", "eltwise_max", "dropout")
"""Cases whose numbers depend on which of two near values is larger: rounding may change them altogether."""


def build(backend: Backend, case: Any, kind: str) -> Net:
    """The case's net with the inputs and parameters that Caffe had."""
    param = text_format.Parse(str(case["prototxt"]), caffe_pb2.NetParameter())
    param.default_forward_type = param.default_backward_type = caffe_pb2.Type.Value(kind)
    net = Net(param, LayerContext(backend, caffe_pb2.Phase.Value(str(case["phase"]))))
    layer = net.layers[net.layer_names.index("L")]
    for name in case.files:
        start, _, rest = name.partition("_")
        if start == "in":
            backend.from_host(case[name], net.blobs[rest].data)
        elif start == "param" and rest.isdigit():
            backend.from_host(case[name], layer.blobs[int(rest)].data)
    net.forward()  # after which the shapes are those of the numbers
    for name in case.files:
        if name.startswith("topdiff_"):
            backend.from_host(case[name], net.blobs[name.removeprefix("topdiff_")].diff)
    return net


def one_pass(net: Net) -> None:
    """Forward, and backward where there is such a thing."""
    net.clear_param_diffs()
    net.forward()
    if net.layers[net.layer_names.index("L")].has_backward:
        net.backward()


def numbers(net: Net, case: Any) -> dict[str, Any]:
    """What the case compares."""
    layer, found = net.layers[net.layer_names.index("L")], {}
    for name in case.files:
        kind, _, rest = name.partition("_")
        if kind == "out":
            found[name] = net.blobs[rest].host_data()
        elif kind == "grad":
            found[name] = net.blobs[rest].host_diff()
        elif kind == "pgrad":
            found[name] = layer.blobs[int(rest)].host_diff()
    return found


def runs(backend: Backend, path: Path, kind: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """What an eager pass gives and a captured one, of nets of their own; None where the layer runs on the host."""
    case = np.load(path)
    net = build(backend, case, kind)
    one_pass(net)
    eager = numbers(net, case)
    other = build(backend, case, kind)
    if any(layer.capture_blocker() for layer in other.layers):
        return eager, None
    statistics = [(blob, blob.host_data()) for layer in other.layers for blob in layer.blobs]
    one_pass(other)
    for blob, values in statistics:
        backend.from_host(values, blob.data)
    graph = backend.capture(lambda: one_pass(other))
    graph.launch()
    return eager, numbers(other, case)


@pytest.mark.parametrize("kind", ["FLOAT", *ALLOWED])
@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_captured_and_half(backend: Backend, path: Path, kind: str) -> None:
    eager, captured = runs(backend, path, kind)
    assert captured is None or eager.keys() == captured.keys()
    for name, values in eager.items():
        if captured is not None:
            np.testing.assert_array_equal(captured[name], values, err_msg=f"{name} captured")
    if kind == "FLOAT" or path.stem.startswith(CHOOSING):
        return
    exact, _ = runs(backend, path, "FLOAT")
    for name, values in eager.items():
        size = np.sqrt((exact[name].astype(np.float64) ** 2).mean())
        error = np.sqrt(((values - exact[name].astype(np.float64)) ** 2).mean())
        assert error <= ALLOWED[kind] * max(size, 1e-6), f"{name}: {error:.3g} beside {size:.3g}"
