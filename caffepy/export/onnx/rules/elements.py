"""Layers that move, join, cut and reduce elements."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from caffepy.export.onnx.graph import LayerView, exports, product_of
from caffepy.formats.proto import caffe_pb2

_Eltwise, _Reduction = caffe_pb2.EltwiseParameter, caffe_pb2.ReductionParameter


@exports("Concat", form="Concat; with per_fla_fuse Reshape, Concat")
def concat(view: LayerView) -> str:
    param = view.param.concat_param
    if param.per_fla_fuse:
        behind = (1,) * (len(view.bottoms[0].shape) - 2)
        flat = [view.reshaped(value, (0, -1, *behind)) for value in view.inputs]
        return flat[0] if len(flat) == 1 else view.add("Concat", *flat, axis=1)
    axis = view.axis(param.concat_dim if param.HasField("concat_dim") else param.axis)
    return view.x if len(view.inputs) == 1 else view.add("Concat", *view.inputs, axis=axis)


@exports("Slice", form="Split")
def cut(view: LayerView) -> list[str]:
    param = view.param.slice_param
    axis = view.axis(param.slice_dim if param.HasField("slice_dim") else param.axis)
    if len(view.tops) == 1:
        return [view.x]
    view.refuse_varying(view.bottoms[0], [axis])
    sizes = view.ints(*(top.shape[axis] for top in view.tops))
    return view.add_many("Split", len(view.tops), view.x, sizes, axis=axis)


@exports("Eltwise", form="Add, Mul or Max; coefficients as Mul")
def eltwise(view: LayerView) -> str:
    param = view.param.eltwise_param
    if param.operation == _Eltwise.MAX:
        return view.add("Max", *view.inputs)
    operator, terms = ("Mul", list(view.inputs)) if param.operation == _Eltwise.PROD else ("Add", _weighted(view))
    value = terms[0]
    for term in terms[1:]:
        value = view.add(operator, value, term)
    return value


def _weighted(view: LayerView) -> list[str]:
    coefficients = list(view.param.eltwise_param.coeff) or [1.0] * len(view.inputs)
    return [view.scaled(value, factor) for value, factor in zip(view.inputs, coefficients, strict=True)]


@exports("Flatten", "Reshape", form="Reshape")
def reshape(view: LayerView) -> str:
    return view.in_shape_of(view.x, view.tops[0])


@exports("Permute", form="Transpose")
def permute(view: LayerView) -> str:
    order = list(view.param.permute_param.order)
    order += [axis for axis in range(len(view.bottoms[0].shape)) if axis not in order]
    return view.add("Transpose", view.x, perm=order)


@exports("Crop", form="Slice")
def crop(view: LayerView) -> str:
    param = view.param.crop_param
    axes = range(view.axis(param.axis), len(view.bottoms[0].shape))
    offsets = list(param.offset) or [0]
    begins = offsets if len(offsets) > 1 else offsets * len(axes)
    view.refuse_varying(view.tops[0], axes)
    ends = [begin + view.tops[0].shape[axis] for begin, axis in zip(begins, axes, strict=True)]
    return view.add("Slice", view.x, view.ints(*begins), view.ints(*ends), view.ints(*axes))


@exports("Tile", form="Tile")
def tile(view: LayerView) -> str:
    param, repeats = view.param.tile_param, [1] * len(view.bottoms[0].shape)
    repeats[view.axis(param.axis)] = param.tiles
    return view.add("Tile", view.x, view.ints(*repeats))


@exports("Reduction", form="ReduceSum, ReduceMean, ReduceL1 or ReduceSumSquare; Mul with coeff")
def reduction(view: LayerView) -> str:
    param, axes = view.param.reduction_param, len(view.bottoms[0].shape)
    operators = {_Reduction.SUM: "ReduceSum", _Reduction.MEAN: "ReduceMean", _Reduction.ASUM: "ReduceL1"}
    operator = operators.get(param.operation, "ReduceSumSquare")
    return view.scaled(view.reduce(operator, view.x, range(view.axis(param.axis), axes), keepdims=False), param.coeff)


@exports("Softmax", form="Softmax")
def softmax(view: LayerView) -> str:
    return view.add("Softmax", view.x, axis=view.axis(view.param.softmax_param.axis))


@exports("ArgMax", form="TopK of the reversed elements, Sub, Cast, Concat")
def arg_max(view: LayerView) -> str:
    param, shape = view.param.argmax_param, view.bottoms[0].shape
    axis = view.axis(param.axis) if param.HasField("axis") else 1
    value = view.x if param.HasField("axis") else view.reshaped(view.x, (0, -1))
    size = shape[axis] if param.HasField("axis") else product_of(shape[1:])
    view.refuse_varying(view.bottoms[0], [axis])
    ends = (view.ints(-1), view.ints(np.iinfo(np.int64).min), view.ints(axis), view.ints(-1))
    value = view.add("Slice", value, *ends)  # of equal elements Caffe takes the last first, and ONNX the first
    values, indices = view.add_many("TopK", 2, value, view.ints(param.top_k), axis=axis)
    if param.HasField("axis") and param.out_max_val:
        return values
    found = view.scaled(view.add("Cast", indices, to=TensorProto.FLOAT), -1, size - 1)
    if param.HasField("axis"):
        return found
    return view.in_shape_of(view.add("Concat", found, values, axis=1) if param.out_max_val else found, view.tops[0])


@exports("Embed", form="Cast, Gather, Add")
def embed(view: LayerView) -> str:
    index = view.add("Cast", view.x, to=TensorProto.INT64)
    rows = view.add("Gather", view.parameter(0), index, axis=0)
    return view.add("Add", rows, view.parameter(1)) if view.param.embed_param.bias_term else rows


@exports("BatchReindex", form="Cast, Gather")
def batch_reindex(view: LayerView) -> str:
    return view.add("Gather", view.x, view.add("Cast", view.inputs[1], to=TensorProto.INT64), axis=0)


@exports("Filter", form="Cast, Reshape, Compress; with filter_param Gather")
def filter_samples(view: LayerView) -> list[str]:
    if view.param.HasField("filter_param"):
        param = view.param.filter_param
        chosen_elements = view.ints(*np.flatnonzero(view.weights(0))[: param.num_output])
        return [view.add("Gather", value, chosen_elements, axis=view.axis(param.axis)) for value in view.inputs]
    whole = view.add("Cast", view.reshaped(view.inputs[-1], (-1,)), to=TensorProto.INT64)
    chosen = view.add("Cast", whole, to=TensorProto.BOOL)
    return [view.add("Compress", value, chosen, axis=0) for value in view.inputs[:-1]]


@exports("Parameter", form="a constant")
def parameter(view: LayerView) -> str:
    return view.parameter(0)
