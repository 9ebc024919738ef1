"""A small SSD learns to find rectangles: annotated images in LMDBs, training, and the test net's average precision."""

from __future__ import annotations

from pathlib import Path

import lmdb
import numpy as np
import pytest
from generator.builder import Builder
from generator.detectors import Source, detect, heads
from google.protobuf import text_format
from training import build_solver

from caffepy.proto import caffe_pb2

SIZE, CLASSES = 48, 3
"""Pixels of a side; the background, bright rectangles and dark ones."""
SOURCES = (Source("conv3", (12, 20), (2, 3)), Source("conv4", (24, 34), (2, 3)))
SOLVER = """
type: "Adam" base_lr: 0.003 momentum: 0.9 momentum2: 0.999 lr_policy: "multistep" gamma: 0.1 stepvalue: 230
max_iter: 300 test_iter: 4 test_interval: 1000 test_initialization: false eval_type: "detection"
ap_version: "11point" random_seed: 3 snapshot_after_train: false
"""


def rectangles(rng: np.random.Generator) -> caffe_pb2.AnnotatedDatum:
    """A grey, noisy image with one rectangle in its left half and one in its right half."""
    image = rng.normal(128, 12, (3, SIZE, SIZE))
    record = caffe_pb2.AnnotatedDatum(type=caffe_pb2.AnnotatedDatum.BBOX)
    for left in (0, SIZE // 2):
        height, width = rng.integers(10, (32, 22))
        y, x = rng.integers(0, SIZE - height), left + rng.integers(0, SIZE // 2 - width)
        label = int(rng.integers(1, CLASSES))
        image[:, y : y + height, x : x + width] += 90 if label == 1 else -90
        group = record.annotation_group.add(group_label=label)
        corners = zip(("xmin", "ymin", "xmax", "ymax"), (x, y, x + width, y + height), strict=True)
        group.annotation.add(bbox={name: float(value) / SIZE for name, value in corners})
    record.datum.channels, record.datum.height, record.datum.width = image.shape
    record.datum.data = image.clip(0, 255).astype(np.uint8).tobytes()
    return record


def write_images(path: Path, count: int, seed: int) -> str:
    rng = np.random.default_rng(seed)
    with lmdb.open(str(path), map_size=2**26) as environment, environment.begin(write=True) as transaction:
        for item in range(count):
            transaction.put(f"{item:05}".encode(), rectangles(rng).SerializeToString())
    return str(path)


def tiny_ssd(train: str, test: str) -> caffe_pb2.NetParameter:
    """Four convolutions of stride 2, boxes from the last two: 6 x 6 and 3 x 3 positions."""
    net = Builder("tiny_ssd", {"type": "msra"})
    transform = {"mean_value": [128], "scale": 1 / 64}
    net.data(*(
        {
            "transform_param": transform | {"mirror": mirror},
            "data_param": {"source": source, "batch_size": 16, "backend": "LMDB"},
        }
        for source, mirror in ((train, True), (test, False))
    ), kind="AnnotatedData")  # fmt: skip
    x = "data"
    for item, outputs in enumerate((16, 24, 32, 32), 1):
        x = net.relu(f"relu{item}", net.conv(f"conv{item}", x, outputs, 3, pad=1, stride=2))
    heads(net, SOURCES, 3, CLASSES)
    return detect(net, CLASSES)


@pytest.mark.slow
def test_a_tiny_ssd_finds_rectangles(tmp_path: Path):
    net = tiny_ssd(write_images(tmp_path / "train", 512, 1), write_images(tmp_path / "test", 64, 2))
    with build_solver(SOLVER, text_format.MessageToString(net)) as solver:
        untrained = float(solver.test_all()[0]["detection_eval"])
        solver.step(300)
        trained = float(solver.test_all()[0]["detection_eval"])
    assert untrained < 0.1
    assert trained >= 0.9
