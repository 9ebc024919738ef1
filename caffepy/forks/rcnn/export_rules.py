"""What the layer types of this family become in ONNX and in PyTorch."""

from __future__ import annotations

from caffepy.forks.rcnn.roi_pooling import padding_map, resize_matrix
from caffepy.layers.export_rules import ONNX, TORCH, OnnxView, TorchView, call, number


@ONNX.exports("ROIPooling", form="MaxRoiPool; pad_ratio as MatMul and Add")
def onnx_roi_pooling(view: OnnxView) -> str:
    param = view.param.roi_pooling_param
    sizes = [param.pooled_h, param.pooled_w]
    regions = view.inputs[1] if len(view.bottoms[1].shape) == 2 else view.reshaped(view.inputs[1], (-1, 5))
    if param.pad_ratio:
        matrix, shift = padding_map(param.pad_ratio)
        regions = view.add("Add", view.add("MatMul", regions, view.floats(matrix)), view.floats(shift))
    return view.add("MaxRoiPool", view.x, regions, pooled_shape=sizes, spatial_scale=param.spatial_scale)


@ONNX.exports("MaskPooling", form="Mul")
def onnx_mask_pooling(view: OnnxView) -> str:
    return view.add("Mul", view.x, view.inputs[1])


@ONNX.exports("MaskResize", form="MatMul of rows and of columns")
def mask_resize(view: OnnxView) -> str:
    view.refuse_varying(view.bottoms[0], (2, 3))
    rows, columns = map(resize_matrix, view.bottoms[0].shape[2:], view.tops[0].shape[2:])
    return view.add("MatMul", view.floats(rows), view.add("MatMul", view.x, view.floats(columns.T)))


@TORCH.exports("MaskPooling", form="*")
def torch_mask_pooling(code: TorchView) -> str:
    return f"{code.x} * {code.inputs[1]}"


@TORCH.exports("ROIPooling", form="a class")
def torch_roi_pooling(code: TorchView) -> str:
    param = code.param.roi_pooling_param
    if param.pad_ratio:
        raise code.refuse("pad_ratio")
    scale = number(param.spatial_scale)
    return code.apply(call("ROIPool", param.pooled_h, param.pooled_w, scale=scale), *code.inputs)
