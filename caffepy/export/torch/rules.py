"""What layer types of Caffe become in PyTorch alone, one function a type, and how shared rules' operators are written.

Layers for which PyTorch has no module, such as LSTM, RNN, and SSD's priors and output, become classes of `modules.py`,
which are copied into the text.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.export.rules import LEAST_EPS, axes_behind, read_beyond_padding
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.export_rules import INT64, TORCH, TorchLayer, affine, call, number, numbers, pair

# -- operators of shared rules -------------------------------------------------------------------------


def _flattened(code: TorchLayer, x: str) -> str:
    param = code.param.flatten_param
    first, last = code.axis(param.axis), code.axis(param.end_axis)
    return f"{x}.flatten({first})" if last == code.rank - 1 else f"{x}.flatten({first}, {last})"


def _part(code: TorchLayer, x: str, begins: list[int], ends: list[int], axes: range) -> str:
    parts = [f"{begin}:{end}" for begin, end in zip(begins, ends, strict=True)]
    return f"{x}[{', '.join([':'] * (code.rank - len(axes)) + parts)}]"


def _reduction(code: TorchLayer, x: str, kind: str, first: int) -> str:
    texts = {"ReduceMean": "mean", "ReduceSum": "sum", "ReduceL1": "abs().sum", "ReduceSumSquare": "square().sum"}
    return f"{x}.flatten({first}).{texts[kind]}(-1)"


def _local_response(code: TorchLayer, x: str, size: int, alpha: float, beta: float, bias: float) -> str:
    k = None if bias == 1 else number(bias)
    return code.apply(call("nn.LocalResponseNorm", size, alpha=number(alpha), beta=number(beta), k=k))


def _mean_variance(code: TorchLayer, x: str, axes: tuple[int, ...], eps: float, scale: bool) -> str:
    return code.apply(call("MeanVarianceNorm", axes, number(eps), scale=None if scale else False), x)


def _linear(code: TorchLayer, x: str, weights: NDArray[np.float32], axis: int) -> str:
    weights = weights.T if code.param.inner_product_param.transpose else weights
    parameters = _parameters(code, weights)
    bias = None if "bias" in parameters else False
    constructor = call("nn.Linear", weights.shape[1], weights.shape[0], bias=bias)
    return code.apply(constructor, x if code.rank == axis + 1 else f"{x}.flatten({axis})", **parameters)


def _own(code: TorchLayer, index: int) -> NDArray[np.float32]:
    """A parameter with axes of size 1 behind its own, so that PyTorch broadcasts it as Caffe does."""
    values = code.weights(index)
    return values.reshape((*values.shape, *(1,) * axes_behind(code, values.ndim)))


def _scale(code: TorchLayer, x: str) -> str:
    weight, has_bias = _own(code, 0), code.param.scale_param.bias_term
    parameters = {"weight": weight} | ({"bias": _own(code, 1)} if has_bias else {})
    return code.apply(call("Scale", *weight.shape, bias=None if has_bias else False), **parameters)


def _bias(code: TorchLayer, x: str) -> str:
    values = _own(code, 0)
    return code.apply(call("Bias", *values.shape), x, bias=values)


_OPERATORS: dict[str, Any] = {
    "Abs": "{0}.abs()",
    "Add": lambda code, a, b: f"{a} + {b}".replace("+ -1.0 * ", "- "),
    "Behind": lambda code, x, own, count: f"{x}[{', '.join(['...'] + ['None'] * count)}]",
    "Bias": _bias,
    "Cast": lambda code, x, to: f"{x}.long()" if to == INT64 else f"{x}.to({code.x}.dtype)",
    "Clip": "{0}.clamp({1}, {2})",
    "Dropout": "nn.Dropout({ratio})",
    "Elu": "nn.ELU({alpha})",
    "Exponential": lambda code, x, factor, term: f"torch.exp({affine(x, factor, term)})",
    "Flatten": "{0}.flatten({axis})",
    "Flattened": _flattened,
    "Full": "torch.full_like({0}, {value})",
    "Gather": lambda code, x, index, axis: f"{x}[{':, ' * axis}{index if isinstance(index, str) else list(index)}]",
    "Greater": "({0} > {1})",
    "Identity": "{0}",
    "LeakyRelu": "nn.LeakyReLU({alpha})",
    "Linear": _linear,
    "LocalResponse": "LocalResponseNormWithinChannel({size}, {alpha}, {beta})",
    "Log": "torch.log({0})",
    "LRN": _local_response,
    "Max": lambda code, *values: functools.reduce("torch.maximum({}, {})".format, values),
    "MeanVariance": _mean_variance,
    "Mul": "{0} * {1}",
    "Part": _part,
    "Power": lambda code, x, power: f"{x if x == code.x else f'({x})'} ** {number(power)}",
    "Reduction": _reduction,
    "Relu": "nn.ReLU()",
    "Reshape": "{0}.reshape({1})",
    "Scale": _scale,
    "Sigmoid": "nn.Sigmoid()",
    "Softmax": "nn.Softmax(dim={axis})",
    "Softplus": "nn.Softplus()",
    "Swish": lambda code, x, beta: code.apply("nn.SiLU()") if beta == 1 else f"{x} * torch.sigmoid({affine(x, beta)})",
    "Tanh": "nn.Tanh()",
    "Tile": "{0}.repeat({1})",
    "Transpose": "{0}.permute({perm})",
}
"""Those that begin with a class are modules; see `Rules.operators`."""
TORCH.operators.update(_OPERATORS)

# -- activations and other functions of each element ---------------------------------------------------


@TORCH.exports("PReLU", form="nn.PReLU")
def prelu(code: TorchLayer) -> str:
    slopes = code.weights(0).reshape(-1)
    return code.apply(call("nn.PReLU", len(slopes)), weight=slopes)


# -- SSD's priors and output ---------------------------------------------------------------------------


@TORCH.exports("PriorBox", form="a class")
def prior_box(code: TorchLayer) -> str:
    layer, param = code.layer, code.param.prior_box_param
    if param.denser_prior_boxes:
        code.needs_onnx("denser_prior_boxes")
    settings = {
        "max_sizes": tuple(map(int, param.max_size)) or None,
        "ratios": numbers([float(ratio) for ratio in layer.ratios]) if layer.ratios else None,
        "step": numbers(layer.step_size) if layer.step_size else None,
        "image": numbers(layer.image_size) if layer.image_size else None,
        "offset": None if param.offset == 0.5 else number(param.offset),
        "clip": True if param.clip else None,
        "variances": numbers(layer.variances),
        "boxes": tuple(zip(param.width, param.height, strict=True)) or None,
    }
    return code.apply(call("PriorBox", tuple(map(int, param.min_size)), **settings), *code.inputs)


@TORCH.exports("DetectionOutput", form="a class")
def detection_output(code: TorchLayer) -> str:
    param = code.param.detection_output_param
    if param.HasField("use_polygon"):
        code.needs_onnx("use_polygon")
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


@TORCH.exports("ArgMax", form="a class")
def arg_max(code: TorchLayer) -> str:
    param = code.param.argmax_param
    top_k = None if param.top_k == 1 else param.top_k
    if param.HasField("axis"):
        values = True if param.out_max_val else None
        return code.apply(call("ArgMax", code.axis(param.axis), top_k=top_k, values=values))
    if param.out_max_val:
        code.needs_onnx("out_max_val without axis")
    return code.in_shape_of(code.apply(call("ArgMax", 1, top_k=top_k), f"{code.x}.flatten(1)"), code.tops[0])


@TORCH.exports("Embed", form="nn.Embedding; a class with a bias")
def embed(code: TorchLayer) -> str:
    sizes = code.layer.blobs[0].shape
    if code.param.embed_param.bias_term:
        return code.apply(call("Embed", *sizes), weight=code.weights(0), bias=code.weights(1))
    return code.apply(call("nn.Embedding", *sizes), f"{code.x}.long()", weight=code.weights(0))


@TORCH.exports("Filter", form="an index")
def filter_samples(code: TorchLayer) -> list[str]:
    if code.param.HasField("filter_param"):
        code.needs_onnx("filter_param")
    return [f"{name}[{code.inputs[-1]}.flatten().long() != 0]" for name in code.inputs[:-1]]


TORCH.exports("Parameter", form="a class")(
    lambda code: f"{code.submodule(call('Constant', *code.layer.blobs[0].shape), weight=code.weights(0))}()"
)

# -- normalization -------------------------------------------------------------------------------------


@TORCH.exports("BatchNorm", form="nn.BatchNorm1d, BatchNorm2d or BatchNorm3d, together with a Scale behind it")
def batch_norm(code: TorchLayer) -> str:
    layer = code.layer
    if len(code.tops) > 1:
        code.needs_onnx("a top with the batch's statistics")
    if not 2 <= code.rank <= 5:
        code.needs_onnx(f"a bottom of {code.rank} axes")
    parameters: dict[str, NDArray[Any]] = {}
    if layer.scale_bias:
        parameters = dict(zip(("weight", "bias"), (code.weights(i).ravel() for i in layer.learned), strict=True))
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


@TORCH.exports("Axpy", form="*, +")
def axpy(code: TorchLayer) -> str:
    factors, behind = code.x, len(code.bottoms[1].shape) - 2
    if code.rank == 2 and behind:
        factors = f"{factors}[{', '.join(['...'] + ['None'] * behind)}]"
    return f"{factors} * {code.inputs[1]} + {code.inputs[2]}"


@TORCH.exports("Normalize", form="a class")
def normalize(code: TorchLayer) -> str:
    if not code.layer.blobs:
        code.needs_onnx("normalize_param")
    param = code.param.norm_param
    axes = tuple(range(1, code.rank)) if param.across_spatial else None
    shape = () if param.channel_shared else (-1, *(1,) * (code.rank - 2))
    weight = code.weights(0).reshape(shape)
    return code.apply(call("L2Norm", *weight.shape, axes=axes, eps=number(max(param.eps, LEAST_EPS))), weight=weight)


# -- recurrent layers ----------------------------------------------------------------------------------


def _recurrent(code: TorchLayer, *own: str) -> str:
    param, blobs = code.param.recurrent_param, code.layer.blobs
    if param.expose_hidden:
        code.needs_onnx("expose_hidden")
    has_static = len(code.inputs) > 2
    keys = ["input.weight", "input.bias", *["static.weight"] * has_static, *own]
    parameters = {key: code.weights(index) for index, key in enumerate(keys)}
    static = blobs[2].shape[1] if has_static else None
    constructor = call(code.layer.type, blobs[0].shape[1], param.num_output, static_inputs=static)
    return code.apply(constructor, *code.inputs, **parameters)


TORCH.exports("LSTM", form="a class; the states begin at 0")(lambda code: _recurrent(code, "hidden.weight"))
TORCH.exports("RNN", form="a class; the state begins at 0")(
    lambda code: _recurrent(code, "hidden.weight", "output.weight", "output.bias")
)


# -- convolution and InnerProduct ----------------------------------------------------------------------

_Pool = caffe_pb2.PoolingParameter
MOST_AXES = 3
"""The most spatial axes of PyTorch's convolutions and poolings."""


