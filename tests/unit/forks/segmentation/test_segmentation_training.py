"""A small SegNet learns to find dark squares and bright discs in noise; its statistics then become scale and bias."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
from training import build_net, build_solver

from caffepy.formats.proto import caffe_pb2

SIZE = (24, 32)
CLASSES = 3
IMAGES = 24


def write_images(folder: Path) -> None:
    """Noise with a dark square, label 1, and a bright disc, label 2; some pixels have no label, 255."""
    random = np.random.default_rng(0)
    lines = []
    for index in range(IMAGES):
        image = random.normal(128, 20, (*SIZE, 3))
        labels = np.zeros(SIZE, np.uint8)
        top, left = random.integers(1, 13), random.integers(1, 21)
        labels[top : top + 9, left : left + 9] = 1
        center = (int(random.integers(5, 27)), int(random.integers(5, 19)))
        cv2.circle(labels, center, 5, 2, -1)
        image += np.array([0, -50, 50])[labels][:, :, None]
        labels[-1, :6] = 255
        cv2.imwrite(str(folder / f"i{index}.png"), np.clip(image, 0, 255).astype(np.uint8))
        cv2.imwrite(str(folder / f"l{index}.png"), labels)
        lines.append(f"i{index}.png l{index}.png\n")
    (folder / "list").write_text("".join(lines))


def block(name: str, bottom: str, outputs: int, kind: str) -> str:
    """A convolution, BN and ReLU."""
    return f"""
    layer {{ name: "{name}" type: "Convolution" bottom: "{bottom}" top: "{name}" convolution_param {{
      num_output: {outputs} kernel_size: 3 pad: 1 weight_filler {{ type: "msra" }} }} }}
    layer {{ name: "{name}_bn" type: "BN" bottom: "{name}" top: "{name}" {kind} }}
    layer {{ name: "{name}_relu" type: "ReLU" bottom: "{name}" top: "{name}" }}"""


def pool(name: str, bottom: str) -> str:
    return f"""layer {{ name: "{name}" type: "Pooling" bottom: "{bottom}" top: "{name}" top: "{name}_mask"
      pooling_param {{ pool: MAX kernel_size: 2 stride: 2 }} }}"""


def upsample(name: str, bottom: str, mask: str) -> str:
    return f"""layer {{ name: "{name}" type: "Upsample" bottom: "{bottom}" bottom: "{mask}" top: "{name}"
      upsample_param {{ scale: 2 }} }}"""


def segnet(folder: Path, kind: str) -> str:
    data = f"""
    layer {{ name: "data" type: "DenseImageData" top: "data" top: "label"
      transform_param {{ mean_value: 128 scale: 0.02 }}
      dense_image_data_param {{ source: "{folder}/list" root_folder: "{folder}/" batch_size: 4 mirror: true
        shuffle: true }} }}"""
    return (
        data
        + block("conv1", "data", 8, kind)
        + pool("pool1", "conv1")
        + block("conv2", "pool1", 16, kind)
        + pool("pool2", "conv2")
        + upsample("up2", "pool2", "pool2_mask")
        + block("decode2", "up2", 8, kind)
        + upsample("up1", "decode2", "pool1_mask")
        + block("decode1", "up1", 8, kind)
        + f"""
    layer {{ name: "score" type: "Convolution" bottom: "decode1" top: "score" convolution_param {{
      num_output: {CLASSES} kernel_size: 1 weight_filler {{ type: "msra" }} }} }}
    layer {{ name: "loss" type: "SoftmaxWithLoss" bottom: "score" bottom: "label" top: "loss" loss_param {{
      ignore_label: 255 weight_by_label_freqs: true class_weighting: 0.5 class_weighting: 1.5 class_weighting: 2 }} }}
    layer {{ name: "accuracy" type: "SegAccuracy" bottom: "score" bottom: "label" top: "accuracy"
      seg_accuracy_param {{ ignore_label: 255 }} include {{ phase: TEST }} }}"""
    )


SEGNET = "bn_param { scale_filler { value: 1 } shift_filler { value: 0.001 } }"
PSPNET = "bn_param { slope_filler { value: 1 } bias_filler { value: 0 } momentum: 0.8 }"
SOLVER = 'base_lr: 0.1 momentum: 0.9 lr_policy: "fixed" max_iter: 80 snapshot_after_train: false'


def trained(folder: Path, kind: str) -> dict[str, list[np.ndarray]]:
    """The parameters after the training."""
    with build_solver(SOLVER, segnet(folder, kind)) as solver:
        solver.step(1)
        first = float(solver.net.blobs["loss"].host_data())
        solver.step(79)
        assert float(solver.net.blobs["loss"].host_data()) < 0.3 * first
        return {layer.name: [blob.host_data() for blob in layer.blobs] for layer in solver.net.layers}


def scores(folder: Path, kind: str, parameters: dict[str, list[np.ndarray]], passes: int = 6) -> np.ndarray:
    """The mean of SegAccuracy over some passes of a TEST net."""
    net = build_net(segnet(folder, kind), caffe_pb2.TEST)
    for layer in net.layers:
        for blob, values in zip(layer.blobs, parameters.get(layer.name, []), strict=False):
            blob.data[...] = values
    found = []
    for _ in range(passes):
        net.forward()
        found.append(net.blobs["accuracy"].host_data().ravel())
    net.close()
    return np.mean(found, 0)


@pytest.mark.parametrize("kind", [SEGNET, PSPNET], ids=["SegNet's BN", "PSPNet's BN"])
def test_a_small_segnet_learns(tmp_path: Path, kind: str) -> None:
    write_images(tmp_path)
    parameters = trained(tmp_path, kind)
    pixels, recall, jaccard = scores(tmp_path, kind, parameters)
    assert min(pixels, recall) > 0.94 and jaccard > 0.8
    if kind == PSPNET:
        # What SegNet's compute_bn_statistics.py does: stored statistics become the scale and the bias.
        for name, values in parameters.items():
            if name.endswith("_bn"):
                scale, bias, mean, variance = values
                factor = scale / np.sqrt(variance + 1e-5)
                parameters[name] = [factor, bias - mean * factor]
        inference = scores(tmp_path, "bn_param { bn_mode: INFERENCE }", parameters)
        assert np.allclose(inference, [pixels, recall, jaccard], atol=0.01)
