"""What the layer types of this family become in ONNX and in PyTorch."""

from __future__ import annotations

import math

import numpy as np

from caffepy.layers.export_rules import ONNX, TORCH, OnnxView, TorchView, Values, call

# -- ONNX ----------------------------------------------------------------------------------------------


@ONNX.exports("Scatter", form="none: the tops are the bottoms")
def onnx_scatter(view: OnnxView) -> list[str]:
    return view.inputs


@ONNX.exports("Transpose", form="Transpose")
def onnx_transpose(view: OnnxView) -> str:
    return view.add("Transpose", view.x, perm=list(view.param.transpose_param.dim))


@ONNX.exports("Reverse", form="Slice with a step of -1")
def onnx_reverse(view: OnnxView) -> str:
    axis, least = view.axis(view.param.reverse_param.axis), np.iinfo(np.int64).min
    return view.add("Slice", view.x, *(view.ints(number) for number in (-1, least, axis, -1)))


@ONNX.exports("AutoCrop", form="Slice")
def onnx_auto_crop(view: OnnxView) -> Values:
    return ONNX.apply("Crop", view)


@ONNX.exports("Flip", form="Slice with negative steps")
def onnx_flip(view: OnnxView) -> str:
    param = view.param.flip_param
    axes = [axis for axis, wanted in ((2, param.flip_height), (3, param.flip_width)) if wanted]
    if not axes:
        return view.add("Identity", view.x)
    least = np.iinfo(np.int64).min
    ends = ([-1] * len(axes), [least] * len(axes), axes, [-1] * len(axes))
    return view.add("Slice", view.x, *(view.ints(*values) for values in ends))


@ONNX.exports("Gather", form="Gather, Reshape; nothing without gather_param")
def onnx_gather(view: OnnxView) -> str | list[str]:
    param = view.param.gather_param
    if not view.param.HasField("gather_param"):
        return list(view.inputs)
    value = view.add("Gather", view.x, view.ints(*param.indices), axis=view.axis(param.axis))
    return view.in_shape_of(value, view.tops[0]) if param.shape else value


@ONNX.exports("ShuffleChannel", form="Reshape, Transpose, Reshape")
def onnx_shuffle_channel(view: OnnxView) -> str:
    shape, group = view.bottoms[0].shape, view.param.shuffle_channel_param.group
    parts = view.reshaped(view.x, (-1, group, shape[1] // group, math.prod(shape[2:])))
    turned = view.add("Transpose", parts, perm=[0, 2, 1, 3])
    return view.in_shape_of(turned, view.tops[0])


@ONNX.exports("Reorg", form="Reshape, Transpose, Reshape")
def onnx_reorg(view: OnnxView) -> str:
    param, (_, channels, height, width) = view.param.reorg_param, view.bottoms[0].shape
    stride = param.stride
    blocks = (-1, stride, stride, channels // stride**2, height, width)
    pixels = (-1, channels // stride**2, height, stride, width, stride)
    turn = [0, 3, 4, 1, 5, 2] if param.reverse else [0, 3, 5, 1, 2, 4]
    turned = view.add("Transpose", view.reshaped(view.x, blocks if param.reverse else pixels), perm=turn)
    return view.in_shape_of(turned, view.tops[0])


# -- PyTorch -------------------------------------------------------------------------------------------


@TORCH.exports("Scatter", form="nothing: the value stays")
def torch_scatter(code: TorchView) -> list[str]:
    return code.inputs


@TORCH.exports("Transpose", form="permute")
def torch_transpose(code: TorchView) -> str:
    return f"{code.x}.permute({', '.join(map(str, code.param.transpose_param.dim))})"


@TORCH.exports("Reverse", form="flip")
def torch_reverse(code: TorchView) -> str:
    return f"{code.x}.flip({code.axis(code.param.reverse_param.axis)})"


@TORCH.exports("Flip", form="flip")
def torch_flip(code: TorchView) -> str:
    param = code.param.flip_param
    axes = [axis for axis, wanted in ((2, param.flip_height), (3, param.flip_width)) if wanted]
    return f"{code.x}.flip({axes})" if axes else code.x


@TORCH.exports("AutoCrop", form="slices")
def torch_auto_crop(code: TorchView) -> Values:
    return TORCH.apply("Crop", code)


@TORCH.exports("ShuffleChannel", form="nn.ChannelShuffle; of two axes unflatten, transpose, flatten")
def torch_shuffle_channel(code: TorchView) -> str:
    group = code.param.shuffle_channel_param.group
    if code.rank < 3:  # which nn.ChannelShuffle refuses
        return f"{code.x}.unflatten(1, ({group}, -1)).transpose(1, 2).flatten(1)"
    return code.apply(call("nn.ChannelShuffle", group))


@TORCH.exports("Gather", form="an index")
def torch_gather(code: TorchView) -> str | list[str]:
    param = code.param.gather_param
    if not code.param.HasField("gather_param"):
        return code.inputs
    value = f"{code.x}[{':, ' * code.axis(param.axis)}{list(param.indices)}]"
    return f"{value}.reshape({code.shape_of(code.tops[0])})" if param.shape else value


@TORCH.exports("Reorg", form="reshape, permute, reshape")
def torch_reorg(code: TorchView) -> str:
    param, (_, channels, height, width) = code.param.reorg_param, code.bottoms[0].shape
    stride, rest = param.stride, channels // param.stride**2
    parts = (stride, stride, rest, height, width) if param.reverse else (rest, height, stride, width, stride)
    order = "0, 3, 4, 1, 5, 2" if param.reverse else "0, 3, 5, 1, 2, 4"
    split = f"{code.x}.reshape(-1, {', '.join(map(str, parts))})"
    return f"{split}.permute({order}).reshape({code.shape_of(code.tops[0])})"
