"""Nets from public repositories without their data: each data layer becomes an Input layer of the right shape."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from caffepy.config.load import read_net
from caffepy.net import Net
from caffepy.proto import caffe_pb2

DATA = ("AnnotatedData", "Data", "HDF5Data", "ImageData", "VideoData", "WindowData")
NAMED_SIZES = {"mnist": (1, 28, 28), "cifar": (3, 32, 32), "siamese": (2, 28, 28), "hdf5": (4,)}
"""Records of the sets that a prototxt with this word in its path reads, where it does not say their size."""
LARGEST_IMAGE = 700
"""Pixels of a side; larger Input layers are halved until they fit."""
IMAGE_AXES = 4


def states_of(param: caffe_pb2.NetParameter) -> list[tuple[int, list[str]]]:
    """Phases and stages in which the net has all layers that its rules speak of."""
    rules = [rule for layer in param.layer for rule in (*layer.include, *layer.exclude)]
    phases = {rule.phase for rule in rules if rule.HasField("phase")} or {caffe_pb2.TEST}
    stages = sorted({stage for rule in rules for stage in (*rule.stage, *rule.not_stage)})
    return [(phase, [stage]) for phase in sorted(phases) for stage in stages] + [(p, []) for p in sorted(phases)]


def without_data(path: Path) -> caffe_pb2.NetParameter:
    """The net of a file with an Input layer in place of each data layer, and small batches."""
    param = read_net(path)
    size = next((size for word, size in NAMED_SIZES.items() if word in str(path)), (3, 227, 227))
    if path.parent.name == "siamese":
        size = NAMED_SIZES["siamese"]
    for layer in param.layer:
        if layer.type in DATA:
            _replace(layer, size)
        elif layer.type == "DetectNetTransformation":
            _replace_coverage(layer)
        elif layer.type == "Input":
            _shrink(layer)
        elif layer.type in ("DetectionOutput", "DetectionEvaluate"):
            layer.detection_output_param.ClearField("save_output_param")
            layer.detection_evaluate_param.ClearField("name_size_file")
    return param


def _replace(layer: caffe_pb2.LayerParameter, size: tuple[int, ...]) -> None:
    """Into an Input layer with images of `size`, unless the layer says otherwise, and labels."""
    transform, boxes = layer.transform_param, layer.type == "AnnotatedData"
    resize = transform.resize_param
    side = transform.crop_size or layer.window_data_param.crop_size
    if side:
        size = (size[0], side, side)
    elif boxes:
        size = (3, resize.height or 300, resize.width or 300)
    batch = 1 if size[-1] > 100 else 4
    layer.type = "Input"
    layer.input_param.shape.add(dim=[batch, *size])
    for _ in layer.top[1:]:
        layer.input_param.shape.add(dim=[1, 1, 2, 8] if boxes else [batch])


def _replace_coverage(layer: caffe_pb2.LayerParameter) -> None:
    """DetectNet's images and coverage maps."""
    truth = layer.detectnet_groundtruth_param
    grid = [truth.image_size_y // truth.stride, truth.image_size_x // truth.stride]
    classes = max(1, len(truth.object_class))
    layer.type = "Input"
    del layer.bottom[:]
    layer.input_param.shape.add(dim=[1, 3, truth.image_size_y, truth.image_size_x])
    layer.input_param.shape.add(dim=[1, 8 + classes, *grid])


def _shrink(layer: caffe_pb2.LayerParameter) -> None:
    for shape in layer.input_param.shape:
        shape.dim[0] = min(shape.dim[0], 2)
        while len(shape.dim) == IMAGE_AXES and max(shape.dim[2:]) > 2 * LARGEST_IMAGE:
            shape.dim[2:] = [size // 2 for size in shape.dim[2:]]


def fill_inputs(net: Net) -> None:
    """Images of normal numbers; labels 0, or two boxes of class 1; stored variances of 1.

    BatchNorm of an untrained net has a stored variance of 0: fifty layers that multiply by a hundred overflow.
    """
    random = np.random.default_rng(0)
    for layer, tops in zip(net.layers, net.tops, strict=True):
        if layer.type == "BatchNorm":
            for blob in layer.blobs[1:3]:
                blob.data[...] = 1
        if layer.type != "Input":
            continue
        for index, top in enumerate(tops):
            values = random.standard_normal(top.shape).astype(np.float32) if index == 0 else np.zeros(top.shape, "f")
            if index and top.shape[-1:] == (8,):
                values[0, 0] = [[0, 1, 0, 0.1, 0.1, 0.5, 0.6, 0], [0, 1, 1, 0.4, 0.3, 0.9, 0.8, 0]]
            net.context.backend.from_host(values, top.data)


def non_finite_blobs(net: Net) -> list[str]:
    """What is not finite after a pass: outputs and gradients of parameters."""
    found = [name for name, blob in net.outputs.items() if not np.isfinite(blob.host_data().astype("f")).all()]
    for layer in net.layers:
        for blob, learned in zip(layer.blobs, layer.propagate_to_params, strict=True):
            diff = net.context.backend.to_host(blob.diff).astype("f") if learned and blob.gradient_started else None
            if diff is not None and not math.isfinite(float(np.abs(diff).sum())):
                found.append(f"gradient of {blob.name}")
    return found
