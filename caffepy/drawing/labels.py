"""What a layer's box says, and its colour: those of Caffe's `python/caffe/draw.py`."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from caffepy.proto import caffe_pb2

LAYER_COLOUR = "#6495ED"
NEURON_COLOUR = "#90EE90"
"""Of a layer that works in place."""
BLOB_COLOUR = "#E0E0E0"
_COLOURS = {
    "Convolution": "#FF5050",
    "Deconvolution": "#FF5050",
    "Pooling": "#FF9900",
    "InnerProduct": "#CC33FF",
}
LONGEST = 48
"""Characters of a name or a line; the middle of a longer one is left out."""


def printable(text: str) -> str:
    """A name as one short line: control, format and unassigned characters as escapes."""
    shown = [c if unicodedata.category(c)[0] != "C" else c.encode("unicode_escape").decode() for c in text[:1000]]
    line = "".join(shown)
    half = LONGEST // 2
    return line if len(line) <= LONGEST else f"{line[: half - 1]}…{line[-half:]}"


def colour(layer: caffe_pb2.LayerParameter) -> str:
    """The fill colour of a layer that has a box of its own."""
    if len(layer.bottom) == len(layer.top) == 1 and layer.bottom[0] == layer.top[0]:
        return NEURON_COLOUR
    return _COLOURS.get(layer.type, LAYER_COLOUR)


def describe(layer: caffe_pb2.LayerParameter, rates: bool = False) -> list[str]:
    """The lines below a layer's name: its type, phases and what it computes with.

    Args:
        layer: the layer.
        rates: add the lr_mult of a layer that learns, where one is not 0.
    """
    kind = f"{layer.type} {_pool_method(layer)}".rstrip()
    named = ", ".join(sorted(phases(layer)))
    lines = [f"{kind} ({named})" if named else kind]
    lines += [", ".join(parts)] if (parts := _numbers(layer)) else []
    if rates and layer.type in ("Convolution", "Deconvolution", "InnerProduct"):
        multipliers = [param.lr_mult for param in layer.param[:2]]
        multipliers += [1.0] * (2 - len(multipliers))
        lines += [f"lr mult: {multipliers[0]:.1f}, {multipliers[1]:.1f}"] if any(multipliers) else []
    return [printable(line) for line in lines]


def dimensions(shape: Sequence[int]) -> str:
    """A blob's shape: `1x3x224x224`."""
    return "x".join(map(str, shape)) or "scalar"


def phases(layer: caffe_pb2.LayerParameter) -> frozenset[str]:
    """The phases that a layer's rules name, for a picture of all phases; empty: both."""
    included = {caffe_pb2.Phase.Name(rule.phase) for rule in layer.include if rule.HasField("phase")}
    excluded = {caffe_pb2.Phase.Name(rule.phase) for rule in layer.exclude if rule.HasField("phase")}
    return frozenset({"TRAIN", "TEST"} - excluded if excluded and not included else included)


def _pool_method(layer: caffe_pb2.LayerParameter) -> str:
    if layer.type != "Pooling":
        return ""
    return caffe_pb2.PoolingParameter.PoolMethod.Name(layer.pooling_param.pool)


def _numbers(layer: caffe_pb2.LayerParameter) -> list[str]:
    if layer.type in ("Convolution", "Deconvolution"):
        return _of_convolution(layer.convolution_param)
    if layer.type == "Pooling":
        return _of_pooling(layer.pooling_param)
    if layer.type == "InnerProduct":
        return [f"{layer.inner_product_param.num_output} outputs"]
    if layer.type == "LRN":
        return [f"size {layer.lrn_param.local_size}"]
    if layer.type == "Dropout":
        return [f"ratio {layer.dropout_param.dropout_ratio:g}"]
    if layer.type == "Eltwise":
        return [caffe_pb2.EltwiseParameter.EltwiseOp.Name(layer.eltwise_param.operation)]
    if layer.type == "Data" and layer.data_param.batch_size:
        return [f"batch {layer.data_param.batch_size}"]
    return []


def _of_convolution(param: caffe_pb2.ConvolutionParameter) -> list[str]:
    """Outputs, kernel, stride and padding; a stride of 1, no padding and the like are not said."""
    kernel = _pair(param.kernel_size, param.kernel_h, param.kernel_w, 1)
    said = [f"{param.num_output} outputs", f"{kernel}"]
    stride = _pair(param.stride, param.stride_h, param.stride_w, 1)
    pad = _pair(param.pad, param.pad_h, param.pad_w, 0)
    dilation = _pair(param.dilation, 0, 0, 1)
    said += [f"stride {stride}"] if stride != "1x1" else []
    said += [f"pad {pad}"] if pad != "0x0" else []
    said += [f"dilation {dilation}"] if dilation != "1x1" else []
    return [*said, *([f"group {param.group}"] if param.group > 1 else [])]


def _of_pooling(param: caffe_pb2.PoolingParameter) -> list[str]:
    if param.global_pooling:
        return ["global"]
    stride = _pair([param.stride], param.stride_h, param.stride_w, 1)
    pad = _pair([param.pad], param.pad_h, param.pad_w, 0)
    said = [_pair([param.kernel_size], param.kernel_h, param.kernel_w, 1)]
    said += [f"stride {stride}"] if stride != "1x1" else []
    return said + ([f"pad {pad}"] if pad != "0x0" else [])


def _pair(sizes: Sequence[int], height: int, width: int, otherwise: int) -> str:
    """`3x3` of a repeated field, or of the fields for height and width where one of these is set."""
    if height or width:
        return f"{height}x{width}"
    given = list(sizes) or [otherwise]
    return "x".join(map(str, given if len(given) > 1 else given * 2))
