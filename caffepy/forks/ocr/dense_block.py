"""DenseBlock: normalisation, ReLU and convolution, again and again, each of which adds channels to those before it."""

from __future__ import annotations

from collections.abc import Sequence

from caffepy.backend import Array, Each, Scalar, expression
from caffepy.backend.types import BatchNormState
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.activation import DropoutLayer, ReLULayer
from caffepy.layers.batch_norm import BatchNormLayer
from caffepy.layers.blob import Blob
from caffepy.layers.convolution import ConvolutionLayer
from caffepy.layers.layer import Blobs, Layer, register_layer

EPSILON = 1e-5
WIDENING = 4
"""Channels of a convolution of 1 x 1, as a multiple of growthRate."""
GROUPS = ("weights", "scale", "bias", "mean", "variance")
"""Meanings of the parameters, one of each transition in turn; with `use_BC` twice."""


@expression
def moved(new: Each, old: Each, fraction: Scalar) -> Each:
    return (1 - fraction) * old + fraction * new


class _NormalisationLayer(BatchNormLayer):
    """BatchNorm whose parameters are scale, bias, mean and variance, of which the last two move as cuDNN's."""

    learned = (0, 1)

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self._channels, self._scale_bias = bottom[0].shape[1], True
        self._use_stored = self.context.phase == caffe_pb2.TEST
        self._make_buffers(self._channels)
        self._new_mean, self._new_variance = (self.backend.zeros((self._channels,)) for _ in range(2))
        self._count = self.backend.zeros((1,))
        self.backend.fill(self._count, 1)

    def normalisation(self, scale: Array | None = None, bias: Array | None = None) -> BatchNormState:
        """Return the arrays for the backend, which writes the batch's mean and variance to the new ones."""
        scale, bias, *stored = (blob.data for blob in self.blobs)
        mean, variance = stored if self._use_stored else (self._new_mean, self._new_variance)
        return BatchNormState(self._mean, self._inverse, scale, bias, mean, variance, self._count, EPSILON, 0.0)

    def update_running_averages(self) -> None:
        fraction = self.param.batch_norm_param.moving_average_fraction
        for new, blob in zip((self._new_mean, self._new_variance), self.blobs[2:], strict=True):
            self.backend.apply(moved, (new, blob.data, fraction), (blob.data,))