@TORCH.exports("Convolution", form="nn.Conv1d, Conv2d or Conv3d")
def convolution(code: TorchLayer) -> list[str]:
    return _convolve(code, "nn.Conv", [_widened(code, value) for value in code.inputs])


@TORCH.exports("Deconvolution", form="nn.ConvTranspose1d, ConvTranspose2d or ConvTranspose3d")
def deconvolution(code: TorchLayer) -> list[str]:
    return _convolve(code, "nn.ConvTranspose", code.inputs)


def _widened(code: TorchLayer, value: str) -> str:
    """A bottom with the zeros that windows read beyond the padding, which PyTorch has on both sides alike."""
    more = read_beyond_padding(code)
    return f"F.pad({value}, ({', '.join(f'0, {size}' for size in reversed(more))}))" if any(more) else value


def _convolve(code: TorchLayer, kind: str, inputs: list[str]) -> list[str]:
    g = code.layer.geometry
    axes, parameters = len(g.kernel), _parameters(code, code.weights(0))
    if code.layer.axis != 1 or not 1 <= axes <= 3:
        code.needs_onnx(f"axis {code.layer.axis} with {axes} spatial axes")
    kernel, stride, pad, dilation = (pair(values) for values in (g.kernel, g.stride, g.pad, g.dilation))
    constructor = call(
        f"{kind}{axes}d",
        code.bottoms[0].shape[1],
        code.tops[0].shape[1],
        kernel,
        stride=None if stride == "1" else stride,
        padding=None if pad == "0" else pad,
        dilation=None if dilation == "1" else dilation,
        groups=None if g.group == 1 else g.group,
        bias=None if "bias" in parameters else False,
    )
    name = code.submodule(constructor, **parameters)
    return [f"{name}({value})" for value in inputs]


