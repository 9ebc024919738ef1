"""What the layer types of this family become in ONNX."""

from __future__ import annotations

import numpy as np

from caffepy.forks.ocr.dense_block import EPSILON
from caffepy.layers.export_rules import ONNX, OnnxLayer


@ONNX.exports("Lstm", form="LSTM; with one bottom only")
def clipped_lstm(view: OnnxLayer) -> str:
    if len(view.inputs) > 1:
        raise view.error("a second bottom, which says where sequences begin, cannot be exported")
    size = view.param.lstm_param.num_output
    order = [0, 2, 1, 3]  # i, f, o, g here; i, o, f, g there
    own, carried, bias = (
        blob.reshape(4, size, *blob.shape[1:])[order].reshape(1, 4 * size, *blob.shape[1:])
        for blob in map(view.weights, range(3))
    )
    shape = view.bottoms[0].shape
    streams = shape[1] if len(shape) > 2 else view.param.lstm_param.batch_size
    x = view.reshaped(view.x, (-1, streams, own.shape[2]))
    biases = np.concatenate([bias, np.zeros_like(bias)], axis=1)
    y = view.add(
        "LSTM", x, view.floats(own, "W"), view.floats(carried, "R"), view.floats(biases, "B"), hidden_size=size
    )
    return view.in_shape_of(y, view.tops[0])


@ONNX.exports("ContinuationIndicator", form="a constant")
def continuation_indicator(view: OnnxLayer) -> str:
    flags = np.ones(view.tops[0].shape)
    flags[0] = 0
    return view.floats(flags)


@ONNX.exports("DenseBlock", form="BatchNormalization, Relu, Conv and Concat for each transition", composite=True)
def dense_block(view: OnnxLayer) -> str:
    x = view.x
    for units in view.layer.transitions:
        added = x
        for unit in units:
            others = (view.floats(view.weights(index)) for index in unit.others)
            norm = view.add("BatchNormalization", added, *others, epsilon=EPSILON)
            weights = view.weights(unit.weights)[:, :, ::-1, ::-1]
            pads = [weights.shape[2] // 2] * 4
            added = view.add("Conv", view.add("Relu", norm), view.floats(weights, "weights"), pads=pads)
        x = view.joined([x, added], 1)
    return x
