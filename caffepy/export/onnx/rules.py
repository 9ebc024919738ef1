"""What layer types of Caffe become in ONNX alone, one function a type, and how operators of shared rules are written.

DetectionOutput decodes boxes, suppresses them within each class by NonMaxSuppression, and keeps the best. Of equal
scores the first count, as in Caffe's stable sort for `top_k`. For `keep_top_k` Caffe leaves their order to `std::sort`.

LSTM and RNN are unrolled over time steps. Caffe rounds the number of pooling windows up and cuts the last one off;
explicit padding gives the same.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.export.rules import LEAST_EPS, axes_behind, read_beyond_padding
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.detection.boxes import CENTER_SIZE, CORNER
from caffepy.layers.export_rules import BOOL, FLOAT, INT64, ONNX, OnnxLayer, Windows
from caffepy.layers.normalization import FEATURE_EPS

# -- operators of shared rules -------------------------------------------------------------------------


def _part(view: OnnxLayer, x: str, begins: list[int], ends: list[int], axes: range) -> str:
    view.refuse_varying(view.tops[0], axes)
    return view.add("Slice", x, tuple(begins), tuple(ends), tuple(axes))


def _local_response(view: OnnxLayer, x: str, size: int, alpha: float, beta: float) -> str:
    image, half = view.bottoms[0].shape[2:], (size - 1) // 2
    squares = view.average(view.add("Mul", x, x), Windows(image, image, (size, size), (1, 1), (half, half)))
    return view.add("Mul", x, view.add("Pow", view.scaled(squares, alpha, 1.0), -beta))


def _mean_variance(view: OnnxLayer, x: str, axes: tuple[int, ...], eps: float, scale: bool) -> str:
    centred = view.add("Sub", x, view.reduce("ReduceMean", x, axes))
    if not scale:
        return centred
    variance = view.reduce("ReduceMean", view.add("Mul", centred, centred), axes)
    return view.add("Div", centred, view.scaled(view.add("Sqrt", variance), 1, eps))


def _operand(view: OnnxLayer, index: int) -> str:
    """A parameter with axes of size 1 behind its own, so that ONNX broadcasts it as Caffe does."""
    shape = view.layer.blobs[index].shape
    return view.parameter(index, (*shape, *(1,) * axes_behind(view, len(shape))))


def _scale(view: OnnxLayer, x: str) -> str:
    value = view.add("Mul", x, _operand(view, 0))
    return view.add("Add", value, _operand(view, 1)) if view.param.scale_param.bias_term else value


def _linear(view: OnnxLayer, x: str, weights: NDArray[np.float32], axis: int) -> str:
    param, shape = view.param.inner_product_param, view.bottoms[0].shape
    if axis == 1:
        value = x if view.rank == 2 else view.add("Flatten", x, axis=1)
        bias = [view.parameter(1)] if param.bias_term else []
        return view.add("Gemm", value, view.floats(weights, "W"), *bias, transB=0 if param.transpose else 1)
    rows = view.reshaped(x, (-1, math.prod(shape[axis:])))
    value = view.add("MatMul", rows, view.floats(weights if param.transpose else weights.T, "W"))
    value = view.add("Add", value, view.parameter(1)) if param.bias_term else value
    return view.in_shape_of(value, view.tops[0])


_OPERATORS: dict[str, Any] = {
    "Behind": lambda view, x, own, count: view.add("Unsqueeze", x, tuple(range(own, own + count))),
    "Bias": lambda view, x: view.add("Add", x, _operand(view, 0)),
    "Dropout": lambda view, x, ratio: x,
    "Exponential": lambda view, x, factor, term: view.scaled(view.add("Exp", view.scaled(x, factor)), math.exp(term)),
    "Flattened": lambda view, x: view.in_shape_of(x, view.tops[0]),
    "Full": lambda view, x, value: view.add("Expand", view.floats(value), view.add("Shape", x)),
    "Linear": _linear,
    "LocalResponse": _local_response,
    "MeanVariance": _mean_variance,
    "Part": _part,
    "Power": lambda view, x, power: view.add("Mul", x, x) if power == 2 else view.add("Pow", x, power),
    "Reduction": lambda view, x, kind, first: view.reduce(kind, x, range(first, view.rank), keepdims=False),
    "Scale": _scale,
    "Swish": lambda view, x, beta: view.add("Mul", x, view.add("Sigmoid", view.scaled(x, beta))),
}
ONNX.operators.update(_OPERATORS)

# -- functions of each element -------------------------------------------------------------------------

ONNX.exports("Parameter", form="a constant")(lambda view: view.parameter(0))


@ONNX.exports("PReLU", form="PRelu")
def prelu(view: OnnxLayer) -> str:
    shape = (1,) if not view.layer.blobs[0].shape else (-1, *(1,) * (view.rank - 2))
    return view.add("PRelu", view.x, view.parameter(0, shape))


# -- DetectionOutput -----------------------------------------------------------------------------------

_LOWEST = float(np.finfo(np.float32).min)


@ONNX.exports(
    "DetectionOutput",
    form="Mul, Exp, Add for the boxes; TopK, NonMaxSuppression, GatherND, ScatterElements, Compress, Concat",
    composite=True,
)
def detection_output(view: OnnxLayer) -> str:
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


def _boxes(view: OnnxLayer) -> str:
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


def _candidates(view: OnnxLayer, scores: str) -> str:
    """The scores, those beyond the best `top_k` of a class replaced by one that does not count."""
    _, top_k = _limits(view.param.detection_output_param)
    if not 0 <= top_k < view.bottoms[2].count // 8:
        return scores
    empty = view.add("Expand", view.floats(-np.inf), view.add("Shape", scores))
    if top_k == 0:
        return empty
    best, places = view.add_many("TopK", 2, scores, view.ints(top_k), axis=-1)
    return view.add("ScatterElements", empty, places, best, axis=2)


def _without_inverted(view: OnnxLayer, boxes: str) -> str:
    """The boxes, inverted ones without extent: in Caffe they overlap no other, and ONNX would exchange their corners.

    Above a threshold of 1, which ONNX does not have, no box is suppressed; then none has an extent.
    """
    param = view.param.detection_output_param
    above = param.nms_param.nms_threshold > 1
    if param.code_type == CENTER_SIZE and not above:  # whose sides are exponentials
        return boxes
    low, high = view.add_many("Split", 2, boxes, view.ints(2, 2), axis=-1)
    return view.add("Concat", low, low if above else view.add("Max", low, high), axis=-1)


def _suppressed(view: OnnxLayer, boxes: str, scores: str) -> str:
    """(image, class, box) of what is left, by boxes (N, P, 4) and scores (N, K, P)."""
    param = view.param.detection_output_param
    number = view.bottoms[2].count // 8
    threshold = min(param.nms_param.nms_threshold, 1)
    numbers = (view.ints(number), view.floats([threshold]), view.floats([_limits(param)[0]]))
    return view.add("NonMaxSuppression", _without_inverted(view, boxes), _candidates(view, scores), *numbers)


def _suppressed_apart(view: OnnxLayer, boxes: str, scores: str, classes: int) -> str:
    """The same where each class has boxes of its own, (N, K, P, 4): each counts as an image."""
    number = view.bottoms[2].count // 8
    one = _suppressed(view, view.reshaped(boxes, (-1, number, 4)), view.reshaped(scores, (-1, 1, number)))
    image, _, box = view.add_many("Split", 3, one, view.ints(1, 1, 1), axis=1)
    count = view.ints(classes)
    return view.add("Concat", view.add("Div", image, count), view.add("Mod", image, count), box, axis=1)


def _best(view: OnnxLayer, chosen: str, scores: str, classes: int) -> str:
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


def _rows(view: OnnxLayer, chosen: str, boxes: str, scores: str, classes: list[int]) -> str:
    """(1, 1, D, 7): image, label, score and box; one row with -1 for each image where nothing was found."""
    image, kind, box = view.add_many("Split", 3, chosen, view.ints(1, 1, 1), axis=1)
    labels = view.add("Gather", view.floats(classes, "labels"), kind, axis=0)
    score = view.add("Unsqueeze", view.add("GatherND", scores, chosen), view.ints(1))
    if view.param.detection_output_param.share_location:
        corners = view.add("GatherND", view.reshaped(boxes, (0, -1, 4)), view.add("Concat", image, box, axis=1))
    else:
        corners = view.add("GatherND", boxes, chosen)
    first = view.add("Cast", image, to=FLOAT)
    rows = view.add("Concat", first, labels, score, corners, axis=1)
    rows = view.add("Concat", rows, _nothing(view, chosen, scores), axis=0)
    return view.reshaped(rows, (1, 1, -1, 7))


def _nothing(view: OnnxLayer, chosen: str, scores: str) -> str:
    """A row (image, -1, ...) for each image if nothing was chosen, else no row."""
    count = view.add("Slice", view.add("Shape", scores), view.ints(0), view.ints(1))
    one, zero = (view.target.constant(np.array(v), f"{view.layer.name}/number") for v in (1, 0))
    numbers = view.add("Range", zero, view.add("Squeeze", count, view.ints(0)), one)
    column = view.add("Unsqueeze", view.add("Cast", numbers, to=FLOAT), view.ints(1))
    others = view.add("Expand", view.floats([[-1.0] * 6]), view.add("Concat", count, view.ints(6), axis=0))
    found = view.add("Slice", view.add("Shape", chosen), view.ints(0), view.ints(1))
    none = view.add("Expand", view.add("Equal", found, view.ints(0)), count)
    return view.add("Compress", view.add("Concat", column, others, axis=1), none, axis=0)


# -- elements moved and reduced -----------------------------------------------------------


@ONNX.exports("ArgMax", form="TopK of the reversed elements, Sub, Cast, Concat")
def arg_max(view: OnnxLayer) -> str:
    param, shape = view.param.argmax_param, view.bottoms[0].shape
    axis = view.axis(param.axis) if param.HasField("axis") else 1
    value = view.x if param.HasField("axis") else view.reshaped(view.x, (0, -1))
    size = shape[axis] if param.HasField("axis") else math.prod(shape[1:])
    view.refuse_varying(view.bottoms[0], [axis])
    ends = (view.ints(-1), view.ints(np.iinfo(np.int64).min), view.ints(axis), view.ints(-1))
    value = view.add("Slice", value, *ends)  # of equal elements Caffe takes the last first, and ONNX the first
    values, indices = view.add_many("TopK", 2, value, view.ints(param.top_k), axis=axis)
    if param.HasField("axis") and param.out_max_val:
        return values
    found = view.scaled(view.add("Cast", indices, to=FLOAT), -1, size - 1)
    if param.HasField("axis"):
        return found
    return view.in_shape_of(view.add("Concat", found, values, axis=1) if param.out_max_val else found, view.tops[0])


@ONNX.exports("Embed", form="Cast, Gather, Add")
def embed(view: OnnxLayer) -> str:
    index = view.add("Cast", view.x, to=INT64)
    rows = view.add("Gather", view.parameter(0), index, axis=0)
    return view.add("Add", rows, view.parameter(1)) if view.param.embed_param.bias_term else rows


@ONNX.exports("Filter", form="Cast, Reshape, Compress; with filter_param Gather")
def filter_samples(view: OnnxLayer) -> list[str]:
    if view.param.HasField("filter_param"):
        param = view.param.filter_param
        chosen_elements = view.ints(*np.flatnonzero(view.weights(0))[: param.num_output])
        return [view.add("Gather", value, chosen_elements, axis=view.axis(param.axis)) for value in view.inputs]
    whole = view.add("Cast", view.reshaped(view.inputs[-1], (-1,)), to=INT64)
    chosen = view.add("Cast", whole, to=BOOL)
    return [view.add("Compress", value, chosen, axis=0) for value in view.inputs[:-1]]


# -- normalization, and products and sums by channel ---------------------------------------------------


@ONNX.exports("BatchNorm", form="BatchNormalization; with use_global_stats: false ReduceMean, Sub, Mul, Add, Sqrt, Div")
def batch_norm(view: OnnxLayer) -> str:
    layer = view.layer
    channels = layer.blobs[0].shape[0]
    if len(view.tops) > 1:
        raise view.error("its tops with the batch's statistics cannot be exported; leave them out")
    ends = [view.parameter(index) for index in layer.learned] if layer.scale_bias else []
    if not layer.uses_stored:
        return _by_batch(view, ends)
    ends = ends or [view.floats(np.ones(channels), "scale"), view.floats(np.zeros(channels), "bias")]
    mean, variance, epsilon = layer.stored_statistics()
    values = [*ends, view.floats(mean, "mean"), view.floats(variance, "variance")]
    return view.add("BatchNormalization", view.x, *values, epsilon=epsilon)


def _by_batch(view: OnnxLayer, ends: list[str]) -> str:
    axes = [axis for axis in range(view.rank) if axis != 1]
    centred = view.add("Sub", view.x, view.reduce("ReduceMean", view.x, axes))
    variance = view.reduce("ReduceMean", view.add("Mul", centred, centred), axes)
    value = view.add("Div", centred, view.add("Sqrt", view.scaled(variance, 1, view.layer.normalisation().epsilon)))
    shape = (-1, *(1,) * (view.rank - 2))
    if not ends:
        return value
    scale, bias = (view.parameter(index, shape) for index in view.layer.learned)
    return view.add("Add", view.add("Mul", value, scale), bias)


@ONNX.exports("Axpy", form="Reshape, Mul, Add")
def axpy(view: OnnxLayer) -> str:
    factors = view.reshaped(view.x, (0, 0, *(1,) * (len(view.bottoms[1].shape) - 2)))
    return view.add("Add", view.add("Mul", view.inputs[1], factors), view.inputs[2])


@ONNX.exports(
    "Normalize",
    form="Mul, ReduceSum, Add, Sqrt, Div, Mul; with normalize_param ReduceL1 for its L1, and no last Mul",
    composite=True,
)
def normalize(view: OnnxLayer) -> str | list[str]:
    if not view.layer.blobs:
        return _feature_normalize(view)
    param, axes = view.param.norm_param, view.rank
    summed = range(1, axes) if param.across_spatial else (1,)
    total = view.reduce("ReduceSum", view.add("Mul", view.x, view.x), tuple(summed))
    length = view.add("Sqrt", view.scaled(total, 1, max(param.eps, LEAST_EPS)))
    shape = () if param.channel_shared else (-1, *(1,) * (axes - 2))
    return view.add("Mul", view.add("Div", view.x, length), view.parameter(0, shape))


def _feature_normalize(view: OnnxLayer) -> list[str]:
    """Normalize of caffe-windows, with its norm as a second top."""
    kind = view.param.normalize_param.normalize_type
    if kind == "L1":
        length = view.scaled(view.reduce("ReduceL1", view.x, (1,)), 1, FEATURE_EPS[kind])
    else:
        total = view.reduce("ReduceSum", view.add("Mul", view.x, view.x), (1,))
        length = view.add("Sqrt", view.scaled(total, 1, FEATURE_EPS[kind]))
    tops = [view.add("Div", view.x, length)]
    return tops if len(view.tops) == 1 else [*tops, view.in_shape_of(length, view.tops[1])]


# -- recurrent layers ----------------------------------------------------------------------------------


class _Unrolled:
    """What LSTM and RNN share: the sums that the input brings to each time step, and what is carried on.

    Args:
        view: the layer.
        states: how many states it has.
        sums: S / D.
    """

    def __init__(self, view: OnnxLayer, states: int, sums: int) -> None:
        self.view = view
        param = view.param.recurrent_param
        steps, streams = view.bottoms[0].shape[:2]
        view.refuse_varying(view.bottoms[0], (0, 1))
        self.steps, self.streams, self.size, self.rows = steps, streams, param.num_output, sums * param.num_output
        exposed = states if param.expose_hidden else 0
        self.has_static = len(view.bottoms) > 2 + exposed
        shape = (streams, self.size)
        self.states = [view.reshaped(value, shape) for value in view.inputs[len(view.inputs) - exposed :] if exposed]
        self.states = self.states or [view.floats([[0.0] * self.size] * streams, "zeros") for _ in range(states)]
        self.inputs = view.add_many("Split", steps, self._input_sums(), view.ints(*[1] * steps), axis=0)
        column = view.reshaped(view.inputs[1], (steps, streams, 1))
        self.conts = view.add_many("Split", steps, column, view.ints(*[1] * steps), axis=0)

    def _input_sums(self) -> str:
        """W x + b + W_static x_static, (T, N, S)."""
        view = self.view
        flat = view.reshaped(view.x, (self.steps * self.streams, math.prod(view.bottoms[0].shape[2:])))
        sums = view.add("Gemm", flat, view.parameter(0), view.parameter(1), transB=1)
        sums = view.reshaped(sums, (self.steps, self.streams, self.rows))
        if not self.has_static:
            return sums
        fixed = view.reshaped(view.inputs[2], (self.streams, math.prod(view.bottoms[2].shape[1:])))
        return view.add("Add", sums, view.add("Gemm", fixed, view.parameter(2), transB=1))

    def at(self, step: int, hidden: str, weights: str) -> tuple[str, str]:
        """The sums of a time step, (N, S), and its `cont`, (N, 1)."""
        view = self.view
        cont = view.reshaped(self.conts[step], (self.streams, 1))
        own = view.reshaped(self.inputs[step], (self.streams, self.rows))
        return view.add("Gemm", view.add("Mul", hidden, cont), weights, own, transB=1), cont

    def tops(self, outputs: list[str], last: list[str]) -> list[str]:
        """The layer's tops: all outputs as (T, N, D), and the last states where they are exposed."""
        view, shape = self.view, (1, self.streams, self.size)
        rows = [view.reshaped(value, shape) for value in outputs]
        whole = view.add("Concat", *rows, axis=0)
        exposed = view.param.recurrent_param.expose_hidden
        return [whole, *(view.reshaped(value, shape) for value in last if exposed)]


