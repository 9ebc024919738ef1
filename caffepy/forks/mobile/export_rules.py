"""What the layer types of this family become in ONNX and in PyTorch."""

from __future__ import annotations

import numpy as np

from caffepy.layers.export_rules import (
    ONNX,
    TORCH,
    AnyLayer,
    OnnxLayer,
    TorchLayer,
    affine,
    exports,
    number,
)

HARD_SWISH = 14
"""The first version of ONNX's operators that has it."""
_SELU = (1.6732632423543772, 1.0507009873554805)
"""Alpha and lambda of nn.SELU."""


@ONNX.exports("ReLU6", form="Clip; with negative_slope also Min, Mul, Add")
def onnx_relu6(view: OnnxLayer) -> str:
    slope = view.param.relu_param.negative_slope
    held = view.add("Clip", view.x, 0, 6)
    return view.add("Add", held, view.scaled(view.add("Min", view.x, 0), slope)) if slope else held


@TORCH.exports("ReLU6", form="nn.ReLU6; with negative_slope clamp")
def torch_relu6(code: TorchLayer) -> str:
    slope = code.param.relu_param.negative_slope
    if not slope:
        return code.apply("nn.ReLU6()")
    return f"{code.x}.clamp(0, 6) + {number(slope)} * {code.x}.clamp(max=0)"


@exports("SeLU", "SeLu", onnx="Selu", torch="nn.SELU; with other constants F.elu and a factor")
def selu(view: AnyLayer) -> str:
    param = view.param.selu_param
    return view.add("Selu", view.x, alpha=param.alpha, gamma=getattr(param, "lambda"))


def _torch_selu(code: TorchLayer, x: str, alpha: float, gamma: float) -> str:
    if np.allclose((alpha, gamma), _SELU, rtol=1e-7, atol=0):
        return code.apply("nn.SELU()")
    return affine(f"F.elu({x}, {number(alpha)})", gamma)


TORCH.operators["Selu"] = _torch_selu


@ONNX.exports("HardSwish", form="HardSwish; HardSigmoid and Mul before version 14 of the operators")
def onnx_hard_swish(view: OnnxLayer) -> str:
    if view.target.opset >= HARD_SWISH:
        return view.add("HardSwish", view.x)
    return view.add("Mul", view.x, view.add("HardSigmoid", view.x, alpha=1 / 6, beta=0.5))


TORCH.exports("HardSwish", form="nn.Hardswish")(lambda code: code.apply("nn.Hardswish()"))

ONNX.exports("Mish", form="Softplus, Tanh, Mul")(
    lambda view: view.add("Mul", view.x, view.add("Tanh", view.add("Softplus", view.x)))
)
TORCH.exports("Mish", form="nn.Mish")(lambda code: code.apply("nn.Mish()"))

ONNX.exports("NegSquare", form="Mul, Neg", composite=True)(
    lambda view: view.add("Neg", view.add("Mul", view.x, view.x))
)
TORCH.exports("NegSquare", form="arithmetic")(lambda code: f"-{code.x} * {code.x}")

exports("SeLUDropout", "SeLuDropout", onnx="nothing: the value stays", torch="nothing: the value stays")(
    lambda view: view.inputs
)
exports(
    "DepthwiseConvolution",
    "ConvolutionDepthwise",
    onnx="Conv; Reshape around it where `axis` is not 1",
    torch="nn.Conv1d, Conv2d or Conv3d",
)(lambda view: view.as_type("Convolution"))
