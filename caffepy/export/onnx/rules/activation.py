"""Layers that map each element by itself."""

from __future__ import annotations

import math

import numpy as np
from onnx import TensorProto

from caffepy.export.onnx.graph import LayerView, exports


@exports("ReLU", form="Relu; LeakyRelu with negative_slope")
def relu(view: LayerView) -> str:
    slope = view.param.relu_param.negative_slope
    return view.add("LeakyRelu", view.x, alpha=slope) if slope else view.add("Relu", view.x)


@exports("PReLU", form="PRelu")
def prelu(view: LayerView) -> str:
    shape = (1,) if not view.layer.blobs[0].shape else (-1, *(1,) * (len(view.bottoms[0].shape) - 2))
    return view.add("PRelu", view.x, view.parameter(0, shape))


@exports("ELU", form="Elu; with NVIDIA's lambda also Mul")
def elu(view: LayerView) -> str:
    param = view.param.elu_param
    return view.scaled(view.add("Elu", view.x, alpha=param.alpha), getattr(param, "lambda"))


@exports("Sigmoid", form="Sigmoid")
def sigmoid(view: LayerView) -> str:
    return view.add("Sigmoid", view.x)


@exports("TanH", form="Tanh")
def tanh(view: LayerView) -> str:
    return view.add("Tanh", view.x)


@exports("AbsVal", form="Abs")
def absval(view: LayerView) -> str:
    return view.add("Abs", view.x)


@exports("BNLL", form="Softplus")
def bnll(view: LayerView) -> str:
    return view.add("Softplus", view.x)


@exports("Clip", form="Clip")
def clip(view: LayerView) -> str:
    param = view.param.clip_param
    return view.add("Clip", view.x, view.floats(param.min), view.floats(param.max))


@exports("Swish", form="Sigmoid, Mul")
def swish(view: LayerView) -> str:
    gate = view.add("Sigmoid", view.scaled(view.x, view.param.swish_param.beta))
    return view.add("Mul", view.x, gate)


@exports("Threshold", form="Greater, Cast")
def threshold(view: LayerView) -> str:
    above = view.add("Greater", view.x, view.floats(view.param.threshold_param.threshold))
    return view.add("Cast", above, to=TensorProto.FLOAT)


@exports("Power", form="Mul, Add, Pow, as far as they are needed")
def power(view: LayerView) -> str:
    param = view.param.power_param
    if param.power == 0 or param.scale == 0:
        value = np.power(np.float64(param.shift), param.power).astype(np.float32)
        return view.add("Expand", view.floats(value), view.add("Shape", view.x))
    base = view.scaled(view.x, param.scale, param.shift)
    if param.power == 1:
        return base if base != view.x else view.add("Identity", view.x)
    return view.add("Mul", base, base) if param.power == 2 else view.add("Pow", base, view.floats(param.power))


@exports("Exp", form="Mul, Exp, Mul, as far as they are needed")
def exponential(view: LayerView) -> str:
    param = view.param.exp_param
    log_base = 1.0 if param.base == -1 else math.log(param.base)
    return view.scaled(view.add("Exp", view.scaled(view.x, log_base * param.scale)), math.exp(log_base * param.shift))


@exports("Log", form="Mul, Add, Log, Mul, as far as they are needed")
def logarithm(view: LayerView) -> str:
    param = view.param.log_param
    log_base = 1.0 if param.base == -1 else math.log(param.base)
    return view.scaled(view.add("Log", view.scaled(view.x, param.scale, param.shift)), 1 / log_base)


@exports("Split", form="nothing: the value stays")
def unchanged(view: LayerView) -> list[str]:
    return [view.x] * len(view.tops)


@exports("Dropout", form="nothing, or Mul with scale_train: false")
def dropout(view: LayerView) -> str:
    param = view.param.dropout_param
    if param.sample_weights_test:
        raise view.error("sample_weights_test draws random numbers, which cannot be exported; set it to false")
    return view.x if param.scale_train else view.scaled(view.x, 1 - param.dropout_ratio)


@exports("Silence", form="nothing")
def silence(view: LayerView) -> None:
    return None