@ONNX.exports("LSTM", form="Gemm, Sigmoid, Tanh, Mul, Add for each time step; states begin at 0", composite=True)
def lstm(view: OnnxLayer) -> list[str]:
    unrolled = _Unrolled(view, 2, 4)
    weights = view.parameter(len(view.layer.blobs) - 1)
    (hidden, cell), outputs = unrolled.states, []
    for step in range(unrolled.steps):
        sums, cont = unrolled.at(step, hidden, weights)
        hidden, cell = _unit(view, sums, cell, cont, unrolled.size)
        outputs.append(hidden)
    return unrolled.tops(outputs, [hidden, cell])


def _unit(view: OnnxLayer, sums: str, cell: str, cont: str, size: int) -> tuple[str, str]:
    """h and c of a time step."""
    gates = view.add_many("Split", 4, sums, view.ints(*[size] * 4), axis=-1)
    into, forget, out = (view.add("Sigmoid", gate) for gate in gates[:3])
    kept = view.add("Mul", view.add("Mul", cell, cont), forget)
    cell = view.add("Add", kept, view.add("Mul", into, view.add("Tanh", gates[3])))
    return view.add("Mul", out, view.add("Tanh", cell)), cell


@ONNX.exports("LSTMUnit", form="Split, Sigmoid, Tanh, Mul, Add", composite=True)
def lstm_unit(view: OnnxLayer) -> list[str]:
    cont = view.add("Unsqueeze", view.inputs[2], view.ints(2))
    hidden, cell = _unit(view, view.inputs[1], view.x, cont, view.bottoms[0].shape[2])
    return [cell, hidden]


