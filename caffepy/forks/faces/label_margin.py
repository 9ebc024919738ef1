"""LabelSpecificAdd and GlobalLSEMargin: margins on the label's score before a softmax loss."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log

import numpy as np

from caffepy.backend import Array, Channel, Each, Scalar, expression
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.formulas import identity, product, product_with_channel, scaled
from caffepy.layers.labels import IndexCheck
from caffepy.layers.layer import Blobs, Layer, PassNumber, register_layer
from caffepy.layers.layout_adapter import LayoutAdapter

WINDOW = 0.1
"""Half the width of the mean shift's window."""
FIRST_STEPS, STEPS = 20, 1
"""Most steps of the mean shift in the first pass and in later ones."""
CONVERGED = 0.001
"""Step of the mean shift below which it ends."""
FIRST_SCALE = 30.0
"""Of GlobalLSEMargin without a filler."""
STATISTICS = 5
"""Numbers in the second top of GlobalLSEMargin."""


@expression
def annealed(
    number: Each, start: Scalar, base: Scalar, gamma: Scalar, power: Scalar, least: Scalar, most: Scalar
) -> Each:
    bias = base + (1 + gamma * (start + number)) ** power - 1
    return most if bias > most else (bias if bias > least else least)


@expression
def with_bias(x: Each, hot: Each, bias: Scalar) -> Each:
    return x + bias if hot > 0 and x > -bias else x


@expression
def other_score(x: Each, hot: Each) -> Each:
    return -1.0 if hot > 0 else max(x, -1.0)


@expression
def other_power(x: Each, hot: Each, most: Channel, scale: Channel) -> Each:
    return 0.0 if hot > 0 else exp(scale * (x - most))


@expression
def soft_maximum(total: Each, most: Each, scale: Each) -> Each:
    return log(total) / scale + most


@expression
def difference(x: Each, y: Each) -> Each:
    return x - y


@expression
def limited(x: Each, least: Scalar, most: Scalar) -> Each:
    return min(max(x, least), most)


@expression
def with_margin(x: Each, hot: Each, scale: Channel, margin: Scalar) -> Each:
    return scale * (x - margin if hot > 0 and margin > 0 else x)


@expression
def ratio_gradient(dy: Each, y: Each, scale: Channel) -> Each:
    return dy * y / scale


