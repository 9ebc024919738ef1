"""What layer types of Caffe become in ONNX and in PyTorch alike, one function a type.

Operators have ONNX's names; `onnx/rules.py` and `torch/rules.py` say how others are written, and have the rules of the
types whose two forms have no operators in common.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from caffepy.formats.proto import caffe_pb2
from caffepy.layers.convolution import beyond_padding
from caffepy.layers.export_rules import FLOAT, INT64, AnyLayer, Values, exports
from caffepy.layers.inner_product import LEAST_SQUARE

# -- one operator, or nothing --------------------------------------------------------------------------

_SAME = "nothing: the value stays"

exports("AbsVal", onnx="Abs", torch="abs")(lambda view: view.add("Abs", view.x))
exports("BNLL", onnx="Softplus", torch="nn.Softplus")(lambda view: view.add("Softplus", view.x))
exports("Reshape", onnx="Reshape", torch="reshape")(lambda view: view.in_shape_of(view.x, view.tops[0]))
exports("Sigmoid", onnx="Sigmoid", torch="nn.Sigmoid")(lambda view: view.add("Sigmoid", view.x))
exports("Silence", onnx="nothing", torch="nothing")(lambda view: None)
exports("Split", onnx=_SAME, torch=_SAME)(lambda view: [view.x] * len(view.tops))
exports("TanH", onnx="Tanh", torch="nn.Tanh")(lambda view: view.add("Tanh", view.x))
exports("Softmax", onnx="Softmax", torch="nn.Softmax")(
    lambda view: view.add("Softmax", view.x, axis=view.axis(view.param.softmax_param.axis))
)
exports("Swish", onnx="Sigmoid, Mul", torch="nn.SiLU; with another beta torch.sigmoid")(
    lambda view: view.add("Swish", view.x, beta=view.param.swish_param.beta)
)
exports("Threshold", onnx="Greater, Cast", torch="a comparison")(
    lambda view: view.add("Cast", view.add("Greater", view.x, view.param.threshold_param.threshold), to=FLOAT)
)
exports("BatchReindex", onnx="Cast, Gather", torch="an index")(
    lambda view: view.add("Gather", view.x, view.add("Cast", view.inputs[1], to=INT64), axis=0)
)
exports("Clip", onnx="Clip", torch="clamp")(
    lambda view: view.add("Clip", view.x, view.param.clip_param.min, view.param.clip_param.max)
)
exports("Flatten", onnx="Reshape", torch="flatten")(lambda view: view.add("Flattened", view.x))

# -- functions of each element -------------------------------------------------------------------------


@exports("ReLU", onnx="Relu; LeakyRelu with negative_slope", torch="nn.ReLU; nn.LeakyReLU with negative_slope")
def relu(view: AnyLayer) -> str:
    slope = view.param.relu_param.negative_slope
    return view.add("LeakyRelu", view.x, alpha=slope) if slope else view.add("Relu", view.x)


@exports("ELU", onnx="Elu; with NVIDIA's lambda also Mul", torch="nn.ELU, with NVIDIA's lambda as a factor")
def elu(view: AnyLayer) -> str:
    param = view.param.elu_param
    return view.scaled(view.add("Elu", view.x, alpha=param.alpha), getattr(param, "lambda"))


@exports("Power", onnx="Mul, Add, Pow, as far as they are needed", torch="arithmetic")
def power(view: AnyLayer) -> str:
    param = view.param.power_param
    if param.power == 0 or param.scale == 0:
        return view.add("Full", view.x, value=float(np.power(np.float64(param.shift), param.power)))
    base = view.scaled(view.x, param.scale, param.shift)
    if param.power == 1:
        return base if base != view.x else view.add("Identity", view.x)
    return view.add("Power", base, power=param.power)


@exports("Exp", onnx="Mul, Exp, Mul, as far as they are needed", torch="torch.exp")
def exponential(view: AnyLayer) -> str:
    param = view.param.exp_param
    log_base = 1.0 if param.base == -1 else math.log(param.base)
    return view.add("Exponential", view.x, factor=log_base * param.scale, term=log_base * param.shift)


@exports("Log", onnx="Mul, Add, Log, Mul, as far as they are needed", torch="torch.log")
def logarithm(view: AnyLayer) -> str:
    param = view.param.log_param
    log_base = 1.0 if param.base == -1 else math.log(param.base)
    return view.scaled(view.add("Log", view.scaled(view.x, param.scale, param.shift)), 1 / log_base)


@exports(
    "Dropout",
    onnx="nothing, or Mul with scale_train: false",
    torch="nn.Dropout; with scale_train: false a factor",
)
def dropout(view: AnyLayer) -> str:
    param = view.param.dropout_param
    if param.sample_weights_test:
        raise view.error("sample_weights_test draws random numbers, which cannot be exported; set it to false")
    if param.scale_train:
        return view.add("Dropout", view.x, ratio=param.dropout_ratio)
    return view.scaled(view.x, 1 - param.dropout_ratio)


# -- elements moved, joined, cut and reduced -----------------------------------------------------------

_Eltwise, _Reduction = caffe_pb2.EltwiseParameter, caffe_pb2.ReductionParameter


@exports("Concat", onnx="Concat; with per_fla_fuse Reshape, Concat", torch="torch.cat")
def concat(view: AnyLayer) -> str:
    param = view.param.concat_param
    if param.per_fla_fuse:
        view.needs_onnx("per_fla_fuse")
        return view.joined([view.reshaped(value, (0, -1, *(1,) * (view.rank - 2))) for value in view.inputs], 1)
    return view.joined(view.inputs, view.axis(param.concat_dim if param.HasField("concat_dim") else param.axis))


@exports("Slice", onnx="Split", torch="split")
def cut(view: AnyLayer) -> Values:
    param = view.param.slice_param
    axis = view.axis(param.slice_dim if param.HasField("slice_dim") else param.axis)
    return view.x if len(view.tops) == 1 else view.split([top.shape[axis] for top in view.tops], axis)


@exports("Eltwise", onnx="Add, Mul or Max; coefficients as Mul", torch="+, * or torch.maximum")
def eltwise(view: AnyLayer) -> str:
    param = view.param.eltwise_param
    if param.operation == _Eltwise.MAX:
        return view.add("Max", *view.inputs)
    operator, terms = "Mul", view.inputs
    if param.operation == _Eltwise.SUM:
        factors = list(param.coeff) or [1.0] * len(view.inputs)
        operator, terms = "Add", [view.scaled(value, factor) for value, factor in zip(terms, factors, strict=True)]
    value = terms[0]
    for term in terms[1:]:
        value = view.add(operator, value, term)
    return value


@exports("Permute", onnx="Transpose", torch="permute")
def permute(view: AnyLayer) -> str:
    order = list(view.param.permute_param.order)
    return view.add("Transpose", view.x, perm=order + [axis for axis in range(view.rank) if axis not in order])


@exports("Crop", onnx="Slice", torch="slices")
def crop(view: AnyLayer) -> str:
    param, axes = view.param.crop_param, range(view.axis(view.param.crop_param.axis), view.rank)
    offsets = list(param.offset) or [0]
    begins = offsets if len(offsets) > 1 else offsets * len(axes)
    ends = [begin + view.tops[0].shape[axis] for begin, axis in zip(begins, axes, strict=True)]
    return view.add("Part", view.x, begins=begins, ends=ends, axes=axes)


@exports("Tile", onnx="Tile", torch="repeat")
def tile(view: AnyLayer) -> str:
    param, repeats = view.param.tile_param, [1] * view.rank
    repeats[view.axis(param.axis)] = param.tiles
    return view.add("Tile", view.x, tuple(repeats))


@exports("Reduction", onnx="ReduceSum, ReduceMean, ReduceL1 or ReduceSumSquare; Mul with coeff", torch="sum or mean")
def reduction(view: AnyLayer) -> str:
    param = view.param.reduction_param
    kinds = {_Reduction.SUM: "ReduceSum", _Reduction.MEAN: "ReduceMean", _Reduction.ASUM: "ReduceL1"}
    kind = kinds.get(param.operation, "ReduceSumSquare")
    return view.scaled(view.add("Reduction", view.x, kind=kind, first=view.axis(param.axis)), param.coeff)


# -- normalization -------------------------------------------------------------------------------------

LEAST_EPS = 1.1754943508222875e-38
"""FLT_MIN, the least eps of Normalize."""


@exports(
    "LRN",
    onnx="LRN; WITHIN_CHANNEL as AveragePool of squares, Mul, Add, Pow",
    torch="nn.LocalResponseNorm; a class for WITHIN_CHANNEL",
)
def local_response(view: AnyLayer) -> str:
    param = view.param.lrn_param
    settings = {"size": param.local_size, "alpha": param.alpha, "beta": param.beta}
    if param.norm_region == caffe_pb2.LRNParameter.ACROSS_CHANNELS:
        return view.add("LRN", view.x, **settings, bias=param.k)
    return view.add("LocalResponse", view.x, **settings)


def axes_behind(view: AnyLayer, own: int) -> int:
    """How many axes the first bottom has behind the ones that Scale or Bias takes an operand of `own` axes along."""
    return view.rank - view.layer.axis - own if own else 0


@exports(
    "Scale",
    onnx="Mul, Add; Unsqueeze of a second bottom",
    torch="a class, or a part of the BatchNorm before it; * of two bottoms",
)
def scale(view: AnyLayer) -> str:
    if len(view.bottoms) == 1:
        return view.add("Scale", view.x)
    product = view.add("Mul", view.x, _second(view))
    return view.add("Bias", product) if view.param.scale_param.bias_term else product


@exports("Bias", onnx="Add; Unsqueeze of a second bottom", torch="a class; + of two bottoms")
def bias(view: AnyLayer) -> str:
    return view.add("Bias", view.x) if len(view.bottoms) == 1 else view.add("Add", view.x, _second(view))


def _second(view: AnyLayer) -> str:
    """The second bottom with axes of size 1 behind its own."""
    own = len(view.bottoms[1].shape)
    count = axes_behind(view, own)
    return view.add("Behind", view.inputs[1], own=own, count=count) if count else view.inputs[1]


@exports("MVN", onnx="ReduceMean, Sub, Mul, Sqrt, Add, Div", torch="a class", composite=True)
def mean_variance(view: AnyLayer) -> str:
    param = view.param.mvn_param
    value = view.x if view.rank == 4 else view.in_shape_of(view.x, view.tops[0])
    axes = (1, 2, 3) if param.across_channels else (2, 3)
    return view.add("MeanVariance", value, axes=axes, eps=param.eps, scale=param.normalize_variance)


# -- convolution, InnerProduct and pooling -------------------------------------------------------------


def read_beyond_padding(view: AnyLayer) -> tuple[int, ...]:
    """How many zeros behind its padding each spatial axis of a Convolution or Im2col has."""
    axis = view.layer.axis + 1
    return beyond_padding(view.layer.geometry, view.bottoms[0].shape[axis:], view.tops[0].shape[axis:])


@exports(
    "InnerProduct", onnx="Flatten, Gemm; Reshape, MatMul, Add where `axis` is not 1", torch="nn.Linear, behind flatten"
)
def inner_product(view: AnyLayer) -> str:
    param, weights = view.param.inner_product_param, view.weights(0)
    if param.normalize:
        squares = np.square(weights, dtype=np.float64).sum(0 if param.transpose else 1, keepdims=True)
        weights = (weights / np.sqrt(squares + LEAST_SQUARE)).astype(np.float32)
    return view.add("Linear", view.x, weights=weights, axis=view.axis(param.axis))


@exports(
    "SPP",
    onnx="MaxPool or AveragePool of each level, Flatten, Concat",
    torch="nn.MaxPool2d or nn.AvgPool2d of each level, torch.cat",
)
def spatial_pyramid(view: AnyLayer) -> str:
    levels = [replace(view, layer=level, tops=[top]).as_type("Pooling") for level, top in view.layer.levels]
    values = [str(value) for value in levels]
    return values[0] if len(values) == 1 else view.joined([view.add("Flatten", value, axis=1) for value in values], 1)
