"""InfogainLoss."""

from __future__ import annotations

from functools import cached_property
from math import log

from caffepy.backend import Array, Backend, Channel, Each, Scalar, expression
from caffepy.data.images.mean import read_blob
from caffepy.layers.core.base import Blobs, register_layer
from caffepy.layers.core.formulas import identity
from caffepy.layers.core.labels import Labels
from caffepy.layers.core.layout_adapter import LayoutAdapter
from caffepy.layers.loss.base import LOG_THRESHOLD, NO_IGNORED_LABEL, LossLayer
from caffepy.proto import caffe_pb2

_Parameter = caffe_pb2.LossParameter


@expression
def valid_labels(label: Each, ignored: Scalar) -> tuple[Each, Each]:
    return (0.0 if label == ignored else label), (0.0 if label == ignored else 1.0)


@expression
def infogain(p: Each, gain: Each, valid: Channel) -> Each:
    return -gain * log(max(p, LOG_THRESHOLD)) * valid


@expression
def score_gradient(
    p: Each, gain: Each, total: Channel, valid: Channel, factor: Scalar, count: Scalar
) -> Each:  # fmt: skip
    return (p * total - gain) * valid * factor / max(count, 1.0)


@expression
def probability_gradient(p: Each, gain: Each, valid: Channel, factor: Scalar, count: Scalar) -> Each:
    return -gain / max(p, LOG_THRESHOLD) * valid * factor / max(count, 1.0)


