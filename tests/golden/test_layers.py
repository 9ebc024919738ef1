"""Single layers against numbers that BVLC Caffe 1.0 and NVIDIA Caffe 0.17 gave for the same inputs, on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from layer_harness import BACKENDS, assert_near, backend_named, forward_tolerance

from caffepy.formats.proto import caffe_pb2
from caffepy.layers import LayerContext
from caffepy.net.net import Net

GOLDEN = Path(__file__).parent
FOLDERS = {"bvlc": GOLDEN / "layers", "nvidia": GOLDEN / "nvidia" / "layers"}
CASES = [(dialect, path.stem) for dialect, folder in FOLDERS.items() for path in sorted(folder.glob("*.npz"))]


@pytest.fixture
def dialect(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which Caffe the numbers are of; layers whose numbers differ are told."""
    monkeypatch.setenv("CAFFEPY_DIALECT", request.param)
    return str(request.param)


def _run(case: Any, backend_name: str) -> Net:
    """Forward and backward through the case's net, the layer's parameters and the top's diffs as Caffe had them."""
    param = text_format.Parse(str(case["prototxt"]), caffe_pb2.NetParameter())
    backend = backend_named(backend_name)
    net = Net(param, LayerContext(backend, caffe_pb2.Phase.Value(str(case["phase"]))))
    layer = net.layers[net.layer_names.index("L")]
    for name in case.files:
        kind, _, rest = name.partition("_")
        if kind == "in":
            backend.from_host(case[name], net.blobs[rest].data)
        elif kind == "param" and rest.isdigit():
            backend.from_host(case[name], layer.blobs[int(rest)].data)
    net.forward()
    for name in case.files:
        if name.startswith("topdiff_"):
            backend.from_host(case[name], net.blobs[name.removeprefix("topdiff_")].diff)
    if layer.has_backward:
        net.backward()
    return net


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dialect", "name"), CASES, indirect=["dialect"])
def test_agrees_with_caffe(dialect: str, name: str, backend: str) -> None:
    case = np.load(FOLDERS[dialect] / f"{name}.npz")
    with backend_named(backend).activate():
        net = _run(case, backend)
        layer = net.layers[net.layer_names.index("L")]
        compared = 0
        for key in case.files:
            kind, _, rest = key.partition("_")
            if kind == "out":
                found = net.blobs[rest].host_data()
            elif kind == "grad":
                found = net.blobs[rest].host_diff()
            elif kind == "pgrad":
                found = layer.blobs[int(rest)].host_diff()
            elif key.startswith("param_after_"):
                found = layer.blobs[int(key.removeprefix("param_after_"))].host_data()
            else:
                continue
            assert_near(found, case[key], forward_tolerance(backend), f"{name}: {key}")
            compared += 1
    assert compared or name == "silence"