@ONNX.exports("RNN", form="Gemm, Tanh for each time step; the state begins at 0", composite=True)
def rnn(view: OnnxLayer) -> list[str]:
    unrolled, count = _Unrolled(view, 1, 1), len(view.layer.blobs)
    own, outward, term = (view.parameter(index) for index in range(count - 3, count))
    (hidden,), outputs = unrolled.states, []
    for step in range(unrolled.steps):
        hidden = view.add("Tanh", unrolled.at(step, hidden, own)[0])
        outputs.append(view.add("Tanh", view.add("Gemm", hidden, outward, term, transB=1)))
    return unrolled.tops(outputs, [hidden])


# -- convolution, InnerProduct, pooling, and the priors of SSD -----------------------------------------


@ONNX.exports("Im2col", form="Conv with a filter for each element of the window")
def im2col(view: OnnxLayer) -> str:
    kernel, axis = view.layer.geometry.kernel, view.layer.axis
    elements, channels = math.prod(kernel), view.bottoms[0].shape[axis]
    one = np.eye(elements, dtype=np.float32).reshape(elements, 1, *kernel)
    filters = view.floats(np.tile(one, (channels, *(1,) * (one.ndim - 1))))
    result = view.add("Conv", _as_image(view, 0), filters, **_settings(view) | {"group": channels})
    return result if axis == 1 else view.in_shape_of(result, view.tops[0])


