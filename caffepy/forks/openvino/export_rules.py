"""Rules for the layer types of this family in ONNX and in PyTorch."""

from __future__ import annotations

from caffepy.layers.export_rules import ONNX, TORCH, OnnxLayer, TorchLayer, exports, number

exports("PriorBoxClustered", onnx="a constant", torch="a class")(lambda view: view.as_type("PriorBox"))
exports("ScaleFilter", onnx="nothing: the value stays", torch="nothing: the value stays")(lambda view: view.x)


@ONNX.exports("GRN", form="Mul, ReduceSum, Add, Sqrt, Div", composite=True)
def grn(view: OnnxLayer) -> str:
    total = view.reduce("ReduceSum", view.add("Mul", view.x, view.x), (1,))
    return view.add("Div", view.x, view.add("Sqrt", view.scaled(total, 1, view.layer.eps)))


@TORCH.exports("GRN", form="arithmetic")
def torch_grn(code: TorchLayer) -> str:
    return f"{code.x} / ({code.x}.square().sum(1, keepdim=True) + {number(code.layer.eps)}).sqrt()"