class LabelScoresLayer(Layer):
    """A layer that changes each sample's score of its label."""

    bottoms = (2, 2)
    tops = (1, 2)
    no_gradient_bottoms = frozenset({1})
    no_gradient_tops = frozenset({1})

    _shape: tuple[int, ...] | None = None

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shape = bottom[0].shape
        if not shape or bottom[1].count != shape[0]:
            raise self.shape_error("needs scores (N, ...) and one label for each sample", bottom[0], bottom[1])
        rows = (shape[0], bottom[0].count // max(shape[0], 1))
        top[0].reshape(shape)
        if shape != self._shape:
            self._shape = shape
            self._x, self._dx = (LayoutAdapter(self.backend, shape, rows) for _ in range(2))
            self._y, self._dy = (LayoutAdapter(self.backend, shape, rows) for _ in range(2))
        self._labels = LayoutAdapter(self.backend, bottom[1].shape, rows[:1])
        self._hot = self.scratch("one hot", rows)
        self._check = IndexCheck(
            self, f"label {{}} of '{bottom[1].title}' is outside 0 to {rows[1] - 1}; correct the data, or give "
            f"'{bottom[0].title}' more classes"
        )  # fmt: skip

    def mark_labels(self, bottom: Blobs) -> Array:
        """Return a buffer (N, classes) with 1 at the labels and 0 elsewhere."""
        self.backend.one_hot(self._labels.load(bottom[1].data), self._hot.array, self._check.bad_index)
        return self._hot.array

    def raise_device_errors(self) -> None:
        self._check.raise_device_errors()


@register_layer("LabelSpecificAdd")
class LabelSpecificAddLayer(LabelScoresLayer):
    """In TRAIN y = x, and for the label x + bias where x > -bias. In TEST y = x.

    Shapes: x and y (N, ...), one label for each sample. With `bias_base` the bias is bias_base + (1 + bias_gamma *
    n)^bias_power - 1, between bias_min and bias_max, in pass n, counted from `iteration`. A second top (1,) holds the
    bias, 0 in TEST. dx = dy. A negative bias is the margin of AM-Softmax (`label_specific_add.cpp` of caffe-windows;
    Wang, Cheng, Liu and Liu 2018).

    Raises:
        ShapeError: there is not one label for each sample.
        DataError: a label is outside the classes.
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self._training = self.context.phase == caffe_pb2.TRAIN
        self._number = PassNumber(self)
        self._bias = self.backend.zeros(())

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        if len(top) > 1:
            top[1].reshape((1,))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        backend = self.backend
        if self._training:
            self._set_bias()
            x, hot = self._x.load(bottom[0].data), self.mark_labels(bottom)
            backend.apply(with_bias, (x, hot, self._bias), (self._y.target(top[0].data),))
            self._y.store(top[0].data)
        elif top[0] is not bottom[0]:
            backend.copy(bottom[0].data, top[0].data)
        if len(top) > 1:
            backend.copy(self._bias.reshape(1), top[1].data)

    def _set_bias(self) -> None:
        param = self.param.label_specific_add_param
        if not param.HasField("bias_base"):
            self.backend.fill(self._bias, param.bias)
            return
        settings = (param.bias_base, param.bias_gamma, param.bias_power, param.bias_min, param.bias_max)
        inputs = (self._number.load(), float(param.iteration), *settings)
        self.backend.apply(annealed, inputs, (self._bias,))

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if propagate_down[0] and top[0] is not bottom[0]:
            self.backend.copy(top[0].diff, bottom[0].diff)


@register_layer("GlobalLSEMargin")
class GlobalLSEMarginLayer(LabelScoresLayer):
    """y = s * x, and for the label s * (x - m) where m > 0, with a margin m that follows the scores.

    Shapes: x and y (N, ...) of cosines, one label for each sample. s is parameter 0 of shape (1,), by default 30, kept
    between `scale_param`'s min_value and max_value; a third bottom (N, ...) with one number for each sample takes its
    place. Parameter 1 of shape (1,) is m. In TRAIN the margins x_label - log(sum over other classes of e^(s x)) / s of
    the batch are averaged by a mean shift with a window of 0.1; m becomes this mean, or 0.9 m + 0.1 mean if m is not 0.
    A second top (5,) holds the mean of s, of the labels' x, of the other classes' soft maximum and maximum, and m.

    dx = s * dy, ds = sum of dy * y / s. m has no gradient, and is averaged over devices before tests and snapshots
    (`global_lse_margin_layer.cu` of caffe-windows, which also changes m in TEST).

    Raises:
        ShapeError: there is not one label and, in a third bottom, one number for each sample.
        DataError: a label is outside the classes.
    """

    bottoms = (2, 3)

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        param = self.param.scale_param
        default = caffe_pb2.FillerParameter(type="constant", value=FIRST_SCALE)
        self.add_parameter((1,), param.filler if param.HasField("filler") else default)
        self.add_parameter((1,), caffe_pb2.FillerParameter(type="constant", value=0))
        self._limits = (param.min_value, param.max_value if param.HasField("max_value") else 3e38)
        self._own_scale = len(bottom) == 2
        specs = self.param.param
        if not specs:
            specs.add(lr_mult=float(self._own_scale), decay_mult=0)
        if len(specs) == 1:
            specs.add()
        specs[1].lr_mult = specs[1].decay_mult = 0
        self._training = self.context.phase == caffe_pb2.TRAIN
        self._margin = 0.0

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        samples, classes = self._hot.shape
        if classes < 2:
            raise self.shape_error("needs at least two classes", bottom[0])
        if len(bottom) > 2:
            if bottom[2].count != samples:
                raise self.shape_error("the third bottom must have one number for each sample", bottom[2], bottom[0])
            self._norms, self._dnorms = (LayoutAdapter(self.backend, bottom[2].shape, (samples,)) for _ in range(2))
        if len(top) > 1:
            top[1].reshape((STATISTICS,))
        self._others = self.scratch("others", (samples, classes))
        self._index, self._most = (self.scratch(name, (samples, 1)) for name in ("index", "most"))
        names = ("target", "soft", "margins", "scale")
        self._rows = {name: self.scratch(name, (samples,)) for name in names}

    def running_statistics(self) -> Sequence[int]:
        return (1,) if self._training else ()

    def local_statistics(self) -> Sequence[int]:
        return self.running_statistics()

    def capture_blocker(self) -> str | None:
        return "the host averages the margins"

    def _load_scale(self, bottom: Blobs) -> Array:
        """Return each sample's factor, (N,)."""
        backend, scale = self.backend, self._rows["scale"].array
        if self._own_scale:
            own = self.blobs[0].data
            backend.apply(limited, (own, *self._limits), (own,))
            backend.fill(scale, 1)
            backend.apply(scaled, (scale, backend.view(own, ())), (scale,))
        else:
            backend.copy(self._norms.load(bottom[2].data), scale)
        return scale

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        backend, rows, most = self.backend, self._rows, self._most.array
        x, hot, scale = self._x.load(bottom[0].data), self.mark_labels(bottom), self._load_scale(bottom)
        target, soft, margins = (rows[name].array for name in ("target", "soft", "margins"))
        backend.reduce(product, (x, hot), (target,), 0)
        backend.apply(other_score, (x, hot), (self._others.array,))
        backend.largest(self._others.array, 1, self._index.array, most)
        backend.reduce(other_power, (x, hot, most.reshape(-1), scale), (soft,), 0)
        backend.apply(soft_maximum, (soft, most.reshape(-1), scale), (soft,))
        backend.apply(difference, (target, soft), (margins,))
        self._margin = float(backend.to_host(self.blobs[1].data)[0])
        if self._training and backend.holds_values:
            self._margin = next_margin(self._margin, backend.to_host(margins))
            backend.fill(self.blobs[1].data, self._margin)
        y = self._y.target(top[0].data)
        backend.apply(with_margin, (x, hot, scale, self._margin), (y,), 0)
        self._y.store(top[0].data)
        self.save_top(top)
        if len(top) > 1:
            columns = [backend.to_host(array).mean() for array in (scale, target, soft, most)]
            backend.from_host(np.array([*columns, self._margin], np.float32), top[1].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        backend, scale, dy = self.backend, self._rows["scale"].array, self._dy.load(top[0].diff)
        y = self._y.load(self.saved_top(top))
        if self._own_scale and self.propagate_to_params[0]:
            backend.apply(ratio_gradient, (dy, y, scale), (self._others.array,), 0)
            diff = backend.view(self.blobs[0].diff, ())
            backend.reduce(identity, (self._others.array,), (diff,), 0, self.accumulate(0))
        if len(bottom) > 2 and propagate_down[2]:
            backend.reduce(ratio_gradient, (dy, y, scale), (self._dnorms.target(bottom[2].diff),), 0)
            self._dnorms.store(bottom[2].diff)
        if propagate_down[0]:
            backend.apply(product_with_channel, (dy, scale), (self._dx.target(bottom[0].diff),), 0)
            self._dx.store(bottom[0].diff)


def next_margin(margin: float, margins: np.ndarray) -> float:
    """Return the margin after a batch with these `margins` of its samples.

    Args:
        margin: before; 0 in the first pass.
        margins: one for each sample.
    """
    if not np.isfinite(margins).all():
        return margin
    first = margin == 0
    found = mean_shift(margins, float(margins.mean()) if first else margin, FIRST_STEPS if first else STEPS)
    return found if first else 0.9 * margin + 0.1 * found


def mean_shift(values: np.ndarray, mean: float, steps: int) -> float:
    """Return the mean of the values near the mean, starting from `mean`; from the mean of all if none is near."""
    while steps > 0:
        near = values[np.abs(values - mean) < WINDOW]
        before, mean = mean, float(values.mean() if near.size == 0 else near.mean())
        if abs(before - mean) < CONVERGED:
            break
        steps -= near.size > 0
    return mean
