"""What the layer types of this family become in ONNX."""

from __future__ import annotations

from caffepy.layers.export_rules import ONNX, OnnxLayer


@ONNX.exports("ChannelScale", form="Reshape, Mul; with global_scale Mul", composite=True)
def channel_scale(view: OnnxLayer) -> str | list[str]:
    param = view.param.channel_scale_param
    value = view.x
    if param.global_scale:
        value = view.add("Mul", view.x, view.parameter(0)) if param.do_forward else value
        return [value, view.parameter(0)][: len(view.tops)]
    if param.do_forward:
        shape = view.shape_of(view.bottoms[0])
        value = view.add("Mul", view.x, view.reshaped(view.inputs[1], (shape[0], 1, *shape[2:])))
    return value
