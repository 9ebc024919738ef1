"""What the layer types of this family become in ONNX."""

from __future__ import annotations

from caffepy.layers.export_rules import ONNX, OnnxView, Values

HARD_SWISH = 14
"""The first version of the operators that has it."""


@ONNX.exports("ReLU6", form="Clip; with negative_slope also Min, Mul, Add")
def relu6(view: OnnxView) -> str:
    slope = view.param.relu_param.negative_slope
    held = view.add("Clip", view.x, view.floats(0), view.floats(6))
    if not slope:
        return held
    return view.add("Add", held, view.scaled(view.add("Min", view.x, view.floats(0)), slope))


@ONNX.exports("SeLU", "SeLu", form="Selu")
def selu(view: OnnxView) -> str:
    param = view.param.selu_param
    return view.add("Selu", view.x, alpha=param.alpha, gamma=getattr(param, "lambda"))


@ONNX.exports("Mish", form="Softplus, Tanh, Mul")
def mish(view: OnnxView) -> str:
    return view.add("Mul", view.x, view.add("Tanh", view.add("Softplus", view.x)))


@ONNX.exports("HardSwish", form="HardSwish; HardSigmoid and Mul before version 14 of the operators")
def hard_swish(view: OnnxView) -> str:
    if view.graph.opset >= HARD_SWISH:
        return view.add("HardSwish", view.x)
    return view.add("Mul", view.x, view.add("HardSigmoid", view.x, alpha=1 / 6, beta=0.5))


@ONNX.exports("NegSquare", form="Mul, Neg", composite=True)
def negative_square(view: OnnxView) -> str:
    return view.add("Neg", view.add("Mul", view.x, view.x))


@ONNX.exports("SeLUDropout", "SeLuDropout", form="nothing: the value stays")
def unchanged(view: OnnxView) -> str:
    return view.x


@ONNX.exports("DepthwiseConvolution", "ConvolutionDepthwise", form="Conv; Reshape around it where `axis` is not 1")
def depthwise_convolution(view: OnnxView) -> Values:
    return ONNX.apply("Convolution", view)
