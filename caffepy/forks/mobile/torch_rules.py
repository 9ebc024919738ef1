"""What the layer types of this family become in PyTorch."""

from __future__ import annotations

import numpy as np

from caffepy.layers.export_rules import TORCH, TorchView, Values, affine, number


@TORCH.exports("ReLU6", form="nn.ReLU6; with negative_slope clamp")
def relu6(code: TorchView) -> str:
    slope = code.param.relu_param.negative_slope
    if not slope:
        return code.apply("nn.ReLU6()")
    return f"{code.x}.clamp(0, 6) + {number(slope)} * {code.x}.clamp(max=0)"


_SELU = (1.6732632423543772, 1.0507009873554805)
"""Alpha and lambda of nn.SELU."""


@TORCH.exports("SeLU", "SeLu", form="nn.SELU; with other constants F.elu and a factor")
def selu(code: TorchView) -> str:
    param = code.param.selu_param
    constants = (param.alpha, getattr(param, "lambda"))
    if np.allclose(constants, _SELU, rtol=1e-7, atol=0):
        return code.apply("nn.SELU()")
    return affine(f"F.elu({code.x}, {number(constants[0])})", constants[1])


@TORCH.exports("Mish", form="nn.Mish")
def mish(code: TorchView) -> str:
    return code.apply("nn.Mish()")


@TORCH.exports("HardSwish", form="nn.Hardswish")
def hard_swish(code: TorchView) -> str:
    return code.apply("nn.Hardswish()")


@TORCH.exports("NegSquare", form="arithmetic")
def negative_square(code: TorchView) -> str:
    return f"-{code.x} * {code.x}"


@TORCH.exports("SeLUDropout", "SeLuDropout", form="nothing: the value stays")
def unchanged(code: TorchView) -> list[str]:
    return code.inputs


@TORCH.exports("DepthwiseConvolution", "ConvolutionDepthwise", form="nn.Conv1d, Conv2d or Conv3d")
def depthwise_convolution(code: TorchView) -> Values:
    return TORCH.apply("Convolution", code)
