"""What the layer types of this family become in ONNX."""

from __future__ import annotations

from caffepy.layers.export_rules import INT64, ONNX, OnnxView, Values


@ONNX.exports("Interp", form="Slice, Resize (linear, align_corners)", composite=True)
def interp(view: OnnxView) -> str:
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


@ONNX.exports("Upsample", form="Resize (nearest); with a mask Reshape, ScatterElements")
def upsample(view: OnnxView) -> str:
    if len(view.inputs) > 1:
        return _unpooled(view)
    return _resized(view, view.x, "nearest", "asymmetric")


def _unpooled(view: OnnxView) -> str:
    height, width = view.tops[0].shape[2:]
    values, mask = (view.reshaped(value, (0, 0, -1)) for value in view.inputs)
    size = view.add("Concat", _leading(view, view.x), view.ints(height * width), axis=0)
    empty = view.add("Expand", view.floats(0), size)
    index = view.add("Cast", mask, to=INT64)
    return view.reshaped(view.add("ScatterElements", empty, index, values, axis=2), (0, 0, height, width))


def _resized(view: OnnxView, value: str, mode: str, transformation: str) -> str:
    size = view.add("Concat", _leading(view, value), view.ints(*view.tops[0].shape[2:]), axis=0)
    return view.add(
        "Resize", value, "", "", size, mode=mode, coordinate_transformation_mode=transformation, nearest_mode="floor"
    )


def _leading(view: OnnxView, value: str) -> str:
    """N and C of a value, as the model runs."""
    return view.add("Slice", view.add("Shape", value), view.ints(0), view.ints(2))


@ONNX.exports("BN", form="BatchNormalization; with SegNet's bn_mode LEARN ReduceMean, Sub, Mul, Add, Sqrt, Div")
def normalised(view: OnnxView) -> Values:
    return ONNX.apply("BatchNorm", view)
