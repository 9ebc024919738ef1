"""What the layer types of this family become in PyTorch."""

from __future__ import annotations

from caffepy.layers.export_rules import TORCH, TorchView, Values, call, pair


@TORCH.exports("Interp", form="F.interpolate (bilinear, align_corners), slices")
def interp(code: TorchView) -> str:
    param, value = code.param.interp_param, code.x
    begin, end = (abs(pad) for pad in (param.pad_beg, param.pad_end))
    if begin or end:
        height, width = code.bottoms[0].shape[2:]
        value = f"{value}[:, :, {begin}:{height - end}, {begin}:{width - end}]"
    size = code.tops[0].shape[2:]
    return f'F.interpolate({value}, size={size}, mode="bilinear", align_corners=True)'


@TORCH.exports("Upsample", form="nn.Upsample (nearest); a class with a mask")
def upsample(code: TorchView) -> str:
    size = code.tops[0].shape[2:]
    if len(code.inputs) > 1:
        return code.apply(call("Unpool", *size), *code.inputs)
    factors = [out // own for out, own in zip(size, code.bottoms[0].shape[2:], strict=True)]
    return code.apply(call("nn.Upsample", scale_factor=pair(factors)))


@TORCH.exports("BN", form="nn.BatchNorm1d, BatchNorm2d or BatchNorm3d, together with a Scale behind it")
def normalised(code: TorchView) -> Values:
    return TORCH.apply("BatchNorm", code)
