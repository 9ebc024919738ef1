"""Layers that read files, on a GPU: the batches of several passes are the CPU's, in half precision rounded once.

The others are in test_input.py, tests/golden/test_nvidia_data.py and tests/unit/layers/input, which run on a GPU too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import h5py
import numpy as np
import pytest
from backend_arrays import rounded
from google.protobuf import text_format
from training import CPU

from caffepy.backend import Backend
from caffepy.data.sources.databases import record_key, write_datums
from caffepy.formats.proto import caffe_pb2
from caffepy.layers import LayerContext
from caffepy.net import Net

PASSES = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An HDF5 file and its list, a video, a list of windows, and an LMDB of images with objects."""
    path = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    with h5py.File(path / "a.h5", "w") as file:
        file["x"], file["y"] = random.standard_normal((10, 3, 4)).astype("f"), np.arange(10, dtype="f")
    (path / "list.txt").write_text(f"{path}/a.h5\n")
    cv2.imwrite(str(path / "a.png"), random.integers(0, 256, (40, 60, 3), dtype=np.uint8))
    (path / "windows.txt").write_text("# 0\na.png\n3 40 60\n2\n1 0.9 5 5 30 30\n0 0.1 20 10 50 35\n")
    writer = cv2.VideoWriter(str(path / "a.avi"), cv2.VideoWriter.fourcc(*"MJPG"), 10, (64, 48))
    for number in range(12):
        writer.write(np.full((48, 64, 3), 20 * number, np.uint8))
    writer.release()
    encoded = cv2.imencode(".png", random.integers(0, 256, (30, 40, 3), dtype=np.uint8))[1].tobytes()
    datum = caffe_pb2.Datum(data=encoded, encoded=True, float_data=[1, 0, 0.5, 0.5, 0.2, 0.4])
    write_datums(path / "lmdb", [(record_key(number, "a"), datum) for number in range(4)])
    return path


LAYERS = {
    "BoxData": 'data_param {{ source: "{}/lmdb" batch_size: 2 backend: LMDB side: 5 }} '
    "transform_param {{ mean_value: 10 scale: 0.5 }}",
    "HDF5Data": 'hdf5_data_param {{ source: "{}/list.txt" batch_size: 4 shuffle: true }}',
    "VideoData": 'video_data_param {{ video_type: VIDEO video_file: "{}/a.avi" }} data_param {{ batch_size: 2 }} '
    "transform_param {{ mean_value: 10 scale: 0.5 }}",
    "WindowData": 'window_data_param {{ source: "{}/windows.txt" root_folder: "{}/" batch_size: 4 fg_fraction: 0.5 '
    "crop_size: 16 }} transform_param {{ crop_size: 16 mirror: true }}",
}


def run(backend: Backend, kind: str, folder: Path, dtype: str) -> list[list[Any]]:
    settings = LAYERS[kind].format(folder, folder)
    text = f'default_forward_type: {dtype} layer {{ name: "d" type: "{kind}" top: "x" top: "y" {settings} }}'
    net = Net(text_format.Parse(text, caffe_pb2.NetParameter()), LayerContext(backend, caffe_pb2.TRAIN, seed=5))
    found = []
    for _ in range(PASSES):
        net.forward()
        x, y = net.blobs["x"], net.blobs["y"]
        found.append([x.host_data(), y.host_data(), x.dtype])
    net.close()
    return found


@pytest.mark.parametrize("dtype", ["FLOAT", "FLOAT16", "BFLOAT16"])
@pytest.mark.parametrize("kind", LAYERS)
def test_batches_are_those_of_the_cpu(backend: Backend, kind: str, dtype: str, folder: Path) -> None:
    with CPU.activate():
        wanted = run(CPU, kind, folder, "FLOAT")
    for (images, labels, storage), (cpu_images, cpu_labels, _) in zip(
        run(backend, kind, folder, dtype), wanted, strict=True
    ):
        assert storage in ("float32", dtype.lower())
        np.testing.assert_array_equal(images, rounded(cpu_images, storage))
        np.testing.assert_array_equal(labels, cpu_labels)