def _settings(view: OnnxLayer, reads: bool = True) -> dict[str, Any]:
    """The attributes of a convolution; `reads`: the windows are read, not written as by Deconvolution."""
    g = view.layer.geometry
    more = read_beyond_padding(view) if reads else [0] * len(g.pad)
    end = [pad + own for pad, own in zip(g.pad, more, strict=True)]
    settings = {"kernel_shape": list(g.kernel), "strides": list(g.stride), "pads": [*g.pad, *end]}
    return {**settings, "dilations": list(g.dilation), "group": g.group}


def _as_image(view: OnnxLayer, index: int) -> str:
    """A bottom as (N, C, spatial...); an image without spatial axes has one pixel."""
    shape, axis = view.bottoms[index].shape, view.layer.axis
    has_axes = bool(view.layer.geometry.kernel) and len(shape) > 2
    if axis == 1 and has_axes:
        return view.inputs[index]
    return view.reshaped(view.inputs[index], (-1, *(shape[axis:] if has_axes else (shape[-1], 1))))


def _convolve(view: OnnxLayer, operator: str) -> list[str]:
    layer, spatial = view.layer, bool(view.layer.geometry.kernel)
    weights = view.parameter(0, None if spatial else (*layer.blobs[0].shape, 1))
    parameters = [weights, *(view.parameter(index) for index in range(1, len(layer.blobs)))]
    settings = _settings(view, operator == "Conv") if spatial else {"group": layer.geometry.group}
    values = (view.add(operator, _as_image(view, index), *parameters, **settings) for index in range(len(view.tops)))
    whole = layer.axis == 1 and spatial
    return [value if whole else view.in_shape_of(value, top) for value, top in zip(values, view.tops, strict=True)]


