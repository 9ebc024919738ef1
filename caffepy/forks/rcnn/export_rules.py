"""What the layer types of this family become in ONNX and in PyTorch."""

from __future__ import annotations

from caffepy.forks.rcnn.roi_pooling import padding_map, resize_matrix
from caffepy.layers.export_rules import ONNX, TORCH, OnnxLayer, TorchLayer, call, exports, number


@ONNX.exports("ROIPooling", form="MaxRoiPool; pad_ratio as MatMul and Add")
def onnx_roi_pooling(view: OnnxLayer) -> str:
    param = view.param.roi_pooling_param
    sizes = [param.pooled_h, param.pooled_w]
    regions = view.inputs[1] if len(view.bottoms[1].shape) == 2 else view.reshaped(view.inputs[1], (-1, 5))
    if param.pad_ratio:
        matrix, shift = padding_map(param.pad_ratio)
        regions = view.add("Add", view.add("MatMul", regions, view.floats(matrix)), view.floats(shift))
    return view.add("MaxRoiPool", view.x, regions, pooled_shape=sizes, spatial_scale=param.spatial_scale)


exports("MaskPooling", onnx="Mul", torch="*")(lambda view: view.add("Mul", view.x, view.inputs[1]))


@ONNX.exports("MaskResize", form="MatMul of rows and of columns")
def mask_resize(view: OnnxLayer) -> str:
    view.refuse_varying(view.bottoms[0], (2, 3))
    rows, columns = map(resize_matrix, view.bottoms[0].shape[2:], view.tops[0].shape[2:])
    return view.add("MatMul", view.floats(rows), view.add("MatMul", view.x, view.floats(columns.T)))


@TORCH.exports("ROIPooling", form="a class")
def torch_roi_pooling(code: TorchLayer) -> str:
    param = code.param.roi_pooling_param
    if param.pad_ratio:
        code.needs_onnx("pad_ratio")
    scale = number(param.spatial_scale)
    return code.apply(call("ROIPool", param.pooled_h, param.pooled_w, scale=scale), *code.inputs)