@register_layer("InfogainLoss")
class InfogainLossLayer(LossLayer):
    """loss = -sum over positions and classes k of H[label, k] * log max(p[k], 1e-20) / divisor.

    Shapes: x (N, …) with K classes along `infogain_loss_param.axis`, one label for each position, H of K * K elements.
    H is the third bottom, or a BlobProto in the file `source`. The divisor is the number of labels that are not ignored
    (VALID, the default), of all labels (FULL), of samples (BATCH_SIZE), or 1 (NONE). Both Caffes:
    `infogain_loss_layer.cpp`.

    In BVLC's dialect p = softmax(x), which is also the optional second top, and
    dx = (p * sum of H[label] - H[label]) / divisor. In NVIDIA's dialect x holds the probabilities,
    dx = -H[label] / x / divisor, and the default divisor is N.

    Raises:
        ConfigError: `normalize` is set, H is missing or not square, or there is a second top in NVIDIA's dialect.
        ShapeError: H does not have K * K elements.
        DataError: a label is outside the classes.
    """

    bottoms = (2, 3)
    tops = (1, 2)
    no_gradient_bottoms = frozenset({1, 2})
    no_gradient_tops = frozenset({1})

    _shape: tuple[int, ...] | None = None
    _matrix: Array | None = None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        if self.param.loss_param.HasField("normalize"):
            raise self.error("loss_param.normalize is not for this layer; use normalization")
        if self.context.nvidia and len(top) > 1:
            raise self.error("has no second top in NVIDIA's dialect, where its first bottom holds the probabilities")
        source = self.param.infogain_loss_param.source
        if len(bottom) < 3 and not source:
            raise self.error("needs the matrix: a third bottom, or a file named by infogain_loss_param.source")
        if len(bottom) < 3:
            values = read_blob(self.context.resolve(source), f"{self.where}: source")
            size = round(values.size**0.5)
            if size * size != values.size:
                raise self.error(f"the matrix in '{source}' has {values.size} elements, which make no square")
            self._matrix = self.backend.zeros((size, size))
            self.backend.from_host(values.reshape(size, size), self._matrix)
        self._labels = Labels(self)
        self._total, self._count = self.backend.zeros(()), self.backend.zeros(())

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        shape = bottom[0].shape
        self._axis = bottom[0].axis(self.param.infogain_loss_param.axis, self.where)
        self._labels.reshape(bottom[0], bottom[1], self._axis)
        self._check_matrix(bottom)
        mode = _Parameter.BATCH_SIZE if self.context.nvidia else _Parameter.VALID
        self._divisor = self.divisor(mode, self._labels.size, self._labels.outer)
        if len(top) > 1:
            top[1].reshape(shape)
        if shape != self._shape:
            self._shape = shape
            self._rows, self._gradients = (ClassRows(self.backend, shape, self._axis) for _ in range(2))
        size, classes = self._labels.size, self._labels.classes
        self._gains = self.scratch("gains", (size, classes))
        self._safe, self._valid, self._sums = (self.scratch(name, (size,)) for name in ("labels", "valid", "sums"))

    def _check_matrix(self, bottom: Blobs) -> None:
        classes = self._labels.classes
        count = bottom[2].count if len(bottom) > 2 else self._matrix.size if self._matrix is not None else 0
        if count != classes * classes:
            raise self.shape_error(f"the matrix has {count} elements instead of {classes} * {classes}", bottom[0])
        if len(bottom) > 2:
            self._square = LayoutAdapter(self.backend, bottom[2].shape, (classes, classes))

    def _probabilities(self, bottom: Blobs, top: Blobs) -> Array:
        """Return the probabilities as (positions, classes)."""
        if self.context.nvidia:
            return self._rows.load(bottom[0].data)
        probabilities = self.scratch("probabilities", bottom[0].shape).array
        self.backend.softmax_forward(bottom[0].data, probabilities, self._axis)
        if len(top) > 1:
            self.backend.copy(probabilities, top[1].data)
        return self._rows.load(probabilities)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        backend, gains, valid = self.backend, self._gains.array, self._valid.array
        ignored = NO_IGNORED_LABEL if self.ignored is None else float(self.ignored)
        rows = self._probabilities(bottom, top)
        matrix = self._matrix if len(bottom) < 3 else self._square.load(bottom[2].data)
        backend.apply(valid_labels, (self._labels.load(), ignored), (self._safe.array, valid))
        backend.gather_rows(matrix, self._safe.array, gains, self._labels.bad_index)
        backend.reduce(infogain, (rows, gains, valid), (self._total,), 0)
        backend.reduce(identity, (valid,), (self._count,))
        self.write_loss(self._total, self._count, self._divisor, top[0].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if not propagate_down[0]:
            return
        backend, gains, valid = self.backend, self._gains.array, self._valid.array
        count = self._count if self._divisor is None else 1.0
        source = bottom[0].data if self.context.nvidia else self.scratch("probabilities", bottom[0].shape).array
        rows, dx = self._rows.load(source), self._gradients.rows
        if self.context.nvidia:
            backend.apply(probability_gradient, (rows, gains, valid, self.scale(), count), (dx,), 0)
        else:
            backend.reduce(identity, (gains,), (self._sums.array,), 0)
            backend.apply(score_gradient, (rows, gains, self._sums.array, valid, self.scale(), count), (dx,), 0)
        self._gradients.store(bottom[0].diff)
        self.apply_top_gradient(top, bottom[0].diff)

    def raise_device_errors(self) -> None:
        self._labels.raise_device_errors()


class ClassRows:
    """Presents arrays of `shape` as (positions, classes), with the positions in logical order.

    Args:
        backend: of the arrays.
        shape: of the arrays.
        axis: of the classes.
    """

    def __init__(self, backend: Backend, shape: tuple[int, ...], axis: int) -> None:
        self._backend = backend
        self._order = (*(a for a in range(len(shape)) if a != axis), axis)
        self._ordered = tuple(shape[a] for a in self._order)
        self.classes = shape[axis]
        self.positions = 1
        for size in self._ordered[:-1]:
            self.positions *= size

    @cached_property
    def rows(self) -> Array:
        """The buffer (positions, classes)."""
        return self._backend.zeros((self.positions, self.classes))

    def load(self, array: Array) -> Array:
        """Return an array as (positions, classes). A later `load` overwrites it."""
        self._backend.copy(array.transpose(*self._order), self.rows.reshape(self._ordered))
        return self.rows

    def store(self, array: Array) -> None:
        """Copy `rows` to an array of the original shape."""
        self._backend.copy(self.rows.reshape(self._ordered), array.transpose(*self._order))
