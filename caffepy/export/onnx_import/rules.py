"""What each operator of ONNX becomes in Caffe, one function an operator.

Pooling gets Caffe's windows and divisors so chosen that the numbers are ONNX's. Resize and Upsample become
Deconvolution for a whole factor, Interp where corners stay, else a product by axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from caffepy.export.onnx_import.graph import Array, NodeView, Tensor, UnsupportedError, Value, imports
from caffepy.formats.proto import caffe_pb2

# -- functions of each element -------------------------------------------------------------------------

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


imports("Elu", form="ELU")(lambda view: view.add("ELU", [view.blob()], elu_param={"alpha": view.real("alpha", 1.0)}))
imports("LeakyRelu", form="ReLU with negative_slope")(
    lambda view: view.add("ReLU", [view.blob()], relu_param={"negative_slope": view.real("alpha", 0.01)})
)
imports("Pow", form="Power, where the exponent is one number")(
    lambda view: view.add("Power", [view.blob()], power_param={"power": _scalar(view, 1)})
)


@imports("PRelu", form="PReLU")
def prelu(view: NodeView) -> Tensor:
    x, slopes = view.blob(), np.asarray(view.constant(1), np.float32)
    if slopes.size == 1:
        return view.add("PReLU", [x], [slopes.reshape(())], prelu_param={"channel_shared": True})
    padded = (1,) * (len(x.shape) - slopes.ndim) + slopes.shape
    if len(x.shape) < 2 or padded != (1, x.shape[1], *(1,) * (len(x.shape) - 2)):
        raise UnsupportedError(f"its slopes have the shape {list(slopes.shape)}; Caffe has one for each channel")
    return view.add("PReLU", [x], [slopes.reshape(-1)])


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


# -- windows: padding, strides, convolution in both directions -----------------------------------------

Pads = list[tuple[int, int]]
LARGEST_PAD = 4096


def spatial_pads(view: NodeView, size: Sequence[int], spans: Sequence[int], strides: Sequence[int]) -> Pads:
    """Zeros before and behind each spatial axis, by `pads` or `auto_pad`."""
    auto, axes = view.attribute("auto_pad", "NOTSET"), len(size)
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        missing = [max((-(-n // s) - 1) * s + k - n, 0) for n, k, s in zip(size, spans, strides, strict=True)]
        halves = [(total // 2, total - total // 2) for total in missing]
        return halves if auto == "SAME_UPPER" else [pair[::-1] for pair in halves]
    pads = view.numbers("pads", [0] * 2 * axes, 2 * axes) if auto == "NOTSET" else [0] * 2 * axes
    if any(not 0 <= pad <= LARGEST_PAD for pad in pads):
        raise UnsupportedError(f"its pads {pads} are not from 0 to {LARGEST_PAD}")
    return list(zip(pads[:axes], pads[axes:], strict=True))


def window(view: NodeView, kernel: Sequence[int]) -> tuple[list[int], list[int]]:
    """Strides and dilations of a convolution or pooling."""
    axes = len(kernel)
    strides, dilations = view.numbers("strides", [1] * axes, axes), view.numbers("dilations", [1] * axes, axes)
    if min([*kernel, *strides, *dilations], default=1) < 1:
        raise UnsupportedError(
            f"its kernel {list(kernel)}, strides {strides} and dilations {dilations} must be above 0"
        )
    return strides, dilations


@imports("Conv", form="Convolution; uneven padding as zeros in the kernel")
def conv(view: NodeView) -> Tensor:
    x, weights, bias = view.value(0), view.constant(1), _bias(view)
    if not isinstance(x, Tensor):
        x = view.blob(0)
    axes = len(x.shape) - 2
    if axes < 1 or weights.ndim != axes + 2:
        raise UnsupportedError(f"its image has {axes} spatial axes and its weights have {weights.ndim - 2}")
    strides, dilations = window(view, weights.shape[2:])
    spans = [d * (k - 1) + 1 for d, k in zip(dilations, weights.shape[2:], strict=True)]
    pads = spatial_pads(view, x.shape[2:], spans, strides)
    pads = [(a + c, b + d) for (a, b), (c, d) in zip(pads, x.pads or [(0, 0)] * axes, strict=True)]
    plain = Tensor(x.name, _without_pads(x))
    weights, even = even_padding(weights, pads, dilations)
    field = _settings(weights, strides, even, dilations, view.number("group", 1), bias is not None)
    return view.add("Convolution", [plain], [weights, *([] if bias is None else [bias])], convolution_param=field)


def _without_pads(x: Tensor) -> tuple[int, ...]:
    return (*x.shape[:2], *(n - sum(p) for n, p in zip(x.shape[2:], x.pads, strict=True))) if x.pads else x.shape


def _bias(view: NodeView) -> Array | None:
    return np.asarray(view.constant(2), np.float32).reshape(-1) if view.has(2) else None


def _settings(
    weights: Array, strides: Sequence[int], pads: Sequence[int], dilations: Sequence[int], group: int, bias: bool
) -> dict[str, object]:
    """convolution_param of a Convolution, each setting once where all axes have the same."""
    settings: dict[str, object] = {"num_output": weights.shape[0], "bias_term": bias}
    kernel = list(weights.shape[2:])
    for name, values, default in (("kernel_size", kernel, 0), ("stride", strides, 1), ("dilation", dilations, 1)):
        if any(value != default for value in values):
            settings[name] = _once(values)
    settings |= {"pad": _once(pads)} if any(pads) else {}
    return settings | ({"group": group} if group != 1 else {})


def _once(values: Sequence[int]) -> list[int]:
    return list(values[:1]) if len(set(values)) == 1 else list(values)


def even_padding(weights: Array, pads: Pads, dilations: Sequence[int]) -> tuple[Array, list[int]]:
    """Weights and padding of the same convolution with as much padding before as behind each axis.

    Where they differ, the smaller one grows, and zeros at that end of the kernel take the growth back.

    Raises:
        UnsupportedError: the difference is no multiple of the dilation.
    """
    even, zeros = [], [(0, 0), (0, 0)]
    for (before, behind), dilation in zip(pads, dilations, strict=True):
        pad = max(before, behind)
        if (pad - before) % dilation or (pad - behind) % dilation:
            raise UnsupportedError(f"its pads {before} and {behind} differ, which dilation {dilation} does not allow")
        even.append(pad)
        zeros.append(((pad - before) // dilation, (pad - behind) // dilation))
    return (np.pad(weights, zeros) if any(map(any, zeros)) else weights), even


@imports("ConvTranspose", form="Deconvolution; Slice where its output is cut unevenly")
def conv_transpose(view: NodeView) -> Tensor:
    x, weights, bias = view.blob(0), view.constant(1), _bias(view)
    axes, group = len(x.shape) - 2, view.number("group", 1)
    if axes < 1 or weights.ndim != axes + 2 or group < 1:
        raise UnsupportedError(f"its image has {axes} spatial axes and its weights have {weights.ndim - 2}")
    if view.attribute("auto_pad", "NOTSET") not in ("NOTSET", "VALID") or view.attribute("output_shape"):
        raise UnsupportedError("its auto_pad or output_shape is not imported; export it with pads")
    strides, dilations = window(view, weights.shape[2:])
    pads = view.numbers("pads", [0] * 2 * axes, 2 * axes)
    more = view.numbers("output_padding", [0] * axes, axes)
    cut = [(pads[i], pads[axes + i] - more[i]) for i in range(axes)]
    weights, cut = _grown(weights, cut, dilations)
    even = [max(min(pair), 0) for pair in cut]
    field = _settings(weights, strides, even, dilations, group, bias is not None)
    field["num_output"] = weights.shape[1] * group
    y = view.add("Deconvolution", [x], [weights, *([] if bias is None else [bias])], convolution_param=field)
    for axis, ((before, behind), pad) in enumerate(zip(cut, even, strict=True), 2):
        y = view.net.sliced(y, axis, before - pad, y.shape[axis] - (behind - pad), f"{view.name}/cut{axis}")
    return y


def _grown(weights: Array, cut: Pads, dilations: Sequence[int]) -> tuple[Array, Pads]:
    """Zeros behind the kernel where the output is to be larger than all windows together."""
    zeros, result = [(0, 0), (0, 0)], []
    for (before, behind), dilation in zip(cut, dilations, strict=True):
        missing = -(-max(-behind, 0) // dilation)
        if not 0 <= missing <= LARGEST_PAD or not 0 <= before <= LARGEST_PAD:
            raise UnsupportedError("its pads or its output_padding are beyond what can be imported")
        zeros.append((0, missing))
        result.append((before, behind + missing * dilation))
    return (np.pad(weights, zeros) if any(map(any, zeros)) else weights), result


@imports("Pad", form="padding of the Convolution that follows, else a depthwise Convolution; Slice where negative")
def pad_image(view: NodeView) -> Tensor:
    x = view.blob(0)
    before, behind = _pad_sizes(view, len(x.shape))
    if view.attribute("mode", "constant") != "constant" or _fill_value(view) != 0:
        raise UnsupportedError("it does not pad with zeros, and Caffe's layers cannot pad otherwise")
    for axis, (a, b) in enumerate(zip(before, behind, strict=True)):
        x = view.net.sliced(x, axis, max(-a, 0), x.shape[axis] - max(-b, 0), f"{view.name}/cut{axis}")
    pads = [(max(a, 0), max(b, 0)) for a, b in zip(before, behind, strict=True)]
    if not any(map(any, pads)):
        return x
    if len(x.shape) < 3 or any(map(any, pads[:2])) or max(map(max, pads)) > LARGEST_PAD:
        raise UnsupportedError("it pads the batch or the channels")
    if view.readers and all(node.op_type == "Conv" and _takes_pads(node, view.node.output[0]) for node in view.readers):
        shape = tuple(n + sum(p) for n, p in zip(x.shape, pads, strict=True))
        return Tensor(x.name, shape, tuple(pads[2:]))
    return _padded(view, x, pads[2:])


def _pad_sizes(view: NodeView, axes: int) -> tuple[list[int], list[int]]:
    pads = view.numbers("pads") if view.attribute("pads") is not None else view.whole_numbers(1)
    chosen = [view.axis(a, axes) for a in view.whole_numbers(3)] if view.has(3) else list(range(axes))
    if len(pads) != 2 * len(chosen):
        raise UnsupportedError(f"it has {len(pads)} pads for {len(chosen)} axes")
    before, behind = [0] * axes, [0] * axes
    for index, axis in enumerate(chosen):
        before[axis], behind[axis] = pads[index], pads[len(chosen) + index]
    return before, behind


def _fill_value(view: NodeView) -> float:
    if view.has(2):
        return float(view.constant(2).reshape(-1)[0]) if view.constant(2).size else 0.0
    return view.real("value", 0.0)


def _takes_pads(node: object, name: str) -> bool:
    """Whether a Conv reads the padded value as its image, and has explicit padding."""
    inputs, attributes = list(node.input), {a.name: a for a in node.attribute}  # type: ignore[attr-defined]
    auto = attributes["auto_pad"].s if "auto_pad" in attributes else b"NOTSET"
    return inputs.index(name) == 0 and inputs.count(name) == 1 and auto in (b"NOTSET", b"VALID")


def _padded(view: NodeView, x: Tensor, pads: Pads) -> Tensor:
    """Zeros around an image by a convolution of each channel with a one."""
    axes, channels = len(x.shape) - 2, x.shape[1]
    one = np.ones((channels, 1, *(1,) * axes), np.float32)
    weights, even = even_padding(one, pads, [1] * axes)
    field = _settings(weights, [1] * axes, even, [1] * axes, channels, False)
    if "kernel_size" not in field:
        field["kernel_size"] = [1]
    return view.add("Convolution", [x], [weights], convolution_param=field)


# -- products with constant matrices -------------------------------------------------------------------


@imports("Gemm", form="InnerProduct")
def gemm(view: NodeView) -> Tensor:
    x, weights = view.blob(0), np.asarray(view.constant(1), np.float32)
    if view.number("transA", 0) or len(x.shape) != 2 or weights.ndim != 2:
        raise UnsupportedError("its first factor is transposed or no matrix, or its second factor is no matrix")
    weights = weights if view.number("transB", 0) else weights.T
    weights = weights * np.float32(view.real("alpha", 1.0))
    bias = None
    if view.has(2):
        term = np.asarray(view.constant(2), np.float32) * np.float32(view.real("beta", 1.0))
        if math.prod(term.shape) not in (1, weights.shape[0]) or term.shape[-1:] not in ((), (1,), weights.shape[:1]):
            raise UnsupportedError(f"its bias has the shape {list(term.shape)}, not one number for each output")
        bias = np.broadcast_to(term.reshape(-1), weights.shape[:1])
    return _inner_product(view, x, weights, bias, 1)


@imports("MatMul", form="InnerProduct, where the second factor is constant")
def matmul(view: NodeView) -> Tensor:
    x, weights = view.blob(0), np.asarray(view.constant(1), np.float32)
    if weights.ndim != 2 or len(x.shape) < 2:
        raise UnsupportedError(f"its factors have {len(x.shape)} and {weights.ndim} axes; the second must have two")
    return _inner_product(view, x, weights.T, None, len(x.shape) - 1)


def _inner_product(view: NodeView, x: Tensor, weights: Array, bias: Array | None, axis: int) -> Tensor:
    field: dict[str, object] = {"num_output": weights.shape[0], "bias_term": bias is not None}
    field |= {"axis": axis} if axis != 1 else {}
    return view.add("InnerProduct", [x], [weights, *([] if bias is None else [bias])], inner_product_param=field)


# -- pooling -------------------------------------------------------------------------------------------

_Pool = caffe_pb2.PoolingParameter


@dataclass(frozen=True)
class _Axis:
    """Windows along one axis: ONNX's, and the padding on both sides that Caffe is given."""

    size: int
    kernel: int
    stride: int
    before: int
    behind: int
    ceil: bool

    @property
    def wanted(self) -> int:
        """How many windows ONNX has; with ceil_mode none that begins in the padding behind the image."""
        span = self.size + self.before + self.behind - self.kernel
        count = (-(-span // self.stride) if self.ceil else span // self.stride) + 1
        return count - 1 if self.ceil and (count - 1) * self.stride >= self.size + self.before else count

    def caffe(self, ceil: bool) -> int:
        """How many Caffe has with `before` on both sides."""
        span = self.size + 2 * self.before - self.kernel
        count = (-(-span // self.stride) if ceil else span // self.stride) + 1
        return count - 1 if self.before and (count - 1) * self.stride >= self.size + self.before else count

    def counts(self, before: int, behind: int) -> Array:
        """How many positions of each window lie between `before` zeros before and `behind` behind the image."""
        begins = np.arange(self.wanted) * self.stride - self.before
        return np.minimum(begins + self.kernel, self.size + behind) - np.maximum(begins, -before)


@imports("MaxPool", form="Pooling (MAX), rounded as needed; Slice where Caffe has more windows")
def max_pool(view: NodeView) -> Tensor:
    if len(view.node.output) > 1 and view.node.output[1]:
        raise UnsupportedError("its second output, the indices, is not imported")
    return _pooled(view, _Pool.MAX)


@imports("AveragePool", form="Pooling (AVE), rounded as needed; Scale where the divisors differ, Slice as for MaxPool")
def average_pool(view: NodeView) -> Tensor:
    return _pooled(view, _Pool.AVE)


def _pooled(view: NodeView, method: int) -> Tensor:
    x = view.blob(0)
    if len(x.shape) == 3:
        image = view.net.reshaped(x, (*x.shape, 1), f"{view.name}/image")
        y = _pool_image(view, image, method, 1)
        return view.net.reshaped(y, y.shape[:3], f"{view.name}/row")
    if len(x.shape) == 5 and _is_flat(view):
        image = view.net.reshaped(x, (*x.shape[:3], x.shape[3] * x.shape[4]), f"{view.name}/image")
        y = _pool_image(view, image, method, 1)
        return view.net.reshaped(y, (*y.shape[:3], *x.shape[3:]), f"{view.name}/volume")
    if len(x.shape) != 4:
        raise UnsupportedError(f"its image has {len(x.shape) - 2} spatial axes; Caffe pools over two")
    return _pool_image(view, x, method, 2)


def _is_flat(view: NodeView) -> bool:
    """Whether windows over three axes are of one element along the last two."""
    kernel, pads = view.numbers("kernel_shape", None, 3), view.numbers("pads", [0] * 6, 6)
    strides = view.numbers("strides", [1] * 3, 3)
    return kernel[1:] == strides[1:] == [1, 1] and not any(pads[axis] for axis in (1, 2, 4, 5))


def _pool_image(view: NodeView, x: Tensor, method: int, axes: int) -> Tensor:
    one, two = _axes(view, x, axes)
    ceil = _rounding(one, two)
    field: dict[str, object] = {"pool": method} | _pair("kernel", one.kernel, two.kernel)
    field |= _pair("stride", one.stride, two.stride) if (one.stride, two.stride) != (1, 1) else {}
    field |= _pair("pad", one.before, two.before) if (one.before, two.before) != (0, 0) else {}
    field |= {} if ceil else {"round_mode": _Pool.FLOOR}
    y = view.add("Pooling", [x], pooling_param=field)
    for axis, side in enumerate((one, two), 2):
        y = view.net.sliced(y, axis, 0, side.wanted, f"{view.name}/cut{axis}")
    return y if method == _Pool.MAX else _with_divisor(view, y, (one, two))


def _axes(view: NodeView, x: Tensor, axes: int) -> tuple[_Axis, _Axis]:
    """Return the windows along both axes of an image; only the first `axes` windows of the node count."""
    kernel = view.numbers("kernel_shape")
    if len(kernel) < axes:
        raise UnsupportedError(f"its kernel {kernel} has too few axes")
    strides, dilations = window(view, kernel)
    if max(dilations) > 1:
        raise UnsupportedError(f"its dilations are {dilations}; Caffe's pooling has none")
    sizes = [*x.shape[2 : 2 + axes], *[1] * (len(kernel) - axes)]
    pads = spatial_pads(view, sizes, kernel, strides)
    ceil = bool(view.number("ceil_mode", 0)) and view.attribute("auto_pad", "NOTSET") == "NOTSET"
    found = [_Axis(n, k, s, a, b, ceil) for n, k, s, (a, b) in zip(sizes[:axes], kernel, strides, pads, strict=False)]
    if axes == 1:
        found.append(_Axis(x.shape[3], 1, 1, 0, 0, False))
    if any(axis.before >= axis.kernel or axis.wanted < 1 for axis in found):
        raise UnsupportedError(f"its pads {pads} reach beyond its kernel {kernel}, or its image is too small")
    return found[0], found[1]


def _rounding(one: _Axis, two: _Axis) -> bool:
    """Whether to round up: where both ways have the windows, up, which is Caffe's default."""
    axes = (one, two)
    for exact in (True, False):
        for ceil in (True, False):
            counts = [axis.caffe(ceil) for axis in axes]
            good = [c == a.wanted if exact else c >= a.wanted for c, a in zip(counts, axes, strict=True)]
            starts = [(c - 1) * a.stride - a.before < a.size for c, a in zip(counts, axes, strict=True)]
            if all(good) and all(starts):
                return ceil
    raise UnsupportedError(
        "whether it rounds up or down along both axes, Caffe's pooling has fewer windows, or one behind the image"
    )


def _pair(name: str, height: int, width: int) -> dict[str, object]:
    if height == width:
        return {"kernel_size" if name == "kernel" else name: height}
    return {f"{name}_h": height, f"{name}_w": width}


def _with_divisor(view: NodeView, y: Tensor, axes: Sequence[_Axis]) -> Tensor:
    """The averages times Caffe's divisor over ONNX's, where they differ somewhere."""
    padded = bool(view.number("count_include_pad", 0))
    caffe = np.outer(*(axis.counts(axis.before, axis.before) for axis in axes))
    onnx = np.outer(*(axis.counts(axis.before, axis.behind) if padded else axis.counts(0, 0) for axis in axes))
    if np.array_equal(caffe, onnx):
        return y
    factors = (caffe / np.maximum(onnx, 1)).astype(np.float32)
    return view.net.add("Scale", [y], f"{view.name}/divisor", [factors], scale_param={"axis": 2, "num_axes": 2})


def global_pool(view: NodeView, x: Tensor, method: int) -> Tensor:
    """One window over the whole image (N, C, H, W)."""
    return view.add("Pooling", [x], pooling_param={"pool": method, "global_pooling": True})


@imports("GlobalAveragePool", "GlobalMaxPool", form="Pooling with global_pooling")
def whole_image(view: NodeView) -> Tensor:
    x, method = view.blob(0), _Pool.MAX if view.node.op_type == "GlobalMaxPool" else _Pool.AVE
    if len(x.shape) < 3:
        raise UnsupportedError("its image has no spatial axes")
    image = view.net.reshaped(x, (*x.shape[:3], int(np.prod(x.shape[3:]))), f"{view.name}/image")
    y = global_pool(view, image, method)
    return view.net.reshaped(y, (*x.shape[:2], *(1,) * (len(x.shape) - 2)), f"{view.name}/pixel")


@imports("MaxRoiPool", form="ROIPooling")
def roi_pool(view: NodeView) -> Tensor:
    height, width = view.numbers("pooled_shape", None, 2)
    field = {"pooled_h": height, "pooled_w": width, "spatial_scale": view.real("spatial_scale", 1.0)}
    return view.add("ROIPooling", [view.blob(0), view.blob(1)], roi_pooling_param=field)


# -- images of another size ----------------------------------------------------------------------------

LARGEST_SIDE = 2**14


@imports(
    "Resize",
    "Upsample",
    form="Deconvolution of ones (nearest, whole factors), Interp (linear, align_corners), else InnerProduct by axis",
)
def resize(view: NodeView) -> Tensor:
    x = view.blob()
    if len(x.shape) != 4:
        raise UnsupportedError("it resizes something else than an image (N, C, H, W)")
    scales, sizes = _target(view, x)
    if sizes[:2] != x.shape[:2]:
        raise UnsupportedError("it resizes the batch or the channels")
    if sizes == x.shape:
        return x
    mode, how = view.attribute("mode", "nearest"), _transformation(view)
    factor = sizes[2] // x.shape[2]
    whole = all(n == factor * old for n, old in zip(sizes[2:], x.shape[2:], strict=True))
    if mode == "nearest" and whole and how in ("asymmetric", "half_pixel") and _repeats(view, how, factor):
        return _repeated(view, x, factor)
    if mode == "linear" and how == "align_corners":
        return view.add("Interp", [x], interp_param={"height": sizes[2], "width": sizes[3]})
    return _by_products(view, x, scales, sizes)


def _target(view: NodeView, x: Tensor) -> tuple[list[float], tuple[int, ...]]:
    """The scale and the size of each axis."""
    if view.has(2) and view.constant(2).size or view.node.op_type == "Upsample":
        given = view.constant(1 if view.node.op_type == "Upsample" else 2).reshape(-1)
    elif view.has(3):
        whole = view.whole_numbers(3)
        sizes = _placed(view, [float(n) for n in whole], [float(n) for n in x.shape])
        return [a / b for a, b in zip(sizes, x.shape, strict=True)], _checked([int(n) for n in sizes])
    else:
        raise UnsupportedError("it has neither scales nor sizes")
    scales = _placed(view, [float(v) for v in given[:8]], [1.0] * 4)
    if not all(0 < scale < LARGEST_SIDE for scale in scales):
        raise UnsupportedError(f"its scales are {scales}")
    return scales, _checked([math.floor(size * scale) for size, scale in zip(x.shape, scales, strict=True)])


def _placed(view: NodeView, values: list[float], default: list[float]) -> list[float]:
    """Values for some axes among those for all."""
    axes = view.attribute("axes")
    if axes is not None:
        for axis, value in zip(axes, values, strict=False):
            default[view.axis(axis, 4)] = value
        return default
    if len(values) != 4:
        raise UnsupportedError(f"it has {len(values)} scales or sizes for 4 axes")
    return values


def _checked(sizes: list[int]) -> tuple[int, ...]:
    if any(size < 1 for size in sizes) or max(sizes[2:]) > LARGEST_SIDE:
        raise UnsupportedError(f"it makes the size {sizes}; sides of 1 to {LARGEST_SIDE} are possible")
    return tuple(sizes)


def _transformation(view: NodeView) -> str:
    if view.node.op_type == "Upsample" or view.opset < 11:
        return "asymmetric"
    return str(view.attribute("coordinate_transformation_mode", "half_pixel"))


def _repeats(view: NodeView, how: str, factor: int) -> bool:
    """Whether the nearest pixel of each group of `factor` is the one it came from."""
    at = _positions(how, factor * 3, 3, float(factor))
    nearest = _nearest(view, at)
    return bool(np.array_equal(np.clip(nearest, 0, 2), np.arange(3 * factor) // factor))


def _repeated(view: NodeView, x: Tensor, factor: int) -> Tensor:
    channels = x.shape[1]
    field = {"num_output": channels, "group": channels, "bias_term": False, "kernel_size": [factor], "stride": [factor]}
    return view.add("Deconvolution", [x], [np.ones((channels, 1, factor, factor))], convolution_param=field)


def _by_products(view: NodeView, x: Tensor, scales: list[float], sizes: tuple[int, ...]) -> Tensor:
    """Rows and then columns as sums of the old ones."""
    net, name = view.net, view.name
    for axis in (3, 2):
        if sizes[axis] == x.shape[axis]:
            continue
        weights = _weights(view, x.shape[axis], sizes[axis], scales[axis])
        order = [0, 1, 2, 3] if axis == 3 else [0, 1, 3, 2]
        x = net.permuted(x, order, f"{name}/order{axis}")
        field = {"num_output": sizes[axis], "bias_term": False, "axis": 3}
        x = net.add("InnerProduct", [x], f"{name}/axis{axis}", [weights], inner_product_param=field)
        x = net.permuted(x, order, f"{name}/back{axis}")
    return x


def _positions(how: str, target: int, size: int, scale: float) -> Array:
    """Where each new pixel lies among the old ones."""
    new = np.arange(target, dtype=np.float64)
    if how == "asymmetric":
        return new / scale
    if how == "align_corners":
        return new * (size - 1) / (target - 1) if target > 1 else np.zeros(1)
    if how == "pytorch_half_pixel" and target == 1:
        return np.zeros(1)
    if how not in ("half_pixel", "pytorch_half_pixel"):
        raise UnsupportedError(f"its coordinate_transformation_mode {how:.40} is not imported")
    return (new + 0.5) / scale - 0.5


def _nearest(view: NodeView, at: Array) -> Array:
    mode = view.attribute("nearest_mode", "round_prefer_floor")
    if view.node.op_type == "Upsample" or view.opset < 11 or mode == "floor":
        return np.floor(at).astype(np.int64)
    if mode == "ceil":
        return np.ceil(at).astype(np.int64)
    shift = np.ceil(at - 0.5) if mode == "round_prefer_floor" else np.floor(at + 0.5)
    return np.asarray(shift).astype(np.int64)


def _weights(view: NodeView, size: int, target: int, scale: float) -> Array:
    """(target, size): how much of each old pixel each new one has."""
    if view.number("antialias", 0) or view.number("exclude_outside", 0):
        raise UnsupportedError("antialias and exclude_outside are not imported")
    at, mode = _positions(_transformation(view), target, size, scale), view.attribute("mode", "nearest")
    rows, weights = np.arange(target), np.zeros((target, size))
    if mode == "nearest":
        weights[rows, np.clip(_nearest(view, at), 0, size - 1)] = 1
        return weights
    if mode not in ("linear", "cubic"):
        raise UnsupportedError(f"its mode {mode:.40} is not imported")
    first = np.floor(at).astype(np.int64)
    for offset, part in _kernel(view, mode, at - first):
        np.add.at(weights, (rows, np.clip(first + offset, 0, size - 1)), part)
    return weights


def _kernel(view: NodeView, mode: str, share: Array) -> list[tuple[int, Array]]:
    """The old pixels around each new one, from the one before it on, with their parts."""
    if mode == "linear":
        return [(0, 1 - share), (1, share)]
    a = view.real("cubic_coeff_a", -0.75)
    near = [((a + 2) * t - (a + 3)) * t * t + 1 for t in (share, 1 - share)]
    far = [((a * t - 5 * a) * t + 8 * a) * t - 4 * a for t in (1 + share, 2 - share)]
    return [(-1, far[0]), (0, near[0]), (1, near[1]), (2, far[1])]


# -- normalization, Softmax and reductions -------------------------------------------------------------

_Reduction = caffe_pb2.ReductionParameter
SOFTMAX_BY_AXIS = 13
"""From this version on Softmax is over one axis; before over all from it on."""


@imports("BatchNormalization", form="BatchNorm, Scale")
def batch_norm(view: NodeView) -> Tensor:
    if view.number("training_mode", 0) or sum(map(bool, view.node.output)) > 1:
        raise UnsupportedError("it is in training mode; export the model for inference (model.eval())")
    scale, bias, mean, variance = (np.asarray(view.constant(i), np.float32).reshape(-1) for i in range(1, 5))
    one = np.ones(1, np.float32)
    field = {"eps": view.real("epsilon", 1e-5), "use_global_stats": True}
    normal = view.net.add("BatchNorm", [view.blob()], f"{view.name}/bn", [mean, variance, one], batch_norm_param=field)
    return view.add("Scale", [normal], [scale, bias], scale_param={"bias_term": True})


@imports("LRN", form="LRN")
def local_response(view: NodeView) -> Tensor:
    field = {"local_size": view.number("size", 1), "alpha": view.real("alpha", 1e-4)}
    field |= {"beta": view.real("beta", 0.75), "k": view.real("bias", 1.0)}
    return view.add("LRN", [view.blob()], lrn_param=field)


@imports("Softmax", "LogSoftmax", form="Softmax; Log behind it for LogSoftmax")
def softmax(view: NodeView) -> Tensor:
    x = view.blob()
    by_axis = view.opset >= SOFTMAX_BY_AXIS
    axis = view.axis(view.number("axis", -1 if by_axis else 1), len(x.shape))
    logged = view.node.op_type == "LogSoftmax"
    shape = x.shape
    if not by_axis and math.prod(shape[axis + 1 :]) > 1:
        x = view.net.reshaped(x, (math.prod(shape[:axis]), math.prod(shape[axis:])), f"{view.name}/rows")
        axis = 1
    field = {"axis": axis} if axis != 1 else {}
    y = view.net.add("Softmax", [x], f"{view.name}/softmax" if logged else view.name, softmax_param=field)
    y = view.net.reshaped(y, shape, f"{view.name}/shape")
    return view.add("Log", [y]) if logged else y


@imports(
    "ReduceMean",
    "ReduceSum",
    "ReduceL1",
    "ReduceSumSquare",
    "ReduceMax",
    form="Pooling with global_pooling over an image; Reduction, with Permute and Reshape where needed",
)
def reduce(view: NodeView) -> Tensor:
    x = view.blob()
    axes = _reduced_axes(view, len(x.shape))
    if not axes:
        return x
    kept = [axis for axis in range(len(x.shape)) if axis not in axes]
    wanted = tuple(1 if axis in axes else size for axis, size in enumerate(x.shape))
    if not view.number("keepdims", 1):
        wanted = tuple(x.shape[axis] for axis in kept)
    y = _over_image(view, x, axes)
    if y is None:
        y = _over_last(view, view.net.permuted(x, [*kept, *axes], f"{view.name}/order"), len(kept))
    return view.net.reshaped(y, wanted, f"{view.name}/shape")


def _reduced_axes(view: NodeView, count: int) -> list[int]:
    given = view.whole_numbers(1) if view.has(1) else view.attribute("axes")
    if given is None or not len(given):
        return [] if view.number("noop_with_empty_axes", 0) else list(range(count))
    return sorted({view.axis(axis, count) for axis in given})


def _over_image(view: NodeView, x: Tensor, axes: Sequence[int]) -> Tensor | None:
    """A mean, sum or maximum over H and W; None if it is another one."""
    if len(x.shape) != 4 or list(axes) != [2, 3] or view.node.op_type not in ("ReduceMean", "ReduceMax", "ReduceSum"):
        return None
    y = global_pool(view, x, _Pool.MAX if view.node.op_type == "ReduceMax" else _Pool.AVE)
    if view.node.op_type != "ReduceSum":
        return y
    return view.net.linear(y, f"{view.name}/sum", float(x.shape[2] * x.shape[3]))


def _over_last(view: NodeView, x: Tensor, kept: int) -> Tensor:
    """A reduction over all axes but the first `kept`."""
    kind = view.node.op_type
    if kind == "ReduceMax":
        rows = (1, math.prod(x.shape[:kept]), math.prod(x.shape[kept:]), 1)
        return global_pool(view, view.net.reshaped(x, rows, f"{view.name}/rows"), _Pool.MAX)
    operations = {"ReduceMean": _Reduction.MEAN, "ReduceSum": _Reduction.SUM, "ReduceL1": _Reduction.ASUM}
    field = {"operation": operations.get(kind, _Reduction.SUMSQ), "axis": kept}
    if kept == len(x.shape):
        raise UnsupportedError("it reduces nothing")
    return view.add("Reduction", [x], reduction_param=field)


@imports("ReduceL2", form="Reduction (SUMSQ), Power")
def reduce_l2(view: NodeView) -> Tensor:
    x = view.blob()
    axes = _reduced_axes(view, len(x.shape))
    kept = [axis for axis in range(len(x.shape)) if axis not in axes]
    turned = view.net.permuted(x, [*kept, *axes], f"{view.name}/order")
    field = {"operation": _Reduction.SUMSQ, "axis": len(kept)}
    squares = view.net.add("Reduction", [turned], f"{view.name}/squares", reduction_param=field)
    wanted = tuple(1 if axis in axes else size for axis, size in enumerate(x.shape))
    if view.number("keepdims", 1):
        squares = view.net.reshaped(squares, wanted, f"{view.name}/shape")
    return view.net.linear(squares, view.name, power=0.5)


@imports("ArgMax", form="ArgMax; of equal elements the last")
def arg_max(view: NodeView) -> Tensor:
    x = view.blob()
    axis = view.axis(view.number("axis", 0), len(x.shape))
    y = view.add("ArgMax", [x], argmax_param={"axis": axis})
    if view.number("keepdims", 1):
        return y
    return view.net.reshaped(y, (*x.shape[:axis], *x.shape[axis + 1 :]), f"{view.name}/shape")


# -- elements moved, joined, cut and repeated ----------------------------------------------------------

LARGEST_INDEX = 2**31


@imports("Reshape", form="Reshape or Flatten; ShuffleChannel of ShuffleNet's three operators")
def reshape(view: NodeView) -> Tensor:
    x, dims = view.blob(), view.whole_numbers(1)
    if not view.number("allowzero", 0):
        dims = [x.shape[i] if size == 0 and i < len(x.shape) else size for i, size in enumerate(dims)]
    known = math.prod(size for size in dims if size != -1)
    if dims.count(-1) > 1 or min(dims, default=0) < -1 or (-1 in dims and (not known or math.prod(x.shape) % known)):
        raise UnsupportedError(f"{list(x.shape)} cannot be reshaped to {dims}")
    shape = tuple(math.prod(x.shape) // known if size == -1 else size for size in dims)
    return _shuffled(view, x, shape) or view.net.reshaped(x, shape, view.name)


def _shuffled(view: NodeView, x: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """ShuffleChannel in place of Reshape (N, g, C / g, …), Permute (0, 2, 1, …) and this Reshape; else None."""
    turn = view.net.producers.get(x.name)
    split = view.net.producers.get(turn.bottom[0]) if turn is not None and turn.type == "Permute" else None
    if turn is None or split is None or split.type != "Reshape" or len(x.shape) != len(shape) + 1 or len(shape) < 3:
        return None
    order = list(turn.permute_param.order)
    source = Tensor(split.bottom[0], shape)
    expected = (shape[0], x.shape[2], x.shape[1], *shape[2:])
    dims = [expected[i] if d == 0 else d for i, d in enumerate(split.reshape_param.shape.dim)]
    before = view.net.shapes.get(source.name)
    if order != [0, 2, 1, *range(3, len(x.shape))] or dims != list(expected) or before != shape:
        return None
    return view.add("ShuffleChannel", [source], shuffle_channel_param={"group": x.shape[2]})


@imports("Flatten", form="Flatten or Reshape")
def flatten(view: NodeView) -> Tensor:
    x = view.blob()
    given, axes = view.number("axis", 1), len(x.shape)
    axis = given if given == axes else view.axis(given, axes)
    return view.net.reshaped(x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])), view.name)


@imports("Squeeze", "Unsqueeze", form="Reshape or Flatten")
def change_axes(view: NodeView) -> Tensor:
    x = view.blob()
    given = view.whole_numbers(1) if view.has(1) else view.attribute("axes")
    if view.node.op_type == "Squeeze":
        found = range(len(x.shape)) if given is None else [view.axis(axis, len(x.shape)) for axis in given]
        gone = {axis for axis in found if given is not None or x.shape[axis] == 1}
        if any(x.shape[axis] != 1 for axis in gone):
            raise UnsupportedError(f"it removes an axis of {list(x.shape)} whose size is not 1")
        return view.net.reshaped(x, tuple(n for axis, n in enumerate(x.shape) if axis not in gone), view.name)
    if given is None or len(given) > 16:
        raise UnsupportedError("its axes are missing")
    shape = list(x.shape)
    for axis in sorted(view.axis(axis, len(x.shape) + len(given)) for axis in given):
        shape.insert(axis, 1)
    return view.net.reshaped(x, tuple(shape), view.name)


@imports("Transpose", form="Permute")
def transpose(view: NodeView) -> Tensor:
    x = view.blob()
    order = view.numbers("perm", list(range(len(x.shape)))[::-1], len(x.shape))
    if sorted(order) != list(range(len(x.shape))):
        raise UnsupportedError(f"its perm {order} does not name each of {len(x.shape)} axes once")
    return view.net.permuted(x, order, view.name)


@imports("Concat", form="Concat")
def concat(view: NodeView) -> Tensor:
    blobs = [view.blob(index) for index in range(len(view.inputs))]
    blobs = [blob for blob in blobs if math.prod(blob.shape)] or blobs
    axis = view.axis(view.number("axis", 1), len(blobs[0].shape))
    if len(blobs) == 1:
        return blobs[0]
    return view.add("Concat", blobs, concat_param={"axis": axis} if axis != 1 else {})


@imports("Split", form="Slice")
def split(view: NodeView) -> list[Value | None]:
    x, outputs = view.blob(), list(view.node.output)
    axis = view.axis(view.number("axis", 0), len(x.shape))
    given = view.whole_numbers(1) if view.has(1) else view.attribute("split")
    if given is None:
        step = -(-x.shape[axis] // len(outputs))
        given = [min(step, x.shape[axis] - i * step) for i in range(len(outputs))]
    sizes = [int(size) for size in given]
    if len(sizes) != len(outputs) or min(sizes) < 1 or sum(sizes) != x.shape[axis]:
        raise UnsupportedError(f"its parts {sizes[:16]} do not make up the {x.shape[axis]} elements of axis {axis}")
    if len(outputs) == 1:
        return [x]
    points = np.cumsum(sizes)[:-1].tolist()
    field = {"axis": axis, "slice_point": points}
    names = [name or f"{view.name}/{index}" for index, name in enumerate(outputs)]
    return list(view.net.add_many("Slice", [x], view.name, names, slice_param=field))


@imports("Slice", form="Slice; steps along spatial axes as a depthwise Convolution")
def cut(view: NodeView) -> Tensor:
    x = view.blob()
    settings = slice_settings(view, len(x.shape))
    strides: dict[int, int] = {}
    for begin, end, given, step in zip(*settings, strict=True):
        axis = view.axis(given, len(x.shape))
        if step < 1:
            raise UnsupportedError("it goes backwards")
        low, high, _ = slice(begin, end).indices(x.shape[axis])
        x = view.net.sliced(x, axis, low, high, f"{view.name}/{axis}" if len(settings[2]) > 1 else view.name)
        strides |= {axis: step} if step > 1 else {}
    return _strided(view, x, strides) if strides else x


def slice_settings(view: NodeView, axes: int) -> tuple[list[int], list[int], list[int], list[int]]:
    """Begins, ends, axes and steps of a Slice of a value with `axes` axes."""
    if view.attribute("starts") is not None:
        begins, ends = view.attribute("starts"), view.attribute("ends")
        return list(begins), list(ends), list(view.attribute("axes") or range(len(begins))), [1] * len(begins)
    begins, ends = view.whole_numbers(1), view.whole_numbers(2)
    chosen = view.whole_numbers(3) if view.has(3) else list(range(len(begins)))
    steps = view.whole_numbers(4) if view.has(4) else [1] * len(begins)
    if not len(begins) == len(ends) == len(chosen) == len(steps) <= axes:
        raise UnsupportedError("its starts, ends, axes and steps are not alike in number")
    return begins, ends, chosen, steps


def _strided(view: NodeView, x: Tensor, strides: dict[int, int]) -> Tensor:
    """Every n-th pixel, by a convolution of each channel with a one."""
    axes = len(x.shape) - 2
    if min(strides) < 2:
        raise UnsupportedError("it takes every n-th channel or image; only pixels can be skipped")
    field = {"num_output": x.shape[1], "group": x.shape[1], "bias_term": False, "kernel_size": [1]}
    field["stride"] = [strides.get(axis, 1) for axis in range(2, 2 + axes)]
    return view.add("Convolution", [x], [np.ones((x.shape[1], 1, *(1,) * axes))], convolution_param=field)


@imports("Gather", form="Slice and Reshape for one constant index; Embed for rows of a constant table")
def gather(view: NodeView) -> Tensor:
    table, index = view.value(0), view.value(1)
    if not isinstance(table, Tensor):
        return _embedded(view, np.asarray(table, np.float32))
    if isinstance(index, Tensor) or index.size != 1 or index.dtype.kind not in "iu":
        raise UnsupportedError("it takes more than one element, or one that is not constant")
    axis = view.axis(view.number("axis", 0), len(table.shape))
    at = view.axis(int(index.reshape(-1)[0]), table.shape[axis])
    one = view.net.sliced(table, axis, at, at + 1, f"{view.name}/slice")
    return view.net.reshaped(one, (*table.shape[:axis], *index.shape, *table.shape[axis + 1 :]), view.name)


def _embedded(view: NodeView, table: np.ndarray) -> Tensor:
    if table.ndim != 2 or view.number("axis", 0) not in (0, -2):
        raise UnsupportedError("it takes something else than rows of a matrix")
    field = {"input_dim": table.shape[0], "num_output": table.shape[1], "bias_term": False}
    return view.add("Embed", [view.blob(1)], [table], embed_param=field)


@imports("Expand", "Tile", form="Tile, with Reshape for new axes")
def repeat(view: NodeView) -> Tensor:
    x, sizes = view.blob(), view.whole_numbers(1)
    if view.node.op_type == "Expand":
        if len(sizes) > 16 or any(not 0 < size < LARGEST_INDEX for size in sizes):
            raise UnsupportedError(f"it expands to {sizes[:16]}")
        return view.net.expanded(x, np.broadcast_shapes(x.shape, tuple(sizes)), view.name)
    if len(sizes) != len(x.shape) or any(not 0 < size < LARGEST_INDEX for size in sizes):
        raise UnsupportedError(f"it repeats {sizes[:16]} times")
    return _tiled(view, x, sizes)


def _tiled(view: NodeView, x: Tensor, sizes: Sequence[int]) -> Tensor:
    for axis, tiles in enumerate(sizes):
        if tiles != 1:
            x = view.net.add("Tile", [x], f"{view.name}/{axis}", tile_param={"axis": axis, "tiles": tiles})
    return x


@imports("DepthToSpace", "SpaceToDepth", form="Reshape, Permute, Reshape")
def depth_to_space(view: NodeView) -> Tensor:
    x, block = view.blob(), view.number("blocksize", 0)
    if len(x.shape) != 4 or block < 1:
        raise UnsupportedError("it needs an image and a blocksize")
    n, c, h, w = x.shape
    if view.node.op_type == "SpaceToDepth":
        parts, order = (n, c, h // block, block, w // block, block), [0, 3, 5, 1, 2, 4]
        result = (n, c * block * block, h // block, w // block)
    elif view.attribute("mode", "DCR") == "DCR":
        parts, order = (n, block, block, c // block**2, h, w), [0, 3, 4, 1, 5, 2]
        result = (n, c // block**2, h * block, w * block)
    else:
        parts, order = (n, c // block**2, block, block, h, w), [0, 1, 4, 2, 5, 3]
        result = (n, c // block**2, h * block, w * block)
    turned = view.net.permuted(view.net.reshaped(x, parts, f"{view.name}/parts"), order, f"{view.name}/order")
    return view.net.reshaped(turned, result, view.name)
