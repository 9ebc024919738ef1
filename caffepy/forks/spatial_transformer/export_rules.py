"""What the layer types of this family become in ONNX."""

from __future__ import annotations

import numpy as np

from caffepy.layers.export_rules import ONNX, OnnxLayer


@ONNX.exports("PowerFile", form="Add", composite=True)
def power_file(view: OnnxLayer) -> str:
    return view.add("Add", view.x, view.floats(view.layer.shift()[:1]))


@ONNX.exports("SpatialTransformer", form="MatMul, Add, GridSample", composite=True)
def spatial_transformer(view: OnnxLayer) -> str:
    select, constant, lines = (np.asarray(view.layer.backend.to_host(a)) for a in view.layer.sampling_constants())
    theta = view.reshaped(view.inputs[1], [-1, select.shape[0]])
    if not select.size:
        raise view.error("has no predicted element of its matrix")
    matrix = view.add("Add", view.add("MatMul", theta, view.floats(select)), view.floats(constant))
    positions = view.add("MatMul", view.reshaped(matrix, [-1, 2, 3]), view.floats(lines))
    return view.sampled(view.reshaped(positions, [-1, 2, *view.tops[0].shape[2:]]))
