"""What the layer types of this family become in ONNX and in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

from caffepy.layers.export_rules import (
    INT64,
    ONNX,
    TORCH,
    OnnxLayer,
    TorchLayer,
    call,
    exports,
    pair,
)

# -- ONNX ----------------------------------------------------------------------------------------------


@ONNX.exports("Interp", form="Slice, Resize (linear, align_corners)", composite=True)
def onnx_interp(view: OnnxLayer) -> str:
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
def onnx_upsample(view: OnnxLayer) -> str:
    if len(view.inputs) > 1:
        return _unpooled(view)
    return _resized(view, view.x, "nearest", "asymmetric")


def _unpooled(view: OnnxLayer) -> str:
    height, width = view.tops[0].shape[2:]
    values, mask = (view.reshaped(value, (0, 0, -1)) for value in view.inputs)
    size = view.add("Concat", _leading(view, view.x), view.ints(height * width), axis=0)
    empty = view.add("Expand", view.floats(0), size)
    index = view.add("Cast", mask, to=INT64)
    return view.reshaped(view.add("ScatterElements", empty, index, values, axis=2), (0, 0, height, width))


def _resized(view: OnnxLayer, value: str, mode: str, transformation: str) -> str:
    size = view.add("Concat", _leading(view, value), view.ints(*view.tops[0].shape[2:]), axis=0)
    return view.add(
        "Resize", value, "", "", size, mode=mode, coordinate_transformation_mode=transformation, nearest_mode="floor"
    )


def _leading(view: OnnxLayer, value: str) -> str:
    """N and C of a value, as the model runs."""
    return view.add("Slice", view.add("Shape", value), view.ints(0), view.ints(2))


exports(
    "BN",
    onnx="BatchNormalization; with SegNet's bn_mode LEARN ReduceMean, Sub, Mul, Add, Sqrt, Div",
    torch="nn.BatchNorm1d, BatchNorm2d or BatchNorm3d, together with a Scale behind it",
)(lambda view: view.as_type("BatchNorm"))


ONNX.exports("SpatialDropout", form="nothing, or Mul with scale_train: false")(lambda view: view.as_type("Dropout"))


# -- PyTorch -------------------------------------------------------------------------------------------


@TORCH.exports("Interp", form="F.interpolate (bilinear, align_corners), slices")
def torch_interp(code: TorchLayer) -> str:
    param, value = code.param.interp_param, code.x
    begin, end = (abs(pad) for pad in (param.pad_beg, param.pad_end))
    if begin or end:
        height, width = code.bottoms[0].shape[2:]
        value = f"{value}[:, :, {begin}:{height - end}, {begin}:{width - end}]"
    size = code.tops[0].shape[2:]
    return f'F.interpolate({value}, size={size}, mode="bilinear", align_corners=True)'


@TORCH.exports("Upsample", form="nn.Upsample (nearest); a class with a mask")
def torch_upsample(code: TorchLayer) -> str:
    size = code.tops[0].shape[2:]
    if len(code.inputs) > 1:
        return code.apply(call("Unpool", *size), *code.inputs)
    factors = [out // own for out, own in zip(size, code.bottoms[0].shape[2:], strict=True)]
    return code.apply(call("nn.Upsample", scale_factor=pair(factors)))


@TORCH.exports("SpatialDropout", form="nn.Dropout1d, Dropout2d or Dropout3d; with scale_train: false a factor")
def torch_spatial_dropout(code: TorchLayer) -> str | Sequence[str] | None:
    param = code.param.dropout_param
    if not param.scale_train or param.sample_weights_test or code.rank not in (3, 4, 5):
        return code.as_type("Dropout")
    return code.apply(call(f"nn.Dropout{code.rank - 2}d", param.dropout_ratio))
