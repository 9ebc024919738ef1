"""Nodes whose inputs are all constant, computed while the model is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from caffepy.export.onnx_import.graph import Array, NodeView, UnsupportedError
from caffepy.export.onnx_import.model import to_array
from caffepy.export.onnx_import.rules import slice_settings
from caffepy.utils.registry import Registry

MAX_ELEMENTS = 2**26
"""Of a constant that is computed."""

Evaluator = Callable[[NodeView, list[Array]], "Array | list[Array]"]
EVALUATORS: Registry[Evaluator] = Registry("constant operator")
evaluates = EVALUATORS.register


def evaluate(view: NodeView, values: list[Array]) -> list[Array]:
    """A node's outputs.

    Raises:
        UnsupportedError: its inputs do not fit, or the result would be too large.
    """
    try:
        with np.errstate(all="ignore"):
            found = EVALUATORS.get(view.node.op_type)(view, values)
    except (ValueError, TypeError, IndexError, KeyError, OverflowError, ZeroDivisionError, MemoryError) as error:
        raise UnsupportedError(f"it cannot be computed from its constant inputs: {error}") from error
    results = found if isinstance(found, list) else [found]
    return [np.asarray(result) for result in results]


def _small(shape: Sequence[int]) -> tuple[int, ...]:
    if len(shape) > 32 or any(size < 0 for size in shape) or math.prod(shape) > MAX_ELEMENTS:
        raise UnsupportedError(f"it makes a constant of the shape {list(shape)[:8]}; {MAX_ELEMENTS} is the most")
    return tuple(int(size) for size in shape)


def _broadcast(values: list[Array]) -> list[Array]:
    _small(np.broadcast_shapes(*(value.shape for value in values)))
    return values


def _divided(a: Array, b: Array) -> Array:
    if a.dtype.kind in "iu":  # towards 0, as C does
        if not b.all():
            raise UnsupportedError("it divides by 0")
        return np.asarray(np.trunc(a / b)).astype(a.dtype)
    return np.asarray(a / b)


_BINARY: dict[str, Callable[[Array, Array], Any]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": _divided,
    "Equal": np.equal,
    "Less": np.less,
    "Greater": np.greater,
    "And": np.logical_and,
    "Or": np.logical_or,
    "Mod": np.mod,
    "LessOrEqual": np.less_equal,
    "GreaterOrEqual": np.greater_equal,
    "Max": np.maximum,
    "Min": np.minimum,
}
_UNARY: dict[str, Callable[[Array], Any]] = {
    "Identity": np.asarray,
    "Neg": np.negative,
    "Floor": np.floor,
    "Ceil": np.ceil,
    "Sqrt": np.sqrt,
    "Not": np.invert,
    "Abs": np.abs,
    "Exp": np.exp,
    "Log": np.log,
    "Reciprocal": np.reciprocal,
    "Round": np.round,
}


@evaluates(*_BINARY)
def binary(view: NodeView, values: list[Array]) -> Array:
    _broadcast(values)
    result = values[0]
    for other in values[1:]:
        result = np.asarray(_BINARY[view.node.op_type](result, other))
    return result


@evaluates(*_UNARY)
def unary(view: NodeView, values: list[Array]) -> Array:
    return np.asarray(_UNARY[view.node.op_type](values[0]))


@evaluates("Pow")
def power(view: NodeView, values: list[Array]) -> Array:
    _broadcast(values)
    return np.power(values[0].astype(np.float64), values[1]).astype(values[0].dtype)


@evaluates("Constant")
def constant(view: NodeView, values: list[Array]) -> Array:
    for one in view.node.attribute:
        if one.name == "value":
            return to_array(one.t, Path("model"))
        if one.name in ("value_float", "value_floats"):
            return np.asarray(helper.get_attribute_value(one), np.float32)
        if one.name in ("value_int", "value_ints"):
            return np.asarray(helper.get_attribute_value(one), np.int64)
    raise UnsupportedError("it has no value, or one that is no number")


@evaluates("ConstantOfShape")
def constant_of_shape(view: NodeView, values: list[Array]) -> Array:
    given = any(one.name == "value" for one in view.node.attribute)
    fill = constant(view, []) if given else np.zeros(1, np.float32)
    shape: Any = _small(values[0].reshape(-1).tolist())
    return np.full(shape, np.asarray(fill).reshape(-1)[0])


@evaluates("Cast")
def cast(view: NodeView, values: list[Array]) -> Array:
    kind = view.number("to", TensorProto.FLOAT)
    if kind == TensorProto.STRING:
        raise UnsupportedError("it makes strings")
    return values[0].astype(helper.tensor_dtype_to_np_dtype(kind))


@evaluates("Concat")
def concat(view: NodeView, values: list[Array]) -> Array:
    if sum(value.size for value in values) > MAX_ELEMENTS:
        raise UnsupportedError(f"it makes a constant of more than {MAX_ELEMENTS} elements")
    return np.concatenate(values, view.number("axis", 0))


@evaluates("Gather")
def gather(view: NodeView, values: list[Array]) -> Array:
    axis = view.axis(view.number("axis", 0), values[0].ndim)
    _small((*values[0].shape[:axis], *values[1].shape, *values[0].shape[axis + 1 :]))
    return np.take(values[0], values[1], axis)


@evaluates("Unsqueeze", "Squeeze")
def change_axes(view: NodeView, values: list[Array]) -> Array:
    axes = values[1].tolist() if len(values) > 1 else view.attribute("axes")
    if view.node.op_type == "Squeeze":
        return np.squeeze(values[0], None if axes is None else tuple(axes))
    return np.expand_dims(values[0], tuple(axes))


@evaluates("Slice")
def cut(view: NodeView, values: list[Array]) -> Array:
    parts = [slice(None)] * values[0].ndim
    for begin, end, axis, step in zip(*slice_settings(view, values[0].ndim), strict=True):
        stop = None if step < 0 and end < -values[0].shape[axis] else end
        parts[axis] = slice(begin, stop, step)
    return np.asarray(values[0][tuple(parts)])


@evaluates("Reshape")
def reshape(view: NodeView, values: list[Array]) -> Array:
    dims = values[1].tolist()
    if not view.number("allowzero", 0):
        dims = [values[0].shape[i] if size == 0 else size for i, size in enumerate(dims)]
    return np.asarray(values[0].reshape(dims))


@evaluates("Flatten")
def flatten(view: NodeView, values: list[Array]) -> Array:
    axis = view.number("axis", 1)
    return values[0].reshape(math.prod(values[0].shape[:axis]), -1)


@evaluates("Transpose")
def transpose(view: NodeView, values: list[Array]) -> Array:
    return np.transpose(values[0], view.attribute("perm"))


@evaluates("Expand")
def expand(view: NodeView, values: list[Array]) -> Array:
    shape = _small(np.broadcast_shapes(values[0].shape, tuple(values[1].tolist())))
    return np.asarray(np.broadcast_to(values[0], shape))


@evaluates("Tile")
def tile(view: NodeView, values: list[Array]) -> Array:
    _small([size * times for size, times in zip(values[0].shape, values[1].tolist(), strict=True)])
    return np.tile(values[0], values[1])


@evaluates("Range")
def span(view: NodeView, values: list[Array]) -> Array:
    begin, end, step = (value.reshape(-1)[0] for value in values)
    _small([max(math.ceil((float(end) - float(begin)) / float(step)), 0)])
    return np.arange(begin, end, step)


@evaluates("Where")
def where(view: NodeView, values: list[Array]) -> Array:
    return np.where(*_broadcast(values))


@evaluates("ReduceProd", "ReduceSum", "ReduceMax", "ReduceMin")
def reduce(view: NodeView, values: list[Array]) -> Array:
    axes = values[1].tolist() if len(values) > 1 else view.attribute("axes")
    function = getattr(np, view.node.op_type.removeprefix("Reduce").lower())
    chosen = None if axes is None else tuple(axes)
    return np.asarray(function(values[0], axis=chosen, keepdims=bool(view.number("keepdims", 1))), values[0].dtype)


@evaluates("Split")
def split(view: NodeView, values: list[Array]) -> list[Array]:
    axis, count = view.number("axis", 0), len(view.node.output)
    sizes = values[1].tolist() if len(values) > 1 else view.attribute("split")
    return list(np.split(values[0], count if sizes is None else np.cumsum(sizes)[:-1], axis))
