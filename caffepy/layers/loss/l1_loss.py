"""L1Loss, SmoothL1Loss and SmoothL1LossOHEM."""

from __future__ import annotations

import math
from math import fabs

from caffepy.backend import Array, Each, Scalar, expression
from caffepy.layers.core.base import Blobs, register_layer
from caffepy.layers.core.formulas import identity, product
from caffepy.layers.core.layout_adapter import LayoutAdapter
from caffepy.layers.loss.base import ElementLossLayer
from caffepy.layers.loss.flow_loss import Formula, PixelLoss
from caffepy.proto import caffe_pb2

_Parameter = caffe_pb2.LossParameter


@expression
def difference(a: Each, b: Each) -> Each:
    return a - b


@expression
def magnitude(d: Each, factor: Scalar) -> Each:
    return fabs(d) * factor


@expression
def direction(d: Each, factor: Scalar) -> Each:
    return factor if d > 0 else (-factor if d < 0 else 0.0)


@expression
def smooth(d: Each, factor: Scalar, sharpness: Scalar) -> Each:
    size = fabs(d)
    return factor * (0.5 * sharpness * d * d if size * sharpness < 1 else size - 0.5 / sharpness)


@expression
def weighted_smooth(d: Each, weight: Each, factor: Scalar, sharpness: Scalar) -> Each:
    size = fabs(d)
    return weight * factor * (0.5 * sharpness * d * d if size * sharpness < 1 else size - 0.5 / sharpness)


@expression
def smooth_slope(d: Each, factor: Scalar, sharpness: Scalar) -> Each:
    slope = sharpness * d if fabs(d) * sharpness < 1 else (1.0 if d > 0 else -1.0)
    return slope * factor


@register_layer("L1Loss")
class L1LossLayer(ElementLossLayer):
    """loss = sum of |a - b| / N. da = sign(a - b) / N, db = -da (NVIDIA's `l1_loss_layer.cpp`). Shapes: (N, …).

    With `l1_loss_param`, or with one bottom, which is then the difference d, it is the loss of FlowNet 2's
    `l1loss_layer.cu` over (N, C, H, W). NaN in d = a - b counts 0 and has no gradient. With `l2_per_location` the loss
    is the sum over pixels of (sum over channels of d^2 + `epsilon`)^`power` / N. `l2_prescale_by_channels` makes a mean
    of the sum over channels. Differences, or with l2_per_location lengths, below `plateau` count 0.
    `normalize_by_num_entries` divides by the number of pixels that are not NaN instead of N.

    Raises:
        ShapeError: the bottoms' shapes do not fit.
    """

    bottoms = (1, 2)
    no_gradient_bottoms = frozenset()

    _pixels: PixelLoss | None = None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        if self.param.HasField("l1_loss_param") or len(bottom) == 1:
            self._pixels = PixelLoss(self, self.param.l1_loss_param.normalize_by_num_entries)

    def _formula(self) -> Formula:
        param = self.param.l1_loss_param
        if not param.l2_per_location:
            return Formula(1, 0, 1, 0, plateau=param.plateau)
        plateau, mean = param.plateau * param.plateau, param.l2_prescale_by_channels
        return Formula(2, 0, param.power, param.epsilon, mean, sum_plateau=plateau)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        if self._pixels is not None:
            self._pixels.reshape(bottom, top)
            self._divisor = self._pixels.divisor
            return
        super().reshape(bottom, top)
        self._difference = self.scratch("difference", bottom[0].shape)

    def _factor(self) -> float:
        return 1 / max(self._difference.shape[0], 1)

    def _subtract(self, bottom: Blobs) -> Array:
        d = self._difference.array
        self.backend.apply(difference, (bottom[0].data, self._targets.load(bottom[1].data)), (d,))
        return d

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if self._pixels is not None:
            self._pixels.forward(self._formula(), bottom, top)
            return
        self.backend.reduce(magnitude, (self._subtract(bottom), self._factor()), (top[0].data,))

    def slope(self, dx: Array, factor: float) -> None:
        """dx = factor * derivative of the loss by a."""
        self.backend.apply(direction, (self._difference.array, factor), (dx,))

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if self._pixels is not None:
            self._pixels.backward(self._formula(), top, propagate_down, bottom)
            return
        factor = self.weight() * self._factor()
        if propagate_down[0]:
            self.slope(bottom[0].diff, factor)
            self.apply_top_gradient(top, bottom[0].diff)
        if propagate_down[1]:
            db = self._target_diffs.target(bottom[1].diff)
            self.slope(db, -factor)
            self.apply_top_gradient(top, db)
            self._target_diffs.store(bottom[1].diff)


