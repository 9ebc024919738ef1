"""Operators that map each element by itself, and sums and products that ONNX broadcasts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from caffepy.export.onnx_import.graph import Array, NodeView, Tensor, UnsupportedError, Value, imports
from caffepy.formats.proto import caffe_pb2

_Eltwise = caffe_pb2.EltwiseParameter
LARGEST_FLOAT = float(np.finfo(np.float32).max)

_PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "Relu": ("ReLU", {}),
    "Sigmoid": ("Sigmoid", {}),
    "Tanh": ("TanH", {}),
    "Abs": ("AbsVal", {}),
    "Exp": ("Exp", {}),
    "Log": ("Log", {}),
    "Softplus": ("BNLL", {}),
    "HardSwish": ("HardSwish", {}),
    "Neg": ("Power", {"power_param": {"scale": -1.0}}),
    "Sqrt": ("Power", {"power_param": {"power": 0.5}}),
    "Reciprocal": ("Power", {"power_param": {"power": -1.0}}),
}


@imports(*_PLAIN, form="the layer of the same formula; Power for Neg, Sqrt and Reciprocal")
def plain(view: NodeView) -> Tensor:
    kind, fields = _PLAIN[view.node.op_type]
    return view.add(kind, [view.blob()], **fields)


@imports("LeakyRelu", form="ReLU with negative_slope")
def leaky_relu(view: NodeView) -> Tensor:
    return view.add("ReLU", [view.blob()], relu_param={"negative_slope": view.real("alpha", 0.01)})


@imports("PRelu", form="PReLU")
def prelu(view: NodeView) -> Tensor:
    x, slopes = view.blob(), np.asarray(view.constant(1), np.float32)
    if slopes.size == 1:
        return view.add("PReLU", [x], [slopes.reshape(())], prelu_param={"channel_shared": True})
    padded = (1,) * (len(x.shape) - slopes.ndim) + slopes.shape
    if len(x.shape) < 2 or padded != (1, x.shape[1], *(1,) * (len(x.shape) - 2)):
        raise UnsupportedError(f"its slopes have the shape {list(slopes.shape)}; Caffe has one for each channel")
    return view.add("PReLU", [x], [slopes.reshape(-1)])


@imports("Elu", form="ELU")
def elu(view: NodeView) -> Tensor:
    return view.add("ELU", [view.blob()], elu_param={"alpha": view.real("alpha", 1.0)})


@imports("Selu", form="ELU, Power")
def selu(view: NodeView) -> Tensor:
    """gamma * ELU(x). ELU's `lambda` would do, but that field chooses NVIDIA's dialect for the whole net."""
    alpha, gamma = view.real("alpha", 1.6732632), view.real("gamma", 1.050701)
    y = view.net.add("ELU", [view.blob()], f"{view.name}/elu", elu_param={"alpha": alpha})
    return view.net.linear(y, view.name, gamma)


@imports("HardSigmoid", form="Power, Clip")
def hard_sigmoid(view: NodeView) -> Tensor:
    alpha, beta = view.real("alpha", 0.2), view.real("beta", 0.5)
    line = view.net.linear(view.blob(), f"{view.name}/line", alpha, beta)
    return view.add("Clip", [line], clip_param={"min": 0.0, "max": 1.0})


@imports("Clip", form="Clip; ReLU where it is one")
def clip(view: NodeView) -> Tensor:
    low, high = view.real("min", -LARGEST_FLOAT), view.real("max", LARGEST_FLOAT)
    low, high = (_scalar(view, 1) if view.has(1) else low), (_scalar(view, 2) if view.has(2) else high)
    return _clipped(view, view.blob(), low, high)


def _clipped(view: NodeView, x: Tensor, low: float, high: float) -> Tensor:
    if low == 0 and high >= LARGEST_FLOAT:
        return view.add("ReLU", [x])
    low, high = max(low, -LARGEST_FLOAT), min(high, LARGEST_FLOAT)
    return view.add("Clip", [x], clip_param={"min": low, "max": high})


def _scalar(view: NodeView, index: int) -> float:
    values = view.constant(index)
    if values.size != 1:
        raise UnsupportedError(f"its input '{view.node.input[index]}' is not one number")
    return float(values.reshape(-1)[0])


@imports("Pow", form="Power, where the exponent is one number")
def power(view: NodeView) -> Tensor:
    return view.add("Power", [view.blob()], power_param={"power": _scalar(view, 1)})


@imports("Identity", "Dropout", "Cast", form="nothing: the blob stays")
def unchanged(view: NodeView) -> Value:
    if len(view.node.output) > 1 and view.node.output[1]:
        raise UnsupportedError("its second output, the mask, is not imported")
    return view.value(0)


# -- sums and products -----------------------------------------------------------------------------------


@imports("Add", "Sum", form="Eltwise; Bias, Scale or Power with a constant; Bias with two bottoms")
def add(view: NodeView) -> Tensor:
    total: Value = view.value(0)
    for index in range(1, len(view.inputs)):
        total = _combined(view, total, view.value(index), "Bias", f"{view.name}/{index}" if index > 1 else view.name)
    return total if isinstance(total, Tensor) else view.blob(0)


@imports("Mul", form="Eltwise (PROD); Scale or Power with a constant; Scale with two bottoms; Swish of its own Sigmoid")
def multiply(view: NodeView) -> Tensor:
    a, b = view.value(0), view.value(1)
    for x, gate in ((a, b), (b, a)):
        if isinstance(x, Tensor) and isinstance(gate, Tensor) and gate.name in view.net.producers:
            layer = view.net.producers[gate.name]
            if layer.type == "Sigmoid" and layer.bottom[0] == x.name:
                return view.add("Swish", [x])
    return _combined(view, a, b, "Scale", view.name)


@imports("Sub", form="Eltwise with a coefficient of -1; Bias or Power with a constant")
def subtract(view: NodeView) -> Tensor:
    a, b = view.value(0), view.value(1)
    if not isinstance(b, Tensor):
        return _combined(view, a, -np.asarray(b, np.float32), "Bias", view.name)
    if isinstance(a, Tensor) and a.shape == b.shape:
        return view.add("Eltwise", [a, b], eltwise_param={"coeff": [1.0, -1.0]})
    return _combined(view, a, view.net.linear(b, f"{view.name}/negative", -1.0), "Bias", view.name)


@imports("Div", form="Scale or Power with a constant; else Power (-1) and a product")
def divide(view: NodeView) -> Tensor:
    a, b = view.value(0), view.value(1)
    if not isinstance(b, Tensor):
        with np.errstate(divide="ignore"):
            inverse = (1 / np.asarray(b, np.float64)).astype(np.float32)
        return _combined(view, a, inverse, "Scale", view.name)
    return _combined(view, a, view.net.linear(b, f"{view.name}/inverse", power=-1.0), "Scale", view.name)


@imports("Max", "Min", form="Eltwise (MAX); Clip or ReLU with a constant; Min with Power (-1) before and behind")
def extreme(view: NodeView) -> Tensor:
    largest = view.node.op_type == "Max"
    if len(view.inputs) == 2:
        for index in range(2):
            constant = view.inputs[1 - index]
            if isinstance(constant, np.ndarray) and constant.size == 1:
                bound = float(constant.reshape(-1)[0])
                limits = (bound, LARGEST_FLOAT) if largest else (-LARGEST_FLOAT, bound)
                return _clipped(view, view.blob(index), *limits)
    blobs = [view.blob(index) for index in range(len(view.inputs))]
    shape = np.broadcast_shapes(*(blob.shape for blob in blobs))
    blobs = [view.net.expanded(blob, shape, f"{view.name}/input{i}") for i, blob in enumerate(blobs)]
    if len(blobs) == 1:
        return blobs[0]
    if largest:
        return view.add("Eltwise", blobs, eltwise_param={"operation": _Eltwise.MAX})
    negative = [view.net.linear(blob, f"{view.name}/negative{i}", -1.0) for i, blob in enumerate(blobs)]
    found = view.net.add("Eltwise", negative, f"{view.name}/max", eltwise_param={"operation": _Eltwise.MAX})
    return view.net.linear(found, view.name, -1.0)


def _combined(view: NodeView, a: Value, b: Value, kind: str, name: str) -> Tensor:
    """The sum (kind Bias) or product (kind Scale) of two values, broadcast as ONNX does."""
    if not isinstance(a, Tensor):
        a, b = b, a
    if not isinstance(a, Tensor):
        raise UnsupportedError("both of its inputs are constants of a type that is not computed")
    if a.pads or (isinstance(b, Tensor) and b.pads):
        raise UnsupportedError("its input has padding that only a convolution can take")
    try:
        shape = np.broadcast_shapes(a.shape, b.shape)
    except ValueError:
        raise UnsupportedError(f"its inputs of shapes {list(a.shape)} and {list(b.shape)} do not fit") from None
    if not isinstance(b, Tensor):
        return _with_constant(view, view.net.expanded(a, shape, f"{name}/input"), np.asarray(b, np.float32), kind, name)
    if a.shape == b.shape:
        operation = _Eltwise.SUM if kind == "Bias" else _Eltwise.PROD
        return view.net.add("Eltwise", [a, b], name, eltwise_param={"operation": operation})
    if a.shape != shape:
        a, b = b, a
    return _with_smaller(view, view.net.expanded(a, shape, f"{name}/input"), b, kind, name)


def _span(shape: Sequence[int], whole: Sequence[int]) -> tuple[int, int]:
    """The axes from the first to the last along which an operand of `whole`'s number of axes is not of size 1."""
    used = [axis for axis, size in enumerate(shape) if size != 1]
    first = 0 if shape[0] == whole[0] else used[0]
    return first, max(used[-1] + 1, first + 1)


