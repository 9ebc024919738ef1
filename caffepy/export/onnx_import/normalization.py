"""BatchNormalization, LRN, Softmax and reductions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from caffepy.export.onnx_import.graph import NodeView, Tensor, UnsupportedError, imports
from caffepy.export.onnx_import.vision import global_pool
from caffepy.formats.proto import caffe_pb2

_Pool, _Reduction = caffe_pb2.PoolingParameter, caffe_pb2.ReductionParameter
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
    "ReduceMean", "ReduceSum", "ReduceL1", "ReduceSumSquare", "ReduceMax",
    form="Pooling with global_pooling over an image; Reduction, with Permute and Reshape where needed",
)  # fmt: skip
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
