"""What the layer types of this family become in PyTorch."""

from __future__ import annotations

from caffepy.layers.export_rules import TORCH, TorchView, Values, call


@TORCH.exports("Scatter", form="nothing: the value stays")
def scatter(code: TorchView) -> list[str]:
    return code.inputs


@TORCH.exports("Transpose", form="permute")
def transpose(code: TorchView) -> str:
    return f"{code.x}.permute({', '.join(map(str, code.param.transpose_param.dim))})"


@TORCH.exports("Reverse", form="flip")
def reverse(code: TorchView) -> str:
    return f"{code.x}.flip({code.axis(code.param.reverse_param.axis)})"


@TORCH.exports("Flip", form="flip")
def flip(code: TorchView) -> str:
    param = code.param.flip_param
    axes = [axis for axis, wanted in ((2, param.flip_height), (3, param.flip_width)) if wanted]
    return f"{code.x}.flip({axes})" if axes else code.x


@TORCH.exports("AutoCrop", form="slices")
def auto_crop(code: TorchView) -> Values:
    return TORCH.apply("Crop", code)


@TORCH.exports("ShuffleChannel", form="nn.ChannelShuffle; of two axes unflatten, transpose, flatten")
def shuffle_channel(code: TorchView) -> str:
    group = code.param.shuffle_channel_param.group
    if code.rank < 3:  # which nn.ChannelShuffle refuses
        return f"{code.x}.unflatten(1, ({group}, -1)).transpose(1, 2).flatten(1)"
    return code.apply(call("nn.ChannelShuffle", group))


@TORCH.exports("Gather", form="an index")
def gather(code: TorchView) -> str | list[str]:
    param = code.param.gather_param
    if not code.param.HasField("gather_param"):
        return code.inputs
    value = f"{code.x}[{':, ' * code.axis(param.axis)}{list(param.indices)}]"
    return f"{value}.reshape({code.shape_of(code.tops[0])})" if param.shape else value


@TORCH.exports("Reorg", form="reshape, permute, reshape")
def reorg(code: TorchView) -> str:
    param, (_, channels, height, width) = code.param.reorg_param, code.bottoms[0].shape
    stride, rest = param.stride, channels // param.stride**2
    parts = (stride, stride, rest, height, width) if param.reverse else (rest, height, stride, width, stride)
    order = "0, 3, 4, 1, 5, 2" if param.reverse else "0, 3, 5, 1, 2, 4"
    split = f"{code.x}.reshape(-1, {', '.join(map(str, parts))})"
    return f"{split}.permute({order}).reshape({code.shape_of(code.tops[0])})"
