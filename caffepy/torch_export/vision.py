"""Convolution in both directions and InnerProduct, pooling, images of another size, and regions of images."""

from __future__ import annotations

import numpy as np

from caffepy.layers.core.unit_weights import LEAST_SQUARE
from caffepy.layers.vision.base_convolution import BaseConvolutionLayer, beyond_padding
from caffepy.layers.vision.convolution3d import Pooling3DLayer
from caffepy.layers.vision.pooling import PoolingLayer
from caffepy.layers.vision.spp import SPPLayer
from caffepy.proto import caffe_pb2
from caffepy.torch_export.code import LayerCode, call, exports, number, pair

_Pool = caffe_pb2.PoolingParameter


@exports(
    "Convolution", "DepthwiseConvolution", "ConvolutionDepthwise", "Convolution3D", form="nn.Conv1d, Conv2d or Conv3d"
)  # fmt: skip
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


@exports("Deconvolution", "Deconvolution3D", form="nn.ConvTranspose1d, ConvTranspose2d or ConvTranspose3d")
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


@exports("Pooling3D", form="nn.MaxPool3d, nn.AvgPool3d")
def pooling_of_clips(code: LayerCode) -> str:
    layer = code.layer
    assert isinstance(layer, Pooling3DLayer)
    g = layer.geometry
    if any(2 * pad > size for pad, size in zip(g.pad, g.kernel, strict=True)):
        raise code.refuse("a pad of more than half of the kernel")
    pad = pair(g.pad) if any(g.pad) else None
    name = "nn.MaxPool3d" if layer.is_max else "nn.AvgPool3d"
    return code.apply(call(name, pair(g.kernel), stride=pair(g.stride), padding=pad, ceil_mode=True))


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


# -- images of another size ----------------------------------------------------------------------------


@exports("Interp", form="F.interpolate (bilinear, align_corners), slices")
def interp(code: LayerCode) -> str:
    param, value = code.param.interp_param, code.x
    begin, end = (abs(pad) for pad in (param.pad_beg, param.pad_end))
    if begin or end:
        height, width = code.bottoms[0].shape[2:]
        value = f"{value}[:, :, {begin}:{height - end}, {begin}:{width - end}]"
    size = code.tops[0].shape[2:]
    return f'F.interpolate({value}, size={size}, mode="bilinear", align_corners=True)'


@exports("Upsample", form="nn.Upsample (nearest); a class with a mask")
def upsample(code: LayerCode) -> str:
    size = code.tops[0].shape[2:]
    if len(code.inputs) > 1:
        return code.apply(call("Unpool", *size), *code.inputs)
    factors = [out // own for out, own in zip(size, code.bottoms[0].shape[2:], strict=True)]
    return code.apply(call("nn.Upsample", scale_factor=pair(factors)))


@exports("ROIPooling", form="a class")
def roi_pooling(code: LayerCode) -> str:
    param = code.param.roi_pooling_param
    if param.pad_ratio:
        raise code.refuse("pad_ratio")
    scale = number(param.spatial_scale)
    return code.apply(call("ROIPool", param.pooled_h, param.pooled_w, scale=scale), *code.inputs)
