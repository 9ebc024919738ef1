"""Formulas of MS-CNN and Cascade R-CNN as loops over plain numbers, and nets of one of their layers."""

from __future__ import annotations

import math
from typing import Any

from google.protobuf import text_format
from layer_harness import backend_named

from caffepy.formats.proto import caffe_pb2
from caffepy.layers import LayerContext
from caffepy.net.net import Net


def iou(a: Any, b: Any, least: float = 0.0) -> float:
    """Overlap of x, y, width, height; an intersection with a side of `least` or less does not count."""
    width = min(a[0] + a[2], b[0] + b[2]) - max(a[0], b[0])
    height = min(a[1] + a[3], b[1] + b[3]) - max(a[1], b[1])
    if min(a[2], a[3], b[2], b[3]) <= 0 or width <= least or height <= least:
        return 0.0
    return float(width * height / (a[2] * a[3] + b[2] * b[3] - width * height))


def decoded(
    values: Any,
    at: tuple[int, int],
    field: tuple[int, int],
    stride: int,
    limits: tuple[float, float],
    mean: Any = (0, 0, 0, 0),
    std: Any = (1, 1, 1, 1),
) -> list[float]:
    """x, y, width, height of the box that four values predict at (row, column); limits are field_xyr, field_whr."""
    x, y, w, h = (float(v) * s + m for v, s, m in zip(values, std, mean, strict=True))
    x, y = (min(max(v, -1 / limits[0]), 1 / limits[0]) for v in (x, y))
    w, h = (min(max(v, -math.log(limits[1])), math.log(limits[1])) for v in (w, h))
    width, height = field[0] * math.exp(w), field[1] * math.exp(h)
    left = x * field[0] + (at[1] + 0.5) * stride - width / 2
    return [left, y * field[1] + (at[0] + 0.5) * stride - height / 2, width, height]


def run(
    text: str, inputs: list[Any], tops: int = 1, phase: int = caffe_pb2.TEST, backend: str = "cpu", seed: int = 1
) -> list[Any]:
    """The tops of a layer in a net of its own."""
    device = backend_named(backend)
    param = text_format.Parse(text, caffe_pb2.LayerParameter(name="L"))
    net = caffe_pb2.NetParameter()
    for index, value in enumerate(inputs):
        layer = net.layer.add(name=f"b{index}", type="Input", top=[f"b{index}"])
        layer.input_param.shape.add(dim=value.shape)
        param.bottom.append(f"b{index}")
    param.top.extend(f"t{index}" for index in range(tops))
    net.layer.append(param)
    with device.activate():
        made = Net(net, LayerContext(device, phase, seed=seed))
        for index, value in enumerate(inputs):
            device.from_host(value, made.blobs[f"b{index}"].data)
        made.forward()
        made.raise_device_errors()
        return [made.blobs[f"t{index}"].host_data() for index in range(tops)]
