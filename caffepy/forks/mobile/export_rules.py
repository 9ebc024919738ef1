"""What the layer types of this family become in ONNX and in PyTorch."""

from __future__ import annotations

import numpy as np

from caffepy.layers.export_rules import ONNX, TORCH, OnnxView, TorchView, Values, affine, number

# -- ONNX ----------------------------------------------------------------------------------------------

HARD_SWISH = 14
"""The first version of the operators that has it."""


@ONNX.exports("ReLU6", form="Clip; with negative_slope also Min, Mul, Add")
def onnx_relu6(view: OnnxView) -> str:
    slope = view.param.relu_param.negative_slope
    held = view.add("Clip", view.x, view.floats(0), view.floats(6))
    if not slope:
        return held
    return view.add("Add", held, view.scaled(view.add("Min", view.x, view.floats(0)), slope))


@ONNX.exports("SeLU", "SeLu", form="Selu")
def onnx_selu(view: OnnxView) -> str:
    param = view.param.selu_param
    return view.add("Selu", view.x, alpha=param.alpha, gamma=getattr(param, "lambda"))


@ONNX.exports("Mish", form="Softplus, Tanh, Mul")
def onnx_mish(view: OnnxView) -> str:
    return view.add("Mul", view.x, view.add("Tanh", view.add("Softplus", view.x)))


@ONNX.exports("HardSwish", form="HardSwish; HardSigmoid and Mul before version 14 of the operators")
def onnx_hard_swish(view: OnnxView) -> str:
    if view.graph.opset >= HARD_SWISH:
        return view.add("HardSwish", view.x)
    return view.add("Mul", view.x, view.add("HardSigmoid", view.x, alpha=1 / 6, beta=0.5))


@ONNX.exports("NegSquare", form="Mul, Neg", composite=True)
def onnx_negative_square(view: OnnxView) -> str:
    return view.add("Neg", view.add("Mul", view.x, view.x))


@ONNX.exports("SeLUDropout", "SeLuDropout", form="nothing: the value stays")
def onnx_unchanged(view: OnnxView) -> str:
    return view.x


@ONNX.exports("DepthwiseConvolution", "ConvolutionDepthwise", form="Conv; Reshape around it where `axis` is not 1")
def onnx_depthwise_convolution(view: OnnxView) -> Values:
    return ONNX.apply("Convolution", view)


# -- PyTorch -------------------------------------------------------------------------------------------


@TORCH.exports("ReLU6", form="nn.ReLU6; with negative_slope clamp")
def torch_relu6(code: TorchView) -> str:
    slope = code.param.relu_param.negative_slope
    if not slope:
        return code.apply("nn.ReLU6()")
    return f"{code.x}.clamp(0, 6) + {number(slope)} * {code.x}.clamp(max=0)"


_SELU = (1.6732632423543772, 1.0507009873554805)
"""Alpha and lambda of nn.SELU."""


@TORCH.exports("SeLU", "SeLu", form="nn.SELU; with other constants F.elu and a factor")
def torch_selu(code: TorchView) -> str:
    param = code.param.selu_param
    constants = (param.alpha, getattr(param, "lambda"))
    if np.allclose(constants, _SELU, rtol=1e-7, atol=0):
        return code.apply("nn.SELU()")
    return affine(f"F.elu({code.x}, {number(constants[0])})", constants[1])


@TORCH.exports("Mish", form="nn.Mish")
def torch_mish(code: TorchView) -> str:
    return code.apply("nn.Mish()")


@TORCH.exports("HardSwish", form="nn.Hardswish")
def torch_hard_swish(code: TorchView) -> str:
    return code.apply("nn.Hardswish()")


@TORCH.exports("NegSquare", form="arithmetic")
def torch_negative_square(code: TorchView) -> str:
    return f"-{code.x} * {code.x}"


@TORCH.exports("SeLUDropout", "SeLuDropout", form="nothing: the value stays")
def torch_unchanged(code: TorchView) -> list[str]:
    return code.inputs


@TORCH.exports("DepthwiseConvolution", "ConvolutionDepthwise", form="nn.Conv1d, Conv2d or Conv3d")
def torch_depthwise_convolution(code: TorchView) -> Values:
    return TORCH.apply("Convolution", code)
