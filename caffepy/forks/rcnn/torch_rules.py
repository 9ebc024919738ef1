"""What the layer types of this family become in PyTorch."""

from __future__ import annotations

from caffepy.layers.export_rules import TORCH, TorchView, call, number


@TORCH.exports("MaskPooling", form="*")
def mask_pooling(code: TorchView) -> str:
    return f"{code.x} * {code.inputs[1]}"


@TORCH.exports("ROIPooling", form="a class")
def roi_pooling(code: TorchView) -> str:
    param = code.param.roi_pooling_param
    if param.pad_ratio:
        raise code.refuse("pad_ratio")
    scale = number(param.spatial_scale)
    return code.apply(call("ROIPool", param.pooled_h, param.pooled_w, scale=scale), *code.inputs)
