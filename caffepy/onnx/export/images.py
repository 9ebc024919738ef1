"""Layers that change an image's size, and regions of images."""

from __future__ import annotations

import numpy as np

from caffepy.onnx.export.graph import LayerView, exports, product_of


@exports("Interp", form="Slice, Resize (linear, align_corners)", composite=True)
def interp(view: LayerView) -> str:
    param, value = view.param.interp_param, view.x
    height, width = view.bottoms[0].shape[2:]
    if param.pad_beg or param.pad_end:
        begin, ends = -param.pad_beg, (height + param.pad_end, width + param.pad_end)
        value = view.add("Slice", value, view.ints(begin, begin), view.ints(*ends), view.ints(2, 3))
    kept = tuple(size + param.pad_beg + param.pad_end for size in (height, width))
    wanted = view.tops[0].shape[2:]
    for axis, (size, target) in enumerate(zip(kept, wanted, strict=True), 2):
        if target == 1 and size > 1:  # the first pixel, where ONNX would divide by 0
            value = view.add("Slice", value, view.ints(0), view.ints(1), view.ints(axis))
    kept = tuple(min(size, target) if target == 1 else size for size, target in zip(kept, wanted, strict=True))
    if kept == wanted:
        return value if value != view.x else view.add("Identity", value)
    return _resized(view, value, "linear", "align_corners")


def _resized(view: LayerView, value: str, mode: str, transformation: str) -> str:
    size = view.add("Concat", _leading(view, value), view.ints(*view.tops[0].shape[2:]), axis=0)
    return view.add(
        "Resize", value, "", "", size, mode=mode, coordinate_transformation_mode=transformation, nearest_mode="floor"
    )


def _leading(view: LayerView, value: str) -> str:
    """N and C of a value, as the model runs."""
    return view.add("Slice", view.add("Shape", value), view.ints(0), view.ints(2))


@exports("Upsample", form="Resize (nearest); with a mask Reshape, ScatterElements")
def upsample(view: LayerView) -> str:
    if len(view.inputs) > 1:
        return _unpooled(view)
    return _resized(view, view.x, "nearest", "asymmetric")


def _unpooled(view: LayerView) -> str:
    from onnx import TensorProto

    height, width = view.tops[0].shape[2:]
    values, mask = (view.reshaped(value, (0, 0, -1)) for value in view.inputs)
    size = view.add("Concat", _leading(view, view.x), view.ints(height * width), axis=0)
    empty = view.add("Expand", view.floats(0), size)
    index = view.add("Cast", mask, to=TensorProto.INT64)
    return view.reshaped(view.add("ScatterElements", empty, index, values, axis=2), (0, 0, height, width))


@exports("ROIPooling", form="MaxRoiPool")
def roi_pooling(view: LayerView) -> str:
    param = view.param.roi_pooling_param
    sizes = [param.pooled_h, param.pooled_w]
    regions = view.inputs[1] if len(view.bottoms[1].shape) == 2 else view.reshaped(view.inputs[1], (-1, 5))
    return view.add("MaxRoiPool", view.x, regions, pooled_shape=sizes, spatial_scale=param.spatial_scale)


@exports("PriorBox", form="a constant")
def prior_box(view: LayerView) -> str:
    for blob in view.bottoms:
        view.refuse_varying(blob, (2, 3))
    view.layer.forward(view.bottoms, view.tops)
    boxes = np.asarray(view.tops[0].host_data())
    assert product_of(boxes.shape)
    return view.floats(boxes, "priors")