def _parameters(code: TorchLayer, weight: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
    """A weight, and the second parameter as bias if there is one."""
    return {"weight": weight} | ({"bias": code.weights(1)} if len(code.layer.blobs) > 1 else {})


@TORCH.exports("Im2col", form="F.unfold")
def im2col(code: TorchLayer) -> str:
    g = code.layer.geometry
    if code.layer.axis != 1 or len(g.kernel) != 2:
        code.needs_onnx(f"axis {code.layer.axis} with {len(g.kernel)} spatial axes")
    sizes = ", ".join(pair(values) for values in (g.kernel, g.dilation, g.pad, g.stride))
    return f"F.unfold({_widened(code, code.x)}, {sizes}).unflatten(2, {code.tops[0].shape[2:]})"


# -- pooling -------------------------------------------------------------------------------------------


@TORCH.exports(
    "Pooling",
    form="nn.MaxPool1d to 3d, nn.AvgPool1d to 3d; global ones nn.AdaptiveMaxPool1d, nn.AdaptiveAvgPool1d to 3d; a "
    "class for STOCHASTIC and for a mask",
)
def pooling(code: TorchLayer) -> str:
    param, g = code.layer.settings, code.layer.geometry
    is_max, axes = param.pool == _Pool.MAX, len(g.kernel)
    if axes > MOST_AXES:
        code.needs_onnx(f"pooling over {axes} axes")
    if param.global_pooling and param.pool != _Pool.STOCHASTIC and len(code.tops) == 1:
        return code.apply(f"nn.Adaptive{'Max' if is_max else 'Avg'}Pool{axes}d(1)")
    kernel, stride = pair(g.kernel), pair(g.stride)
    if param.pool == _Pool.STOCHASTIC:
        return code.apply(call("StochasticPool", kernel, stride=stride, ceil_mode=_rounds_up(param)))
    dilated = max(g.dilation) > 1
    if dilated and not is_max:
        raise code.error("the average of windows with dilation cannot be exported; remove the dilation, or use MAX")
    if any(2 * pad > size for pad, size in zip(g.pad, g.kernel, strict=True)):
        if axes != 2 or dilated:
            code.needs_onnx("a pad of more than half of the kernel")
        return _padded(code)
    pad, rounds_up = pair(g.pad) if any(g.pad) else None, True if _rounds_up(param) else None
    settings = {
        "stride": stride,
        "padding": pad,
        "dilation": pair(g.dilation) if dilated else None,
        "ceil_mode": rounds_up,
    }
    if len(code.tops) > 1:
        return code.apply(call("MaxPoolWithMask", kernel, **settings))
    return code.apply(call(f"nn.{'Max' if is_max else 'Avg'}Pool{axes}d", kernel, **settings))


def _rounds_up(param: caffe_pb2.PoolingParameter) -> bool:
    return param.ceil_mode and param.round_mode != _Pool.FLOOR


def _padded(code: TorchLayer) -> str:
    """Pooling with more padding than half of the window, which PyTorch's modules refuse."""
    windows = code.windows(code.layer.geometry)
    kernel, stride, pad = pair(windows.kernel), pair(windows.stride), windows.pad
    if len(code.tops) > 1:
        code.needs_onnx("a mask beside a pad of more than half of the kernel")
    if code.layer.settings.pool == _Pool.MAX:
        return code.apply(call("MaxPool", kernel, stride=stride, before=pad, after=windows.after))
    beyond = tuple(max(end - own, 0) for end, own in zip(windows.after, pad, strict=True))
    return code.apply(call("AveragePool", kernel, stride=stride, pad=pad, beyond=beyond))
