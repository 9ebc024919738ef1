"""Layers that read or transform data against numbers that NVIDIA Caffe 0.17 gave for the same files, on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format
from layer_harness import BACKENDS, assert_near, backend_named, forward_tolerance

from caffepy.formats.dialect import VARIABLE
from caffepy.formats.proto import caffe_pb2
from caffepy.layers import LayerContext
from caffepy.net.net import Net

FOLDER = Path(__file__).parent / "nvidia" / "data"
CASES = sorted(path.stem for path in FOLDER.glob("*.npz"))


def write_files(case: np.lib.npyio.NpzFile, folder: Path) -> None:
    for key in case.files:
        if key.startswith("file_") and key.endswith("_name"):
            path = folder / str(case[key])
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(case[key.removesuffix("_name")].tobytes())


def passes_of(case: np.lib.npyio.NpzFile) -> list[str]:
    """The prefixes of the outputs of each pass."""
    return ["out_", *(f"out{n}_" for n in range(2, 10) if any(key.startswith(f"out{n}_") for key in case.files))]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_nvidia_caffe(name: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = np.load(FOLDER / f"{name}.npz")
    write_files(case, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, "nvidia")
    device = backend_named(backend)
    param = text_format.Parse(str(case["prototxt"]), caffe_pb2.NetParameter())
    with device.activate():
        net = Net(param, LayerContext(device, caffe_pb2.Phase.Value(str(case["phase"]))))
        try:
            for key in case.files:
                if key.startswith("in_"):
                    device.from_host(case[key], net.blobs[key.removeprefix("in_")].data)
            for prefix in passes_of(case):
                net.forward()
                for key in (key for key in case.files if key.startswith(prefix)):
                    found = net.blobs[key.removeprefix(prefix)].host_data()
                    assert_near(found, case[key], forward_tolerance(backend), f"{name}: {key}")
        finally:
            net.close()