@register_layer("SmoothL1Loss")
class SmoothL1LossLayer(L1LossLayer):
    """loss = sum of v f(w (a - b)) / N, where f(d) = sigma^2 d^2 / 2 if |d| < 1 / sigma^2, else |d| - 1 / (2 sigma^2).

    a and b are (N, …). The optional third bottom is w, the optional fourth v; they have a's count, default to 1, and
    get a gradient of 0. `sigma` is a field of `smooth_l1_loss_param` (Girshick 2015; NVIDIA's
    `smooth_L1_loss_layer.cpp` has two bottoms and sigma 1).

    Raises:
        ConfigError: sigma is not above 0.
        ShapeError: the counts differ.

    R-FCN's fork of `smooth_L1_loss_layer.cpp` is decided by what the prototxt gives: with `loss_param.normalization`
    PRE_FIXED the sum is divided by `pre_fixed_normalizer`, at least 1, in place of N. An optional second top
    (N, 1, H, W) holds the loss of each position, summed over the channels and not divided.
    """

    bottoms = (2, 4)
    tops = (1, 2)
    exact_bottoms = frozenset({2, 3})
    no_gradient_tops = frozenset({1})

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        sigma = self.param.smooth_l1_loss_param.sigma
        if sigma <= 0:
            raise self.error(f"smooth_l1_loss_param.sigma is {sigma:g}; it must be above 0")
        self._sharpness = sigma * sigma

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        for blob in bottom[2:]:
            if blob.count != bottom[0].count:
                raise self.shape_error("weights must have the first bottom's count", blob, bottom[0])
        self._weights = [LayoutAdapter(self.backend, blob.shape, bottom[0].shape) for blob in bottom[2:]]
        self._set_divisor(bottom)
        if len(top) > 1:
            shape = bottom[0].shape + (1,) * (4 - len(bottom[0].shape))
            if len(shape) != 4:
                raise self.shape_error("the second top needs a first bottom of at most four axes", bottom[0])
            top[1].reshape((shape[0], 1, *shape[2:]))
            self._planes = LayoutAdapter(self.backend, bottom[0].shape, (shape[0], shape[1], math.prod(shape[2:])))
            self._each = LayoutAdapter(self.backend, top[1].shape, (shape[0], 1, math.prod(shape[2:])))
            self._ones = self.scratch("ones", (1, shape[1]))

    def _set_divisor(self, bottom: Blobs) -> None:
        """Set the divisor of the sum for the current shapes."""
        batch = bottom[0].shape[0]
        if self.param.loss_param.normalization == _Parameter.PRE_FIXED:
            self._divisor = self.divisor(_Parameter.BATCH_SIZE, batch, batch)
        else:
            self._divisor = float(max(batch, 1))

    def _factor(self) -> float:
        assert self._divisor is not None
        return 1 / self._divisor

    def _write_each(self, d: Array, weight: Array | None, losses: Array) -> None:
        """Write the loss of each position."""
        terms = self.scratch("terms", tuple(d.shape)).array
        if weight is None:
            self.backend.apply(smooth, (d, 1.0, self._sharpness), (terms,))
        else:
            self.backend.apply(weighted_smooth, (d, weight, 1.0, self._sharpness), (terms,))
        planes, each = self._planes.load(terms), self._each.target(losses)
        self.backend.fill(self._ones.array, 1)
        if planes.shape[2] == 1:
            rows = self.backend.reshaped(planes, planes.shape[:2])
            self.backend.reduce(identity, (rows,), (self.backend.flat(each),), 0)
        else:
            for plane, row in zip(planes, each, strict=True):
                self.backend.gemm(self._ones.array, plane, row)
        self._each.store(losses)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        weights = [adapter.load(blob.data) for adapter, blob in zip(self._weights, bottom[2:], strict=True)]
        d = self._subtract(bottom)
        if weights:
            self.backend.apply(product, (weights[0], d), (d,))
        if len(weights) > 1:
            inputs = (d, weights[1], self._factor(), self._sharpness)
            self.backend.reduce(weighted_smooth, inputs, (top[0].data,))
        else:
            self.backend.reduce(smooth, (d, self._factor(), self._sharpness), (top[0].data,))
        if len(top) > 1:
            self._write_each(d, weights[1] if len(weights) > 1 else None, top[1].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        self._loaded_weights = [
            adapter.load(blob.data) for adapter, blob in zip(self._weights, bottom[2:], strict=True)
        ]
        super().backward(top, propagate_down, bottom)
        for blob, wanted in zip(bottom[2:], propagate_down[2:], strict=True):
            if wanted:
                self.backend.fill(blob.diff, 0)

    def slope(self, dx: Array, factor: float) -> None:
        self.backend.apply(smooth_slope, (self._difference.array, factor, self._sharpness), (dx,))
        for weight in self._loaded_weights:
            self.backend.apply(product, (dx, weight), (dx,))


@register_layer("SmoothL1LossOHEM")
class SmoothL1LossOHEMLayer(SmoothL1LossLayer):
    """SmoothL1Loss with the divisors of `loss_param` (`smooth_L1_loss_ohem_layer.cpp` of R-FCN and Intel Caffe).

    loss = sum of f(w (a - b)) / divisor, where f(d) = d^2 / 2 if |d| < 1, else |d| - 1 / 2. a, b and the optional third
    bottom w are (N, C, H, W). The divisor is N H W (VALID, the default, and FULL), N (BATCH_SIZE), 1 (NONE) or
    `pre_fixed_normalizer`, at least 1 (PRE_FIXED). An optional second top (N, 1, H, W) holds the loss of each position,
    summed over the channels and not divided. `smooth_l1_loss_param.sigma`, which the forks do not read, is as in
    SmoothL1Loss.
    """

    bottoms = (2, 3)

    def _set_divisor(self, bottom: Blobs) -> None:
        batch = bottom[0].shape[0]
        positions = batch * math.prod(bottom[0].shape[2:])
        divisor = self.divisor(_Parameter.VALID, positions, batch)
        # R-FCN's forks count no valid labels here, also where ignore_label is given.
        self._divisor = float(max(positions, 1)) if divisor is None else divisor
