"""What the layer types of this family become in ONNX and in PyTorch."""

from __future__ import annotations

import math

import numpy as np

from caffepy.layers.export_rules import ONNX, TORCH, AnyLayer, OnnxLayer, TorchLayer, call, exports

exports("Scatter", onnx="none: the tops are the bottoms", torch="nothing: the value stays")(lambda view: view.inputs)
exports("AutoCrop", onnx="Slice", torch="slices")(lambda view: view.as_type("Crop"))
exports("Transpose", onnx="Transpose", torch="permute")(
    lambda view: view.add("Transpose", view.x, perm=list(view.param.transpose_param.dim))
)
exports("Reverse", onnx="Slice with a step of -1", torch="flip")(
    lambda view: view.add("Reverse", view.x, axes=view.axis(view.param.reverse_param.axis))
)


@exports("Flip", onnx="Slice with negative steps", torch="flip")
def flip(view: AnyLayer) -> str:
    param = view.param.flip_param
    axes = [axis for axis, wanted in ((2, param.flip_height), (3, param.flip_width)) if wanted]
    return view.add("Reverse", view.x, axes=axes) if axes else view.add("Identity", view.x)


def _onnx_reverse(view: OnnxLayer, x: str, axes: int | list[int]) -> str:
    chosen = (axes,) if isinstance(axes, int) else tuple(axes)
    back, least = (-1,) * len(chosen), (np.iinfo(np.int64).min,) * len(chosen)
    return view.add("Slice", x, back, least, chosen, back)


ONNX.operators["Reverse"] = _onnx_reverse
TORCH.operators["Reverse"] = lambda code, x, axes: f"{x}.flip({axes})"


@exports("Gather", onnx="Gather, Reshape; nothing without gather_param", torch="an index")
def gather(view: AnyLayer) -> str | list[str]:
    param = view.param.gather_param
    if not view.param.HasField("gather_param"):
        return list(view.inputs)
    value = view.add("Gather", view.x, tuple(param.indices), axis=view.axis(param.axis))
    return view.in_shape_of(value, view.tops[0]) if param.shape else value


@exports("Reorg", onnx="Reshape, Transpose, Reshape", torch="reshape, permute, reshape")
def reorg(view: AnyLayer) -> str:
    param, (_, channels, height, width) = view.param.reorg_param, view.bottoms[0].shape
    stride, rest = param.stride, channels // param.stride**2
    blocks, pixels = (stride, stride, rest, height, width), (rest, height, stride, width, stride)
    turn = [0, 3, 4, 1, 5, 2] if param.reverse else [0, 3, 5, 1, 2, 4]
    parts = view.reshaped(view.x, (-1, *(blocks if param.reverse else pixels)))
    return view.in_shape_of(view.add("Transpose", parts, perm=turn), view.tops[0])


@ONNX.exports("PixelShuffle", form="DepthToSpace (CRD)")
def onnx_pixel_shuffle(view: OnnxLayer) -> str:
    return view.add("DepthToSpace", view.x, blocksize=view.param.reshape_param.pixelshuffler, mode="CRD")


@TORCH.exports("PixelShuffle", form="nn.PixelShuffle")
def torch_pixel_shuffle(code: TorchLayer) -> str:
    return code.apply(call("nn.PixelShuffle", code.param.reshape_param.pixelshuffler))


@ONNX.exports("ShuffleChannel", form="Reshape, Transpose, Reshape")
def onnx_shuffle_channel(view: OnnxLayer) -> str:
    shape, group = view.bottoms[0].shape, view.param.shuffle_channel_param.group
    parts = view.reshaped(view.x, (-1, group, shape[1] // group, math.prod(shape[2:])))
    return view.in_shape_of(view.add("Transpose", parts, perm=[0, 2, 1, 3]), view.tops[0])


@TORCH.exports("ShuffleChannel", form="nn.ChannelShuffle; of two axes unflatten, transpose, flatten")
def torch_shuffle_channel(code: TorchLayer) -> str:
    group = code.param.shuffle_channel_param.group
    if code.rank < 3:  # which nn.ChannelShuffle refuses
        return f"{code.x}.unflatten(1, ({group}, -1)).transpose(1, 2).flatten(1)"
    return code.apply(call("nn.ChannelShuffle", group))
