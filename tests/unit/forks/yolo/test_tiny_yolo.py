"""Small YOLOs of versions 2 and 3 learn to find rectangles: LMDBs, training, and the test net's average precision."""

from __future__ import annotations

from pathlib import Path

import pytest
from rectangles import CLASSES, SIZE, write_images
from training import build_solver

SOLVER = """
type: "Adam" base_lr: 0.003 momentum: 0.9 momentum2: 0.999 lr_policy: "multistep" gamma: 0.1 stepvalue: 230
max_iter: 300 test_iter: 4 test_interval: 1000 test_initialization: false eval_type: "detection"
ap_version: "11point" random_seed: 3 snapshot_after_train: false
"""
CELL, ANCHORS = 8, ((12, 20), (16, 30))
"""Pixels of a cell; width and height of the anchors in pixels."""
ONE = "mask: 0 mask: 1"
VERSIONS = {
    2: (
        "type: 'RegionLoss' region_loss_param { num: 2 num_class: 2 thresh: 0.6 rescore: 0 object_scale: 5 "
        "noobject_scale: 1 class_scale: 1 coord_scale: 1 %s }",
        "type: 'YoloDetectionOutput' yolo_detection_output_param { num_box: 2 num_classes: 2 %s }",
    ),
    3: (
        f"type: 'Yolov3' yolov3_param {{ num: 2 num_class: 2 thresh: 0.6 coord_scale: 1 anchors_scale: {CELL} {ONE} "
        "%s }",
        f"type: 'Yolov3DetectionOutput' yolov3_detection_output_param {{ num_box: 2 num_classes: 2 mask_group_num: 1 "
        f"anchors_scale: {CELL} {ONE} %s }}",
    ),
}
"""Loss and output of each version, with a place for the anchors."""


def tiny_yolo(train: str, test: str, version: int) -> str:
    """Four convolutions, three of stride 2: 6 x 6 cells with two anchors of 5 + 2 values."""
    cells = CELL if version == 2 else 1
    biases = " ".join(f"biases: {side / cells}" for anchor in ANCHORS for side in anchor)
    loss, output = (text % biases for text in VERSIONS[version])

    def data(phase: str, source: str, more: str) -> str:
        return f"""layer {{ name: "data" type: "AnnotatedData" top: "data" top: "label" include {{ phase: {phase} }}
          transform_param {{ mean_value: 128 scale: 0.0156 mirror: {str(phase == "TRAIN").lower()} }}
          data_param {{ source: "{source}" batch_size: 16 backend: LMDB }} annotated_data_param {{ {more} }} }}"""

    layers = [data("TRAIN", train, "yolo_data_type: 1 yolo_data_jitter: 0"), data("TEST", test, "")]
    bottom = "data"
    for number, (outputs, stride) in enumerate(((16, 2), (24, 2), (48, 2), (48, 1), (14, 1)), 1):
        size = "kernel_size: 1" if number == 5 else "kernel_size: 3 pad: 1"
        layers.append(f"""layer {{ name: "c{number}" type: "Convolution" bottom: "{bottom}" top: "c{number}"
          convolution_param {{ num_output: {outputs} {size} stride: {stride} weight_filler {{ type: "msra" }} }} }}""")
        bottom = f"c{number}"
        if number < 5:
            layers.append(f'layer {{ name: "r{number}" type: "ReLU" bottom: "{bottom}" top: "{bottom}" }}')
    layers.append(f"""
      layer {{ name: "loss" bottom: "c5" bottom: "label" top: "loss" include {{ phase: TRAIN }} {loss} }}
      layer {{ name: "boxes" bottom: "c5" top: "boxes" include {{ phase: TEST }} {output} }}
      layer {{ name: "found" type: "DetectionEvaluate" bottom: "boxes" bottom: "label" top: "detection_eval"
        include {{ phase: TEST }} detection_evaluate_param {{ num_classes: {CLASSES} }} }}""")
    return "\n".join(layers)


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_a_tiny_yolo_finds_rectangles(version: int, tmp_path: Path) -> None:
    assert SIZE == 6 * CELL
    net = tiny_yolo(write_images(tmp_path / "train", 512, 1), write_images(tmp_path / "test", 64, 2), version)
    with build_solver(SOLVER, net) as solver:
        untrained = float(solver.test_all()[0]["detection_eval"])
        solver.step(300)
        trained = float(solver.test_all()[0]["detection_eval"])
    assert untrained < 0.1
    assert trained >= 0.9
