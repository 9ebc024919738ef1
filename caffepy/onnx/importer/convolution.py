"""Convolution in both directions, padding, and products with constant matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from caffepy.onnx.importer.builder import Tensor, UnsupportedError
from caffepy.onnx.importer.node import Array, NodeView, imports

Pads = list[tuple[int, int]]
LARGEST_PAD = 4096


def spatial_pads(view: NodeView, size: Sequence[int], spans: Sequence[int], strides: Sequence[int]) -> Pads:
    """Zeros before and behind each spatial axis, by `pads` or `auto_pad`.

    Args:
        view: the node.
        size: of the image.
        spans: of the kernel, dilated.
        strides: of the windows.
    """
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
