"""`caffepy test` of a net whose scores differ from batch to batch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
from processes import program_environment
from subprocess_training import NET, write_lmdb

from caffepy.formats.proto.caffe_pb2 import NetParameter

SHAPES = {"conv": [(8, 1, 5, 5), (8,)], "ip1": [(32, 128), (32,)], "ip2": [(10, 32), (10,)]}
DETECTIONS = """
layer { name: "boxes" type: "HDF5Data" top: "det" top: "gt" hdf5_data_param { source: "list.txt" batch_size: 1 } }
layer { name: "eval" type: "DetectionEvaluate" bottom: "det" bottom: "gt" top: "detection_eval"
  detection_evaluate_param { num_classes: 4 } }
"""
COMMAND = ["--model", "net.prototxt", "--weights", "net.caffemodel", "--iterations", "7", "--threads", "1"]


def write_net(folder: Path) -> None:
    """Write the net, its data and its weights."""
    write_lmdb(folder / "train_lmdb", 7 * 32)
    plain = "\n".join(line for line in NET.splitlines() if '"Fault"' not in line)
    (folder / "net.prototxt").write_text(plain % {"batch": 4} + DETECTIONS)
    (folder / "boxes.prototxt").write_text(DETECTIONS)
    generator = np.random.default_rng(3)
    weights = NetParameter()
    for name, shapes in SHAPES.items():
        layer = weights.layer.add(name=name)
        for shape in shapes:
            values = generator.normal(0, 0.1, shape).astype(np.float32)
            layer.blobs.add(data=values.ravel().tolist()).shape.dim.extend(shape)
    (folder / "net.caffemodel").write_bytes(weights.SerializeToString())
    corners = generator.uniform(0, 0.5, (7, 1, 5, 2))
    boxes = np.concatenate([corners, corners + generator.uniform(0.2, 0.4, (7, 1, 5, 2))], axis=3)
    labels, image = generator.integers(1, 4, (7, 1, 5, 1)), np.zeros((7, 1, 5, 1))
    found = boxes + generator.normal(0, 0.05, boxes.shape)
    with h5py.File(folder / "boxes.h5", "w") as file:
        file["det"] = np.concatenate([image, labels, generator.uniform(0, 1, image.shape), found], 3, dtype=np.float32)
        file["gt"] = np.concatenate([image, labels, image, boxes, image], 3, dtype=np.float32)
    (folder / "list.txt").write_text("boxes.h5\n")


def scored(folder: Path, *options: str, launcher: tuple[str, ...] = (), command: str = "test") -> list[str]:
    """The logged scores, without the log's prefix."""
    words = [*launcher, sys.executable, "-m", "caffepy", command, *COMMAND, *options]
    done = subprocess.run(
        words, cwd=folder, env=program_environment({}), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [line.partition("] ")[2] for line in done.stderr.splitlines()]
    return [line for line in lines if " = " in line or line.startswith(("Loss: ", "class AP"))]
