"""DetectionOutput: boxes decoded, suppressed within each class by NonMaxSuppression, and the best kept.

Of equal scores the first count, as in Caffe's stable sort for `top_k`. For `keep_top_k` Caffe leaves their order to
`std::sort`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto

from caffepy.export.onnx.graph import LayerView, exports
from caffepy.layers.detection.boxes import CENTER_SIZE, CORNER

_LOWEST = float(np.finfo(np.float32).min)


@exports(
    "DetectionOutput",
    form="Mul, Exp, Add for the boxes; TopK, NonMaxSuppression, GatherND, ScatterElements, Compress, Concat",
    composite=True,
)  # fmt: skip
def detection_output(view: LayerView) -> str:
    param = view.param.detection_output_param
    if param.nms_param.eta != 1:
        raise view.error("nms_param.eta is not 1, which ONNX's NonMaxSuppression cannot say; leave it out")
    if param.HasField("use_polygon"):
        raise view.error("use_polygon has no ONNX form; export the net up to its location predictions and scores")
    classes = [c for c in range(param.num_classes) if c != param.background_label_id]
    boxes = _boxes(view)
    scores = view.reshaped(view.inputs[1], (0, -1, param.num_classes))
    scores = view.add("Transpose", scores, perm=[0, 2, 1])
    if len(classes) < param.num_classes:
        scores = view.add("Gather", scores, view.ints(*classes), axis=1)
    if param.share_location:
        chosen = _suppressed(view, view.reshaped(boxes, (0, -1, 4)), scores)
        chosen = _best(view, chosen, scores, len(classes))
    else:
        boxes = view.add("Transpose", boxes, perm=[0, 2, 1, 3])
        if len(classes) < param.num_classes:
            boxes = view.add("Gather", boxes, view.ints(*classes), axis=1)
        chosen = _suppressed_apart(view, boxes, scores, len(classes))
        chosen = _best(view, chosen, scores, len(classes))
    return _rows(view, chosen, boxes, scores, classes)


def _boxes(view: LayerView) -> str:
    """The decoded boxes (N, P, L, 4)."""
    param = view.param.detection_output_param
    locations = 1 if param.share_location else param.num_classes
    codes = view.reshaped(view.inputs[0], (0, -1, locations, 4))
    halves = view.add_many("Split", 2, view.reshaped(view.inputs[2], (2, -1, 1, 4)), view.ints(1, 1), axis=0)
    prior, variance = halves
    if not param.variance_encoded_in_target:
        codes = view.add("Mul", codes, variance)
    if param.code_type == CORNER:
        return view.add("Add", codes, prior)
    low, high = view.add_many("Split", 2, prior, view.ints(2, 2), axis=-1)
    extent = view.add("Sub", high, low)
    if param.code_type != CENTER_SIZE:
        return view.add("Add", view.add("Mul", codes, view.add("Concat", extent, extent, axis=-1)), prior)
    shift, growth = view.add_many("Split", 2, codes, view.ints(2, 2), axis=-1)
    center = view.add("Add", view.add("Mul", shift, extent), view.scaled(view.add("Add", low, high), 0.5))
    half = view.scaled(view.add("Mul", view.add("Exp", growth), extent), 0.5)
    return view.add("Concat", view.add("Sub", center, half), view.add("Add", center, half), axis=-1)


def _limits(param: Any) -> tuple[float, int]:
    """The score that a box must exceed, and how many of a class are looked at; -1: all."""
    least = param.confidence_threshold if param.HasField("confidence_threshold") else _LOWEST
    return least, param.nms_param.top_k if param.nms_param.HasField("top_k") else -1


def _candidates(view: LayerView, scores: str) -> str:
    """The scores, those beyond the best `top_k` of a class replaced by one that does not count."""
    _, top_k = _limits(view.param.detection_output_param)
    if not 0 <= top_k < view.bottoms[2].count // 8:
        return scores
    empty = view.add("Expand", view.floats(-np.inf), view.add("Shape", scores))
    if top_k == 0:
        return empty
    best, places = view.add_many("TopK", 2, scores, view.ints(top_k), axis=-1)
    return view.add("ScatterElements", empty, places, best, axis=2)


def _without_inverted(view: LayerView, boxes: str) -> str:
    """The boxes, inverted ones without extent: in Caffe they overlap no other, and ONNX would exchange their corners.

    Above a threshold of 1, which ONNX does not have, no box is suppressed; then none has an extent.
    """
    param = view.param.detection_output_param
    above = param.nms_param.nms_threshold > 1
    if param.code_type == CENTER_SIZE and not above:  # whose sides are exponentials
        return boxes
    low, high = view.add_many("Split", 2, boxes, view.ints(2, 2), axis=-1)
    return view.add("Concat", low, low if above else view.add("Max", low, high), axis=-1)


def _suppressed(view: LayerView, boxes: str, scores: str) -> str:
    """(image, class, box) of what is left, by boxes (N, P, 4) and scores (N, K, P)."""
    param = view.param.detection_output_param
    number = view.bottoms[2].count // 8
    threshold = min(param.nms_param.nms_threshold, 1)
    numbers = (view.ints(number), view.floats([threshold]), view.floats([_limits(param)[0]]))
    return view.add("NonMaxSuppression", _without_inverted(view, boxes), _candidates(view, scores), *numbers)


def _suppressed_apart(view: LayerView, boxes: str, scores: str, classes: int) -> str:
    """The same where each class has boxes of its own, (N, K, P, 4): each counts as an image."""
    number = view.bottoms[2].count // 8
    one = _suppressed(view, view.reshaped(boxes, (-1, number, 4)), view.reshaped(scores, (-1, 1, number)))
    image, _, box = view.add_many("Split", 3, one, view.ints(1, 1, 1), axis=1)
    count = view.ints(classes)
    return view.add("Concat", view.add("Div", image, count), view.add("Mod", image, count), box, axis=1)


def _best(view: LayerView, chosen: str, scores: str, classes: int) -> str:
    """Of each image those whose scores are among the best `keep_top_k`."""
    keep, number = view.param.detection_output_param.keep_top_k, view.bottoms[2].count // 8
    if not 0 <= keep < classes * number:
        return chosen
    found = view.add("GatherND", scores, chosen)
    if keep == 0:
        return view.add("Compress", chosen, view.add("Less", found, view.floats(-np.inf)), axis=0)
    empty = view.add("Expand", view.floats(-np.inf), view.add("Shape", scores))
    left = view.reshaped(view.add("ScatterND", empty, chosen, found), (0, -1))
    _, places = view.add_many("TopK", 2, left, view.ints(keep), axis=-1)
    ones = view.add("Expand", view.floats(1), view.add("Shape", places))
    zeros = view.add("Expand", view.floats(0), view.add("Shape", left))
    best = view.add("Reshape", view.add("ScatterElements", zeros, places, ones, axis=1), view.add("Shape", scores))
    return view.add("Compress", chosen, view.add("Greater", view.add("GatherND", best, chosen), view.floats(0)), axis=0)


def _rows(view: LayerView, chosen: str, boxes: str, scores: str, classes: list[int]) -> str:
    """(1, 1, D, 7): image, label, score and box; one row with -1 for each image where nothing was found."""
    image, kind, box = view.add_many("Split", 3, chosen, view.ints(1, 1, 1), axis=1)
    labels = view.add("Gather", view.floats(classes, "labels"), kind, axis=0)
    score = view.add("Unsqueeze", view.add("GatherND", scores, chosen), view.ints(1))
    if view.param.detection_output_param.share_location:
        corners = view.add("GatherND", view.reshaped(boxes, (0, -1, 4)), view.add("Concat", image, box, axis=1))
    else:
        corners = view.add("GatherND", boxes, chosen)
    first = view.add("Cast", image, to=TensorProto.FLOAT)
    rows = view.add("Concat", first, labels, score, corners, axis=1)
    rows = view.add("Concat", rows, _nothing(view, chosen, scores), axis=0)
    return view.reshaped(rows, (1, 1, -1, 7))


def _nothing(view: LayerView, chosen: str, scores: str) -> str:
    """A row (image, -1, ...) for each image if nothing was chosen, else no row."""
    count = view.add("Slice", view.add("Shape", scores), view.ints(0), view.ints(1))
    one, zero = (view.graph.constant(np.array(v), f"{view.layer.name}/number") for v in (1, 0))
    numbers = view.add("Range", zero, view.add("Squeeze", count, view.ints(0)), one)
    column = view.add("Unsqueeze", view.add("Cast", numbers, to=TensorProto.FLOAT), view.ints(1))
    others = view.add("Expand", view.floats([[-1.0] * 6]), view.add("Concat", count, view.ints(6), axis=0))
    found = view.add("Slice", view.add("Shape", chosen), view.ints(0), view.ints(1))
    none = view.add("Expand", view.add("Equal", found, view.ints(0)), count)
    return view.add("Compress", view.add("Concat", column, others, axis=1), none, axis=0)
