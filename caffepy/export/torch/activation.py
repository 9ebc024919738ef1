"""Layers that map each element by itself."""

from __future__ import annotations

import math

import numpy as np

from caffepy.export.torch.code import LayerCode, exports
from caffepy.layers.export_rules import affine, call, number


@exports("ReLU", form="nn.ReLU; nn.LeakyReLU with negative_slope")
def relu(code: LayerCode) -> str:
    slope = code.param.relu_param.negative_slope
    return code.apply(call("nn.LeakyReLU", number(slope)) if slope else "nn.ReLU()")


@exports("PReLU", form="nn.PReLU")
def prelu(code: LayerCode) -> str:
    slopes = code.weights(0).reshape(-1)
    return code.apply(call("nn.PReLU", len(slopes)), weight=slopes)


@exports("ELU", form="nn.ELU, with NVIDIA's lambda as a factor")
def elu(code: LayerCode) -> str:
    param = code.param.elu_param
    return affine(code.apply(call("nn.ELU", number(param.alpha))), getattr(param, "lambda"))


@exports("Sigmoid", form="nn.Sigmoid")
def sigmoid(code: LayerCode) -> str:
    return code.apply("nn.Sigmoid()")


@exports("TanH", form="nn.Tanh")
def tanh(code: LayerCode) -> str:
    return code.apply("nn.Tanh()")


@exports("BNLL", form="nn.Softplus")
def bnll(code: LayerCode) -> str:
    return code.apply("nn.Softplus()")


@exports("Swish", form="nn.SiLU; with another beta torch.sigmoid")
def swish(code: LayerCode) -> str:
    beta = code.param.swish_param.beta
    return code.apply("nn.SiLU()") if beta == 1 else f"{code.x} * torch.sigmoid({affine(code.x, beta)})"


@exports("AbsVal", form="abs")
def absval(code: LayerCode) -> str:
    return f"{code.x}.abs()"


@exports("Clip", form="clamp")
def clip(code: LayerCode) -> str:
    param = code.param.clip_param
    return f"{code.x}.clamp({number(param.min)}, {number(param.max)})"


@exports("Threshold", form="a comparison")
def threshold(code: LayerCode) -> str:
    return f"({code.x} > {number(code.param.threshold_param.threshold)}).to({code.x}.dtype)"


@exports("Power", form="arithmetic")
def power(code: LayerCode) -> str:
    param = code.param.power_param
    if param.power == 0 or param.scale == 0:
        value = np.power(np.float64(param.shift), param.power)
        return f"torch.full_like({code.x}, {number(float(value))})"
    base = affine(code.x, param.scale, param.shift)
    if param.power == 1:
        return base
    base = base if base == code.x else f"({base})"
    return f"{base} ** {number(param.power)}"


@exports("Exp", form="torch.exp")
def exponential(code: LayerCode) -> str:
    param = code.param.exp_param
    log_base = 1.0 if param.base == -1 else math.log(param.base)
    return f"torch.exp({affine(code.x, log_base * param.scale, log_base * param.shift)})"


@exports("Log", form="torch.log")
def logarithm(code: LayerCode) -> str:
    param = code.param.log_param
    log_base = 1.0 if param.base == -1 else math.log(param.base)
    return affine(f"torch.log({affine(code.x, param.scale, param.shift)})", 1 / log_base)


@exports("Dropout", form="nn.Dropout; with scale_train: false a factor")
def dropout(code: LayerCode) -> str:
    param = code.param.dropout_param
    if param.sample_weights_test:
        raise code.refuse("sample_weights_test, which draws random numbers,")
    if param.scale_train:
        return code.apply(call("nn.Dropout", number(param.dropout_ratio)))
    return affine(code.x, 1 - param.dropout_ratio)


@exports("Split", form="nothing: the value stays")
def unchanged(code: LayerCode) -> list[str]:
    return [code.x] * len(code.tops)


@exports("Silence", form="nothing")
def silence(code: LayerCode) -> None:
    return None
