"""LRN, BatchNorm, MVN, Normalize, and what multiplies or adds by channel."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.export.torch.code import LayerCode, exports
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.batch_norm import BatchNormLayer
from caffepy.layers.export_rules import call, number
from caffepy.layers.scale import BroadcastLayer

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
    state = layer.normalisation()
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
        mean, variance, count = (
            np.asarray(layer.backend.to_host(a), np.float32) for a in (state.sum_mean, state.sum_variance, state.count)
        )
        factor = np.float32(1 / count[0]) if count[0] else np.float32(0)
        parameters |= {"running_mean": mean * factor, "running_var": variance * factor}
    kind = {2: "nn.BatchNorm1d", 3: "nn.BatchNorm1d", 4: "nn.BatchNorm2d", 5: "nn.BatchNorm3d"}[code.rank]
    eps = number(state.epsilon)
    constructor = call(
        kind, code.bottoms[0].shape[1], eps=None if eps == "1e-05" else eps, affine=affine,
        track_running_stats=None if layer.uses_stored else False,
    )  # fmt: skip
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
