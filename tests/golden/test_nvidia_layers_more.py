"""Single layers against numbers that NVIDIA Caffe 0.17 gave for the same inputs (float32, on the CPU): what it computes
otherwise than BVLC Caffe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from layer_harness import BACKENDS, assert_near, backend_named, forward_tolerance

from caffepy.layers import LayerContext
from caffepy.net.net import Net
from caffepy.proto import caffe_pb2

FOLDER = Path(__file__).parent / "nvidia" / "layers"
FAMILIES = ("bn_", "nvacc_", "nvconv_", "nvsoftmax_")
CASES = sorted(path.stem for path in FOLDER.glob("*.npz") if path.stem.startswith(FAMILIES))


def compared_arrays(net: Net) -> dict[str, Any]:
    """What a case may hold of a net that has run, by the case's names."""
    layer = net.layers[net.layer_names.index("L")]
    found = {f"out_{name}": blob.host_data() for name, blob in net.blobs.items()}
    found |= {f"grad_{name}": blob.host_diff() for name, blob in net.blobs.items()}
    found |= {f"pgrad_{i}": blob.host_diff() for i, blob in enumerate(layer.blobs)}
    return found | {f"param_after_{i}": blob.host_data() for i, blob in enumerate(layer.blobs)}


def run(case: Any, backend_name: str) -> Net:
    """Forward and backward through the case's net."""
    backend = backend_named(backend_name)
    param = text_format.Parse(str(case["prototxt"]), caffe_pb2.NetParameter())
    net = Net(param, LayerContext(backend, caffe_pb2.Phase.Value(str(case["phase"]))))
    layer = net.layers[net.layer_names.index("L")]
    inputs = [key for key in case.files if key.startswith("in_")]
    params = [key for key in case.files if key.startswith("param_") and key[6:].isdigit()]
    for key in inputs:
        backend.from_host(case[key], net.blobs[key.removeprefix("in_")].data)
    for key in params:
        backend.from_host(case[key], layer.blobs[int(key.removeprefix("param_"))].data)
    net.forward()
    for key in case.files:
        if key.startswith("topdiff_"):
            backend.from_host(case[key], net.blobs[key.removeprefix("topdiff_")].diff)
    if layer.has_backward:
        net.backward()
    return net


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_nvidia(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAFFEPY_DIALECT", "nvidia")
    case = np.load(FOLDER / f"{name}.npz")
    with backend_named(backend).activate():
        found = compared_arrays(run(case, backend))
    wanted = [key for key in case.files if key in found]
    assert wanted
    for key in wanted:
        assert_near(found[key], case[key], forward_tolerance(backend), f"{name}: {key}")
