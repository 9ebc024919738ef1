"""What each layer type of Caffe becomes in PyTorch, one function a type.

Layers for which PyTorch has no module, such as LSTM, RNN, and SSD's priors and output, become classes of `modules.py`,
which are copied into the text.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.export.torch.code import LayerCode, exports
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.batch_norm import BatchNormLayer
from caffepy.layers.convolution import BaseConvolutionLayer, beyond_padding
from caffepy.layers.detection.prior_box import PriorBoxLayer
from caffepy.layers.export_rules import affine, call, number, numbers, pair
from caffepy.layers.inner_product import LEAST_SQUARE
from caffepy.layers.pooling import PoolingLayer, SPPLayer
from caffepy.layers.scale import BroadcastLayer

# -- activations and other functions of each element ---------------------------------------------------


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


# -- SSD's priors and output ---------------------------------------------------------------------------


@exports("PriorBox", form="a class")
def prior_box(code: LayerCode) -> str:
    layer, param = code.layer, code.param.prior_box_param
    assert isinstance(layer, PriorBoxLayer)
    if param.denser_prior_boxes:
        raise code.refuse("denser_prior_boxes")
    settings = {
        "max_sizes": tuple(map(int, param.max_size)) or None,
        "ratios": numbers([float(ratio) for ratio in layer.ratios]) if layer.ratios else None,
        "step": numbers(layer.step_size) if layer.step_size else None,
        "image": numbers(layer.image_size) if layer.image_size else None,
        "offset": None if param.offset == 0.5 else number(param.offset),
        "clip": True if param.clip else None,
        "variances": numbers(layer.variances),
    }
    return code.apply(call("PriorBox", tuple(map(int, param.min_size)), **settings), *code.inputs)


@exports("DetectionOutput", form="a class")
def detection_output(code: LayerCode) -> str:
    param = code.param.detection_output_param
    if param.HasField("use_polygon"):
        raise code.refuse("use_polygon")
    nms = param.nms_param
    code_type = caffe_pb2.PriorBoxParameter.CodeType.Name(param.code_type)
    settings = {
        "background": param.background_label_id or None,
        "threshold": number(nms.nms_threshold),
        "top_k": nms.top_k if nms.HasField("top_k") else None,
        "keep_top_k": None if param.keep_top_k < 0 else param.keep_top_k,
        "min_score": number(param.confidence_threshold) if param.HasField("confidence_threshold") else None,
        "eta": None if nms.eta == 1 else number(nms.eta),
        "code": None if code_type == "CENTER_SIZE" else f'"{code_type}"',
        "share_location": None if param.share_location else False,
        "variance_encoded": True if param.variance_encoded_in_target else None,
    }
    return code.apply(call("DetectionOutput", param.num_classes, **settings), *code.inputs[:3])


# -- elements moved, joined, cut and reduced -----------------------------------------------------------

_Eltwise, _Reduction = caffe_pb2.EltwiseParameter, caffe_pb2.ReductionParameter


@exports("Concat", form="torch.cat")
def concat(code: LayerCode) -> str:
    param = code.param.concat_param
    if param.per_fla_fuse:
        raise code.refuse("per_fla_fuse")
    axis = code.axis(param.concat_dim if param.HasField("concat_dim") else param.axis)
    return f"torch.cat([{', '.join(code.inputs)}], dim={axis})"


@exports("Slice", form="split")
def cut(code: LayerCode) -> str:
    param = code.param.slice_param
    axis = code.axis(param.slice_dim if param.HasField("slice_dim") else param.axis)
    if len(code.tops) == 1:
        return code.x
    return f"{code.x}.split({[top.shape[axis] for top in code.tops]}, dim={axis})"


@exports("Eltwise", form="+, * or torch.maximum")
def eltwise(code: LayerCode) -> str:
    param = code.param.eltwise_param
    if param.operation == _Eltwise.MAX:
        value = code.x
        for other in code.inputs[1:]:
            value = f"torch.maximum({value}, {other})"
        return value
    if param.operation == _Eltwise.PROD:
        return " * ".join(code.inputs)
    factors = list(param.coeff) or [1.0] * len(code.inputs)
    terms = [
        name if factor == 1 else f"{number(factor)} * {name}" for name, factor in zip(code.inputs, factors, strict=True)
    ]
    return " + ".join(terms).replace("+ -1.0 * ", "- ")


@exports("Flatten", form="flatten")
def flatten(code: LayerCode) -> str:
    param = code.param.flatten_param
    first, last = code.axis(param.axis), code.axis(param.end_axis)
    return f"{code.x}.flatten({first})" if last == code.rank - 1 else f"{code.x}.flatten({first}, {last})"


@exports("Reshape", form="reshape")
def reshape(code: LayerCode) -> str:
    return f"{code.x}.reshape({code.shape_of(code.tops[0])})"


@exports("Permute", form="permute")
def permute(code: LayerCode) -> str:
    order = list(code.param.permute_param.order)
    order += [axis for axis in range(code.rank) if axis not in order]
    return f"{code.x}.permute({', '.join(map(str, order))})"


@exports("Crop", form="slices")
def crop(code: LayerCode) -> str:
    param, shape = code.param.crop_param, code.tops[0].shape
    first = code.axis(param.axis)
    offsets = list(param.offset) or [0]
    offsets = offsets if len(offsets) > 1 else offsets * (code.rank - first)
    parts = [f"{begin}:{begin + shape[first + index]}" for index, begin in enumerate(offsets)]
    return f"{code.x}[{', '.join([':'] * first + parts)}]"


@exports("Tile", form="repeat")
def tile(code: LayerCode) -> str:
    param = code.param.tile_param
    repeats = [1] * code.rank
    repeats[code.axis(param.axis)] = param.tiles
    return f"{code.x}.repeat({', '.join(map(str, repeats))})"


@exports("Reduction", form="sum or mean")
def reduction(code: LayerCode) -> str:
    param = code.param.reduction_param
    texts = {
        _Reduction.MEAN: "{}.mean(-1)",
        _Reduction.ASUM: "{}.abs().sum(-1)",
        _Reduction.SUMSQ: "{}.square().sum(-1)",
    }
    value = texts.get(param.operation, "{}.sum(-1)").format(f"{code.x}.flatten({code.axis(param.axis)})")
    return value if param.coeff == 1 else f"{number(param.coeff)} * {value}"


@exports("Softmax", form="nn.Softmax")
def softmax(code: LayerCode) -> str:
    return code.apply(call("nn.Softmax", dim=code.axis(code.param.softmax_param.axis)))


@exports("ArgMax", form="a class")
def arg_max(code: LayerCode) -> str:
    param = code.param.argmax_param
    top_k = None if param.top_k == 1 else param.top_k
    if param.HasField("axis"):
        values = True if param.out_max_val else None
        return code.apply(call("ArgMax", code.axis(param.axis), top_k=top_k, values=values))
    if param.out_max_val:
        raise code.refuse("out_max_val without axis")
    return (
        f"{code.apply(call('ArgMax', 1, top_k=top_k), f'{code.x}.flatten(1)')}.reshape({code.shape_of(code.tops[0])})"
    )


@exports("Embed", form="nn.Embedding; a class with a bias")
def embed(code: LayerCode) -> str:
    sizes = code.layer.blobs[0].shape
    if code.param.embed_param.bias_term:
        return code.apply(call("Embed", *sizes), weight=code.weights(0), bias=code.weights(1))
    return code.apply(call("nn.Embedding", *sizes), f"{code.x}.long()", weight=code.weights(0))


@exports("Filter", form="an index")
def filter_samples(code: LayerCode) -> list[str]:
    if code.param.HasField("filter_param"):
        raise code.refuse("filter_param")
    return [f"{name}[{code.inputs[-1]}.flatten().long() != 0]" for name in code.inputs[:-1]]


@exports("BatchReindex", form="an index")
def batch_reindex(code: LayerCode) -> str:
    return f"{code.x}[{code.inputs[1]}.long()]"


@exports("Parameter", form="a class")
def parameter(code: LayerCode) -> str:
    return f"{code.submodule(call('Constant', *code.layer.blobs[0].shape), weight=code.weights(0))}()"


# -- normalization -------------------------------------------------------------------------------------

_LEAST = 1.1754943508222875e-38
"""FLT_MIN, the least eps of Normalize."""


@exports("LRN", form="nn.LocalResponseNorm; a class for WITHIN_CHANNEL")
def local_response(code: LayerCode) -> str:
    param = code.param.lrn_param
    alpha, beta = number(param.alpha), number(param.beta)
    if param.norm_region == caffe_pb2.LRNParameter.ACROSS_CHANNELS:
        k = None if param.k == 1 else number(param.k)
        return code.apply(call("nn.LocalResponseNorm", param.local_size, alpha=alpha, beta=beta, k=k))
    return code.apply(call("LocalResponseNormWithinChannel", param.local_size, alpha, beta))


@exports("BatchNorm", form="nn.BatchNorm1d, BatchNorm2d or BatchNorm3d, together with a Scale behind it")
def batch_norm(code: LayerCode) -> str:
    layer = code.layer
    assert isinstance(layer, BatchNormLayer)
    if len(code.tops) > 1:
        raise code.refuse("a top with the batch's statistics")
    if not 2 <= code.rank <= 5:
        raise code.refuse(f"a bottom of {code.rank} axes")
    parameters: dict[str, NDArray[Any]] = {}
    if layer.scale_bias:
        parameters = {
            key: code.weights(index).ravel() for key, index in zip(("weight", "bias"), layer.learned, strict=True)
        }
    elif code.merged is not None:
        values = [np.asarray(blob.host_data(), np.float32) for blob in code.merged.blobs]
        parameters = {"weight": values[0], "bias": values[1] if len(values) > 1 else np.zeros_like(values[0])}
    affine = None if parameters else False
    if layer.uses_stored:
        mean, variance, _ = layer.stored_statistics()
        parameters |= {"running_mean": mean, "running_var": variance}
    kind = {2: "nn.BatchNorm1d", 3: "nn.BatchNorm1d", 4: "nn.BatchNorm2d", 5: "nn.BatchNorm3d"}[code.rank]
    eps = number(layer.normalisation().epsilon)
    constructor = call(
        kind,
        code.bottoms[0].shape[1],
        eps=None if eps == "1e-05" else eps,
        affine=affine,
        track_running_stats=None if layer.uses_stored else False,
    )
    return code.apply(constructor, **parameters)


# -- by channel ----------------------------------------------------------------------------------------


def _own(code: LayerCode, index: int) -> NDArray[np.float32]:
    """A parameter with axes of size 1 behind its own, so that PyTorch broadcasts it as Caffe does."""
    layer = code.layer
    assert isinstance(layer, BroadcastLayer)
    values = code.weights(index)
    behind = code.rank - layer.axis - values.ndim if values.ndim else 0
    return values.reshape((*values.shape, *(1,) * behind))


def _second(code: LayerCode) -> str:
    """The second bottom with axes of size 1 behind its own."""
    layer = code.layer
    assert isinstance(layer, BroadcastLayer)
    own = len(code.bottoms[1].shape)
    behind = code.rank - layer.axis - own if own else 0
    return f"{code.inputs[1]}[{', '.join(['...'] + ['None'] * behind)}]" if behind else code.inputs[1]


@exports("Scale", form="a class, or a part of the BatchNorm before it; * of two bottoms")
def scale(code: LayerCode) -> str:
    has_bias = code.param.scale_param.bias_term
    if len(code.bottoms) > 1:
        product = f"{code.x} * {_second(code)}"
        if not has_bias:
            return product
        bias = _own(code, 0)
        return code.apply(call("Bias", *bias.shape), product, bias=bias)
    weight = _own(code, 0)
    parameters = {"weight": weight} | ({"bias": _own(code, 1)} if has_bias else {})
    return code.apply(call("Scale", *weight.shape, bias=None if has_bias else False), **parameters)


@exports("Bias", form="a class; + of two bottoms")
def bias(code: LayerCode) -> str:
    if len(code.bottoms) > 1:
        return f"{code.x} + {_second(code)}"
    values = _own(code, 0)
    return code.apply(call("Bias", *values.shape), bias=values)


@exports("Axpy", form="*, +")
def axpy(code: LayerCode) -> str:
    factors, behind = code.x, len(code.bottoms[1].shape) - 2
    if code.rank == 2 and behind:
        factors = f"{factors}[{', '.join(['...'] + ['None'] * behind)}]"
    return f"{factors} * {code.inputs[1]} + {code.inputs[2]}"


@exports("MVN", form="a class")
def mean_variance(code: LayerCode) -> str:
    param = code.param.mvn_param
    image = code.x if code.rank == 4 else f"{code.x}.reshape({code.shape_of(code.tops[0])})"
    axes = (1, 2, 3) if param.across_channels else (2, 3)
    scaled = None if param.normalize_variance else False
    return code.apply(call("MeanVarianceNorm", axes, number(param.eps), scale=scaled), image)


@exports("Normalize", form="a class")
def normalize(code: LayerCode) -> str:
    if not code.layer.blobs:
        raise code.refuse("normalize_param")
    param = code.param.norm_param
    axes = tuple(range(1, code.rank)) if param.across_spatial else None
    shape = () if param.channel_shared else (-1, *(1,) * (code.rank - 2))
    weight = code.weights(0).reshape(shape)
    return code.apply(call("L2Norm", *weight.shape, axes=axes, eps=number(max(param.eps, _LEAST))), weight=weight)


# -- recurrent layers ----------------------------------------------------------------------------------


@exports("LSTM", form="a class; the states begin at 0")
def lstm(code: LayerCode) -> str:
    return _recurrent(code, "LSTM", ("hidden.weight",))


@exports("RNN", form="a class; the state begins at 0")
def rnn(code: LayerCode) -> str:
    return _recurrent(code, "RNN", ("hidden.weight", "output.weight", "output.bias"))


def _recurrent(code: LayerCode, name: str, own: tuple[str, ...]) -> str:
    param, blobs = code.param.recurrent_param, code.layer.blobs
    if param.expose_hidden:
        raise code.refuse("expose_hidden")
    has_static = len(code.inputs) > 2
    keys = ["input.weight", "input.bias", *["static.weight"] * has_static, *own]
    parameters = {key: code.weights(index) for index, key in enumerate(keys)}
    static = blobs[2].shape[1] if has_static else None
    return code.apply(call(name, blobs[0].shape[1], param.num_output, static_inputs=static), *code.inputs, **parameters)


# -- convolution and InnerProduct ----------------------------------------------------------------------

_Pool = caffe_pb2.PoolingParameter


@exports("Convolution", form="nn.Conv1d, Conv2d or Conv3d")
def convolution(code: LayerCode) -> list[str]:
    code.inputs = [_widened(code, value) for value in code.inputs]
    return _convolve(code, "nn.Conv", code.layer.blobs[0].shape[0])


def _widened(code: LayerCode, value: str) -> str:
    """A bottom with the zeros that windows read beyond the padding, which PyTorch has on both sides alike."""
    layer = code.layer
    assert isinstance(layer, BaseConvolutionLayer)
    image, windows = (blob.shape[layer.axis + 1 :] for blob in (code.bottoms[0], code.tops[0]))
    more = beyond_padding(layer.geometry, image, windows)
    if not any(more):
        return value
    return f"F.pad({value}, ({', '.join(f'0, {size}' for size in reversed(more))}))"


@exports("Deconvolution", form="nn.ConvTranspose1d, ConvTranspose2d or ConvTranspose3d")
def deconvolution(code: LayerCode) -> list[str]:
    layer = code.layer
    assert isinstance(layer, BaseConvolutionLayer)
    return _convolve(code, "nn.ConvTranspose", layer.blobs[0].shape[1] * layer.geometry.group)


def _convolve(code: LayerCode, kind: str, outputs: int) -> list[str]:
    layer = code.layer
    assert isinstance(layer, BaseConvolutionLayer)
    g = layer.geometry
    axes = len(g.kernel)
    if layer.axis != 1 or not 1 <= axes <= 3:
        raise code.refuse(f"axis {layer.axis} with {axes} spatial axes")
    kernel, stride, pad, dilation = (pair(values) for values in (g.kernel, g.stride, g.pad, g.dilation))
    has_bias = len(layer.blobs) > 1
    constructor = call(
        f"{kind}{axes}d",
        code.bottoms[0].shape[1],
        outputs,
        kernel,
        stride=None if stride == "1" else stride,
        padding=None if pad == "0" else pad,
        dilation=None if dilation == "1" else dilation,
        groups=None if g.group == 1 else g.group,
        bias=None if has_bias else False,
    )
    parameters = {"weight": code.weights(0)} | ({"bias": code.weights(1)} if has_bias else {})
    name = code.submodule(constructor, **parameters)
    return [f"{name}({value})" for value in code.inputs]


@exports("Im2col", form="F.unfold")
def im2col(code: LayerCode) -> str:
    layer = code.layer
    assert isinstance(layer, BaseConvolutionLayer)
    g = layer.geometry
    if layer.axis != 1 or len(g.kernel) != 2:
        raise code.refuse(f"axis {layer.axis} with {len(g.kernel)} spatial axes")
    sizes = ", ".join(pair(values) for values in (g.kernel, g.dilation, g.pad, g.stride))
    return f"F.unfold({_widened(code, code.x)}, {sizes}).unflatten(2, {code.tops[0].shape[2:]})"


@exports("InnerProduct", form="nn.Linear, behind flatten")
def inner_product(code: LayerCode) -> str:
    param = code.param.inner_product_param
    axis, weights = code.axis(param.axis), code.weights(0)
    weights = weights.T if param.transpose else weights
    if param.normalize:
        squares = np.square(weights, dtype=np.float64).sum(1, keepdims=True)
        weights = (weights / np.sqrt(squares + LEAST_SQUARE)).astype(np.float32)
    constructor = call("nn.Linear", weights.shape[1], weights.shape[0], bias=None if param.bias_term else False)
    parameters = {"weight": weights} | ({"bias": code.weights(1)} if param.bias_term else {})
    return code.apply(constructor, code.x if code.rank == axis + 1 else f"{code.x}.flatten({axis})", **parameters)


# -- pooling -------------------------------------------------------------------------------------------


@exports(
    "Pooling",
    form="nn.MaxPool2d, nn.AvgPool2d; global ones nn.AdaptiveMaxPool2d, nn.AdaptiveAvgPool2d; a class for STOCHASTIC "
    "and for a mask",
)
def pooling(code: LayerCode) -> str:
    param, layer = code.param.pooling_param, code.layer
    assert isinstance(layer, PoolingLayer)
    g = layer.geometry
    if param.global_pooling and param.pool != _Pool.STOCHASTIC and len(code.tops) == 1:
        return code.apply("nn.AdaptiveMaxPool2d(1)" if param.pool == _Pool.MAX else "nn.AdaptiveAvgPool2d(1)")
    kernel, stride = pair(g.kernel), pair(g.stride)
    if param.pool == _Pool.STOCHASTIC:
        return code.apply(call("StochasticPool", kernel, stride=stride, ceil_mode=_rounds_up(param)))
    if any(2 * pad > size for pad, size in zip(g.pad, g.kernel, strict=True)):
        return _padded(code)
    pad, rounds_up = pair(g.pad) if any(g.pad) else None, True if _rounds_up(param) else None
    settings = {"stride": stride, "padding": pad, "ceil_mode": rounds_up}
    if param.pool == _Pool.AVE:
        return code.apply(call("nn.AvgPool2d", kernel, **settings))
    if len(code.tops) == 1:
        return code.apply(call("nn.MaxPool2d", kernel, **settings))
    return code.apply(call("MaxPoolWithMask", kernel, **settings))


def _rounds_up(param: caffe_pb2.PoolingParameter) -> bool:
    return param.ceil_mode and param.round_mode != _Pool.FLOOR


def _padded(code: LayerCode) -> str:
    """Pooling with more padding than half of the window, which PyTorch's modules refuse."""
    layer = code.layer
    assert isinstance(layer, PoolingLayer)
    g = layer.geometry
    if len(code.tops) > 1:
        raise code.refuse("a mask beside a pad of more than half of the kernel")
    sizes = zip(code.bottoms[0].shape[2:], code.tops[0].shape[2:], g.kernel, g.stride, g.pad, strict=True)
    after = tuple((out - 1) * stride + kernel - size - pad for size, out, kernel, stride, pad in sizes)
    if code.param.pooling_param.pool == _Pool.MAX:
        return code.apply(call("MaxPool", pair(g.kernel), stride=pair(g.stride), before=g.pad, after=after))
    beyond = tuple(max(end - pad, 0) for end, pad in zip(after, g.pad, strict=True))
    return code.apply(call("AveragePool", pair(g.kernel), stride=pair(g.stride), pad=g.pad, beyond=beyond))


@exports("SPP", form="nn.MaxPool2d or nn.AvgPool2d of each level, torch.cat")
def spatial_pyramid(code: LayerCode) -> str:
    layer = code.layer
    assert isinstance(layer, SPPLayer)
    values = []
    for level, blob in layer.levels:
        value = pooling(LayerCode(code.module, level, code.inputs, code.bottoms, [blob], code.varying))
        assert isinstance(value, str)
        values.append(value)
    if len(values) == 1:
        return values[0]
    return f"torch.cat([{', '.join(f'{value}.flatten(1)' for value in values)}], dim=1)"