def _with_constant(view: NodeView, x: Tensor, values: Array, kind: str, name: str) -> Tensor:
    if values.size == 1:
        number = float(values.reshape(-1)[0])
        return view.net.linear(x, name, 1.0, number) if kind == "Bias" else view.net.linear(x, name, number)
    padded = values.reshape((1,) * (len(x.shape) - values.ndim) + values.shape)
    used = [axis for axis in range(padded.ndim) if padded.shape[axis] != 1]
    first, last = used[0], used[-1] + 1
    blob = np.broadcast_to(padded.reshape(padded.shape[first:last]), x.shape[first:last])
    field: dict[str, Any] = {f"{kind.lower()}_param": {"axis": first, "num_axes": last - first}}
    return view.net.add(kind, [x], name, [blob], **field)


def _with_smaller(view: NodeView, x: Tensor, small: Tensor, kind: str, name: str) -> Tensor:
    """x with a blob that has not all of its axes: Scale or Bias with two bottoms."""
    padded = (1,) * (len(x.shape) - len(small.shape)) + small.shape
    if all(size == 1 for size in padded):
        first, last = 0, 1
    else:
        first, last = _span(padded, x.shape)
    small = view.net.reshaped(small, padded[first:last], f"{name}/operand")
    small = view.net.expanded(small, x.shape[first:last], f"{name}/operand")
    field: dict[str, Any] = {f"{kind.lower()}_param": {"axis": first}}
    return view.net.add(kind, [x, small], name, **field)
