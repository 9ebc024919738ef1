"""Convolution in both directions and InnerProduct, and pooling."""

from __future__ import annotations

import numpy as np

from caffepy.export.torch.code import LayerCode, exports
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.convolution import BaseConvolutionLayer, beyond_padding
from caffepy.layers.export_rules import call, pair
from caffepy.layers.inner_product import LEAST_SQUARE
from caffepy.layers.pooling import PoolingLayer, SPPLayer

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
        f"{kind}{axes}d", code.bottoms[0].shape[1], outputs, kernel,
        stride=None if stride == "1" else stride, padding=None if pad == "0" else pad,
        dilation=None if dilation == "1" else dilation, groups=None if g.group == 1 else g.group,
        bias=None if has_bias else False,
    )  # fmt: skip
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
)  # fmt: skip
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
