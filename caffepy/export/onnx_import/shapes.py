"""Operators that move, join, cut and repeat elements."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from caffepy.export.onnx_import.graph import NodeView, Tensor, UnsupportedError, Value, imports

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
    begins, ends, axes, steps = _slice_settings(view, len(x.shape))
    strides: dict[int, int] = {}
    for begin, end, given, step in zip(begins, ends, axes, steps, strict=True):
        axis = view.axis(given, len(x.shape))
        if step < 1:
            raise UnsupportedError("it goes backwards")
        low, high, _ = slice(begin, end).indices(x.shape[axis])
        x = view.net.sliced(x, axis, low, high, f"{view.name}/{axis}" if len(axes) > 1 else view.name)
        strides |= {axis: step} if step > 1 else {}
    return _strided(view, x, strides) if strides else x


def _slice_settings(view: NodeView, axes: int) -> tuple[list[int], list[int], list[int], list[int]]:
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
