"""What the layer types of this family become in ONNX."""

from __future__ import annotations

import math

import numpy as np

from caffepy.layers.export_rules import ONNX, OnnxView, Values


@ONNX.exports("Scatter", form="none: the tops are the bottoms")
def scatter(view: OnnxView) -> list[str]:
    return view.inputs


@ONNX.exports("Transpose", form="Transpose")
def transpose(view: OnnxView) -> str:
    return view.add("Transpose", view.x, perm=list(view.param.transpose_param.dim))


@ONNX.exports("Reverse", form="Slice with a step of -1")
def reverse(view: OnnxView) -> str:
    axis, least = view.axis(view.param.reverse_param.axis), np.iinfo(np.int64).min
    return view.add("Slice", view.x, *(view.ints(number) for number in (-1, least, axis, -1)))


@ONNX.exports("AutoCrop", form="Slice")
def auto_crop(view: OnnxView) -> Values:
    return ONNX.apply("Crop", view)


@ONNX.exports("Flip", form="Slice with negative steps")
def flip(view: OnnxView) -> str:
    param = view.param.flip_param
    axes = [axis for axis, wanted in ((2, param.flip_height), (3, param.flip_width)) if wanted]
    if not axes:
        return view.add("Identity", view.x)
    least = np.iinfo(np.int64).min
    ends = ([-1] * len(axes), [least] * len(axes), axes, [-1] * len(axes))
    return view.add("Slice", view.x, *(view.ints(*values) for values in ends))


@ONNX.exports("Gather", form="Gather, Reshape; nothing without gather_param")
def gather(view: OnnxView) -> str | list[str]:
    param = view.param.gather_param
    if not view.param.HasField("gather_param"):
        return list(view.inputs)
    value = view.add("Gather", view.x, view.ints(*param.indices), axis=view.axis(param.axis))
    return view.in_shape_of(value, view.tops[0]) if param.shape else value


@ONNX.exports("ShuffleChannel", form="Reshape, Transpose, Reshape")
def shuffle_channel(view: OnnxView) -> str:
    shape, group = view.bottoms[0].shape, view.param.shuffle_channel_param.group
    parts = view.reshaped(view.x, (-1, group, shape[1] // group, math.prod(shape[2:])))
    turned = view.add("Transpose", parts, perm=[0, 2, 1, 3])
    return view.in_shape_of(turned, view.tops[0])


@ONNX.exports("Reorg", form="Reshape, Transpose, Reshape")
def reorg(view: OnnxView) -> str:
    param, (_, channels, height, width) = view.param.reorg_param, view.bottoms[0].shape
    stride = param.stride
    blocks = (-1, stride, stride, channels // stride**2, height, width)
    pixels = (-1, channels // stride**2, height, stride, width, stride)
    turn = [0, 3, 4, 1, 5, 2] if param.reverse else [0, 3, 5, 1, 2, 4]
    turned = view.add("Transpose", view.reshaped(view.x, blocks if param.reverse else pixels), perm=turn)
    return view.in_shape_of(turned, view.tops[0])
