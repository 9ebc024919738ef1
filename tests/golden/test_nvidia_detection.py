"""SSD's layers against numbers that NVIDIA Caffe 0.17 gave for the same inputs (float32, on the CPU)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from layer_harness import BACKENDS, assert_near, backend_named, forward_tolerance

from caffepy.formats.caffemodel import read_weights
from caffepy.formats.proto import caffe_pb2
from caffepy.layers import LayerContext
from caffepy.net.net import Net

FOLDER = Path(__file__).parent / "nvidia" / "detection"
FAMILIES = ("priorbox", "multibox", "detout", "deteval")
CASES = sorted(path.stem for path in FOLDER.glob("*.npz") if path.stem.split("_")[0] in FAMILIES)


def _write_files(case: Any, folder: Path) -> None:
    for key in case.files:
        if key.startswith("file_") and key.endswith("_name"):
            (folder / str(case[key])).write_bytes(case[key.removesuffix("_name")].tobytes())


def _compare(net: Net, case: Any, kinds: dict[str, str], backend: str, what: str) -> int:
    """Compare the blobs of these kinds of keys; how many there were."""
    compared = 0
    for key in case.files:
        kind, _, blob = key.partition("_")
        if kind in kinds:
            found = getattr(net.blobs[blob], kinds[kind])()
            assert_near(found, case[key], forward_tolerance(backend), f"{what}: {key}")
            compared += 1
    return compared


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_nvidia_caffe(name: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = np.load(FOLDER / f"{name}.npz")
    _write_files(case, tmp_path)
    monkeypatch.chdir(tmp_path)
    device = backend_named(backend)
    with device.activate():
        param = text_format.Parse(str(case["prototxt"]), caffe_pb2.NetParameter())
        net = Net(param, LayerContext(device, caffe_pb2.Phase.Value(str(case["phase"]))))
        for key in case.files:
            if key.startswith("in_"):
                device.from_host(case[key], net.blobs[key.removeprefix("in_")].data)
        net.forward()
        compared = _compare(net, case, {"out": "host_data"}, backend, name)
        if any(key.startswith("grad_") for key in case.files):
            net.backward()
            compared += _compare(net, case, {"grad": "host_diff"}, backend, name)
        for kind in ("out2", "out3"):
            if any(key.startswith(f"{kind}_") for key in case.files):
                net.forward()
                compared += _compare(net, case, {kind: "host_data"}, backend, name)
        assert compared


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tiny_ssd_detects_what_nvidia_caffe_detects(backend: str, tmp_path: Path) -> None:
    case = np.load(FOLDER / "ssd_tiny_merged.npz")
    _write_files(case, tmp_path)
    device = backend_named(backend)
    with device.activate():
        param = text_format.Parse(str(case["prototxt"]), caffe_pb2.NetParameter())
        net = Net(param, LayerContext(device, caffe_pb2.TEST))
        weights = tmp_path / str(case["file_0_name"])
        net.copy_trained_layers_from(read_weights(weights), str(weights))
        device.from_host(case["in_data"], net.blobs["data"].data)
        net.forward()
        for name in ("mbox_loc", "mbox_conf_flatten", "mbox_priorbox", "detection_out"):
            assert_near(net.blobs[name].host_data(), case[f"out_{name}"], 1e-4, name)