class _Unit:
    """Normalisation, ReLU and convolution of a block.

    Args:
        block: has the parameters.
        name: of the unit, from which random numbers follow.
        x: a blob of the shape that it will be given.
        weights: the block's index of the convolution's weights.
        others: those of scale, bias, mean and variance.
    """

    def __init__(self, block: DenseBlockLayer, name: str, x: Blob, weights: int, others: Sequence[int]) -> None:
        settings = block.param.denseblock_param
        param = caffe_pb2.LayerParameter(name=name)
        param.batch_norm_param.moving_average_fraction = settings.moving_average_fraction
        param.dropout_param.dropout_ratio = settings.dropout_amount
        num_output, _, kernel, _ = block.blobs[weights].shape
        convolution = param.convolution_param
        convolution.num_output, convolution.bias_term = num_output, False
        convolution.kernel_size.append(kernel)
        convolution.pad.append(kernel // 2)
        self._block, self.weights, self.others = block, weights, others
        self._norm, self._relu = _NormalisationLayer(param, block.context), ReLULayer(param, block.context)
        self._convolution, self._dropout = (kind(param, block.context) for kind in (ConvolutionLayer, DropoutLayer))
        self._drops = settings.use_dropout and weights < settings.numTransition
        self._normal, self.result = (Blob(block.backend, name=f"{name}'s {what}") for what in ("normal", "result"))
        self._convolution.setup([x], [self.result])
        self._norm.setup([x], [self._normal])
        self._relu.setup([self._normal], [self._normal])
        self._dropout.setup([self.result], [self.result])

    def reshape(self, x: Blob) -> None:
        """Set the shape of `result`."""
        self._norm.reshape([x], [self._normal])
        self._relu.reshape([self._normal], [self._normal])
        self._convolution.reshape([self._normal], [self.result])

    def forward(self, x: Blob) -> None:
        """Compute `result`."""
        block, normal, result = self._block, [self._normal], [self.result]
        self._norm.blobs = [block.blobs[index] for index in self.others]
        self._norm.forward([x], normal)
        self._relu.forward(normal, normal)
        block.backend.copy(block.blobs[self.weights].data[:, :, ::-1, ::-1], self._convolution.blobs[0].data)
        self._convolution.forward(normal, result)
        if self._drops:
            self._dropout.forward(result, result)

    def backward(self, x: Blob, down: bool) -> None:
        """Compute the gradients of the parameters and, with `down`, of x from that of `result`."""
        block, normal, result = self._block, [self._normal], [self.result]
        if self._drops:
            self._dropout.backward(result, [True], result)
        turned, weights = self._convolution.blobs[0], self.weights
        turned.gradient_started = False
        self._convolution.propagate_to_params = [block.propagate_to_params[weights]]
        self._convolution.backward(result, [True], normal)
        if block.propagate_to_params[weights]:
            put = block.backend.add if block.accumulate(weights) else block.backend.copy
            put(turned.diff[:, :, ::-1, ::-1], block.blobs[weights].diff)
        self._relu.backward(normal, [True], normal)
        self._norm.propagate_to_params = [block.propagate_to_params[index] for index in self.others]
        self._norm.backward(normal, [down], [x])

    def communicates(self) -> bool:
        """Whether a pass contains a collective."""
        return self._norm.communicates()

    def capture_blocker(self) -> str | None:
        """Return why a pass cannot be captured in a CUDA graph, or None."""
        return self._norm.capture_blocker()


@register_layer("DenseBlock")
class DenseBlockLayer(Layer):
    """x_i+1 = (x_i, convolution(ReLU(BN(x_i)))) for i from 0 to numTransition - 1, joined along the channels.

    The layer is caffe_ocr's (`DenseBlock_layer.cu`; Huang et al. 2017). x_0 is the bottom (N, C, H, W), and the last x
    is the top, (N, C + numTransition growthRate, H, W). Kernels are 3 x 3, with pad 1 and without bias. With `use_BC`
    another convolution(ReLU(BN(...))), of 1 x 1 to 4 growthRate channels, stands before each one. Unlike those of
    Convolution, kernels are turned by 180 degrees, as in caffe_ocr. With `use_dropout` training drops the part
    `dropout_amount` of the channels that each transition adds, and divides the rest by 1 - dropout_amount.

    BN has eps = 1e-5 and a scale and a bias for each channel. Training uses the batch's mean and variance, and stores
    (1 - f) old + f new of both with f = `moving_average_fraction`; the new variance is that over m - 1 elements, not m.
    TEST uses the stored ones, initially 0 and 1. Their lr_mult is 0.

    Parameters, as caffe_ocr's files have them: the weights of all transitions, (growthRate, C_i, 3, 3), then their
    scales, biases, means and variances, (C_i,) each. With `use_BC` the weights are (growthRate, 4 growthRate, 3, 3);
    then come the weights of 1 x 1, (4 growthRate, C_i, 1, 1), whose BN is the one before, and the scales, biases, means
    and variances of the BN behind them, (4 growthRate,) each. The last one, (1,), counts passes of caffe_ocr's CPU code
    and has no effect.

    Raises:
        ConfigError: a number is out of its range.
        ShapeError: the bottom does not have four axes, or its channels have changed.
    """

    learns = True
    stored_by_count = True

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        param, shape = self.param.denseblock_param, bottom[0].shape
        if len(shape) != 4:
            raise self.shape_error("the bottom needs four axes, (N, C, H, W)", bottom[0])
        if param.numTransition < 1 or param.growthRate < 1:
            raise self.error(
                f"numTransition is {param.numTransition} and growthRate {param.growthRate}; both must be at least 1"
            )
        if not 0 <= param.moving_average_fraction <= 1:
            raise self.error(f"moving_average_fraction is {param.moving_average_fraction:g}; it must be from 0 to 1")
        count, growth, narrow = param.numTransition, param.growthRate, WIDENING * param.growthRate
        top[0].reshape((shape[0], shape[1] + count * growth, *shape[2:]))
        self.check_top_memory(top)
        weights = growth * count * (shape[1] + growth * (count - 1) // 2)
        self.check_memory(16 * weights, f"the parameters of {count} transitions")
        wide = [shape[1] + growth * i for i in range(count)]
        zero, one = caffe_pb2.FillerParameter(value=0), caffe_pb2.FillerParameter(value=1)
        fillers = (param.BN_Scaler_Filler, param.BN_Bias_Filler, zero, one)
        groups: list[tuple[list[tuple[int, ...]], caffe_pb2.FillerParameter]]
        groups = [([(growth, narrow if param.use_BC else channels, 3, 3) for channels in wide], param.Filter_Filler)]
        groups += [([(channels,) for channels in wide], filler) for filler in fillers]
        if param.use_BC:
            groups += [([(narrow, channels, 1, 1) for channels in wide], param.Filter_Filler)]
            groups += [([(narrow,)] * count, filler) for filler in fillers]
        for shapes, filler in groups:
            for each in shapes:
                self.add_parameter(each, filler)
        self.add_parameter((1,), zero)
        while len(self.param.param) < len(self.blobs):
            self.param.param.add()
        for index in (*self._statistics(), len(self.blobs) - 1):
            self.param.param[index].lr_mult = self.param.param[index].decay_mult = 0
        self.transitions = [self._make_transition(i, channels, bottom[0]) for i, channels in enumerate(wide)]
        self._joined = [Blob(self.backend, name=f"{self.name}'s transition {i}") for i in range(1, count)]

    def _statistics(self) -> list[int]:
        """Return the indices of the means and variances."""
        count = self.param.denseblock_param.numTransition
        return [index for index in range(len(self.blobs) - 1) if index // count % len(GROUPS) >= GROUPS.index("mean")]

    def _make_transition(self, number: int, channels: int, bottom: Blob) -> list[_Unit]:
        """Return the units of one transition, the last of which adds channels."""
        param, (images, _, *spatial) = self.param.denseblock_param, bottom.shape
        units = [(0, 1, channels)]
        if param.use_BC:
            units = [(5, 1, channels), (0, 6, WIDENING * param.growthRate)]
        return [
            _Unit(
                self,
                f"{self.random_name}/{number}",
                Blob(self.backend, (images, size, *spatial)),
                weights * param.numTransition + number,
                [(norm + i) * param.numTransition + number for i in range(4)],
            )
            for weights, norm, size in units
        ]

    def _chain(self, bottom: Blobs, top: Blobs) -> list[tuple[list[_Unit], Blob, Blob]]:
        """Return each transition's units, its x and the next one's."""
        return list(zip(self.transitions, [bottom[0], *self._joined], [*self._joined, top[0]], strict=True))

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shape = bottom[0].shape
        if len(shape) != 4 or shape[1] != self.blobs[self.param.denseblock_param.numTransition].count:
            raise self.shape_error("the bottom needs four axes, with as many channels as at first", bottom[0])
        for units, x, y in self._chain(bottom, top):
            source = x
            for unit in units:
                unit.reshape(source)
                source = unit.result
            y.reshape((x.shape[0], x.shape[1] + source.shape[1], *x.shape[2:]))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        for units, x, y in self._chain(bottom, top):
            source = x
            for unit in units:
                unit.forward(source)
                source = unit.result
            channels = x.shape[1]
            self.backend.copy(x.data, y.data[:, :channels])
            self.backend.copy(source.data, y.data[:, channels:])

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        for units, x, y in reversed(self._chain(bottom, top)):
            channels, down = x.shape[1], propagate_down[0] or x is not bottom[0]
            self.backend.copy(y.diff[:, channels:], units[-1].result.diff)
            for unit, before in zip(reversed(units[1:]), reversed(units[:-1]), strict=True):
                unit.backward(before.result, True)
            units[0].backward(x, down)
            if down:
                self.backend.add(y.diff[:, :channels], x.diff)

    def running_statistics(self) -> Sequence[int]:
        return self._statistics() if self.context.phase == caffe_pb2.TRAIN else ()

    def local_statistics(self) -> Sequence[int]:
        return () if self.context.all_reduce_mean is not None else self.running_statistics()

    def communicates(self) -> bool:
        return self.transitions[0][0].communicates()

    def capture_blocker(self) -> str | None:
        return self.transitions[0][0].capture_blocker()