ONNX.exports("Convolution", form="Conv; Reshape around it where `axis` is not 1")(lambda view: _convolve(view, "Conv"))
ONNX.exports("Deconvolution", form="ConvTranspose; Reshape around it where `axis` is not 1")(
    lambda view: _convolve(view, "ConvTranspose")
)

_Pool = caffe_pb2.PoolingParameter


@ONNX.exports(
    "Pooling", form="MaxPool, AveragePool, with Mul where the divisors differ; global ones; STOCHASTIC as ratio"
)
def pooling(view: OnnxLayer) -> str | list[str]:
    param, g = view.layer.settings, view.layer.geometry
    reach = tuple(by * (size - 1) + 1 for size, by in zip(g.kernel, g.dilation, strict=True))
    windows = view.windows(replace(g, kernel=reach))
    if param.pool == _Pool.MAX:
        return _maximum(view, windows)
    if max(g.dilation) > 1:
        raise view.error("the average of windows with dilation cannot be exported; remove the dilation, or use MAX")
    if param.pool == _Pool.AVE:
        return view.average(view.x, windows)
    squares = view.average(view.add("Mul", view.x, view.x), windows)
    totals = view.average(view.x, windows)
    positive = view.add("Greater", totals, view.floats(0))
    return view.add("Where", positive, view.add("Div", squares, totals), view.floats(0))


def _maximum(view: OnnxLayer, windows: Windows) -> str | list[str]:
    if len(view.tops) == 1:
        if view.layer.settings.global_pooling:
            return view.add("GlobalMaxPool", view.x)
        g = view.layer.geometry
        dilated = {"kernel_shape": list(g.kernel), "dilations": list(g.dilation)} if max(g.dilation) > 1 else {}
        return view.add("MaxPool", view.x, **{**windows.attributes, **dilated})
    value, index = view.add_many("MaxPool", 2, view.x, **windows.attributes)
    height, width = view.bottoms[0].shape[2:]
    within = view.add("Mod", index, view.target.constant(np.array(height * width), f"{view.layer.name}/pixels"))
    return [value, view.add("Cast", within, to=FLOAT)]


@ONNX.exports("PriorBox", form="a constant")
def prior_box(view: OnnxLayer) -> str:
    for blob in view.bottoms:
        view.refuse_varying(blob, (2, 3))
    view.layer.forward(view.bottoms, view.tops)
    boxes = np.asarray(view.tops[0].host_data())
    assert math.prod(boxes.shape)
    return view.floats(boxes, "priors")
