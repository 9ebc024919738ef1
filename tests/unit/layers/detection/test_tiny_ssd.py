"""A small SSD learns to find rectangles: annotated images in LMDBs, training, and the test net's average precision."""

from __future__ import annotations

from pathlib import Path

import pytest
from generator.builder import Builder
from generator.detectors import Source, detect, heads
from google.protobuf import text_format
from rectangles import CLASSES, write_images
from training import build_solver

from caffepy.formats.proto import caffe_pb2

SOURCES = (Source("conv3", (12, 20), (2, 3)), Source("conv4", (24, 34), (2, 3)))
SOLVER = """
type: "Adam" base_lr: 0.003 momentum: 0.9 momentum2: 0.999 lr_policy: "multistep" gamma: 0.1 stepvalue: 230
max_iter: 300 test_iter: 4 test_interval: 1000 test_initialization: false eval_type: "detection"
ap_version: "11point" random_seed: 3 snapshot_after_train: false
"""


def tiny_ssd(train: str, test: str) -> caffe_pb2.NetParameter:
    """Four convolutions of stride 2, boxes from the last two: 6 x 6 and 3 x 3 positions."""
    net = Builder("tiny_ssd", {"type": "msra"})
    transform = {"mean_value": [128], "scale": 1 / 64}
    net.data(
        *(
            {
                "transform_param": transform | {"mirror": mirror},
                "data_param": {"source": source, "batch_size": 16, "backend": "LMDB"},
            }
            for source, mirror in ((train, True), (test, False))
        ),
        kind="AnnotatedData",
    )
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
