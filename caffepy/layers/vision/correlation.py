"""Correlation and Correlation1D."""

from __future__ import annotations

from caffepy.backend import CorrelationWindow
from caffepy.layers.core.base import Blobs, Layer, register_layer
from caffepy.proto import caffe_pb2


@register_layer("Correlation")
class CorrelationLayer(Layer):
    """y[n, (p, q), i, j] = the mean of a[n, c, h, w] * b[n, c, h + dp, w + dq] over a patch and all channels c.

    Displacements dp and dq are the multiples of `stride_2` from -`max_displacement` to `max_displacement`. A patch has
    `kernel_size` x `kernel_size` pixels (h, w); patches are `stride_1` pixels apart, and their centres keep a distance
    of max_displacement + (kernel_size - 1) / 2 from the edges of the image with `pad` zeros around it. With
    `correlation_type` SUBTRACT y is the mean of |a - b|.

    Shapes: a and b (N, C, H, W), y (N, displacements, H', W'). Source: FlowNet 2's `correlation_layer.cu` (Dosovitskiy
    et al. 2015).

    Raises:
        ConfigError: kernel_size or max_displacement is missing, kernel_size is even, or a stride is 0.
        ShapeError: the bottoms differ in shape, or the image is too small.
    """

    bottoms = (2, 2)
    recordable = True

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        param = self.param.correlation_param
        if not param.HasField("kernel_size") or not param.HasField("max_displacement"):
            raise self.error("correlation_param needs kernel_size and max_displacement")
        if param.kernel_size % 2 == 0:
            raise self.error(f"correlation_param.kernel_size is {param.kernel_size}; it must be odd")
        if min(param.stride_1, param.stride_2) < 1:
            raise self.error("stride_1 and stride_2 of correlation_param must be at least 1")

    def displacements(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the first displacement (down, right) in units of stride_2, and the numbers of displacements."""
        radius = self.param.correlation_param.max_displacement // self.param.correlation_param.stride_2
        return (-radius, -radius), (2 * radius + 1, 2 * radius + 1)

    vertical = True
    """Whether rows are displaced and padded too."""

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.correlation_param
        if len(bottom[0].shape) != 4 or bottom[0].shape != bottom[1].shape:
            raise self.shape_error("both bottoms must have the same four axes, (N, C, H, W)", *bottom)
        first, count = self.displacements()
        samples, _, *sizes = bottom[0].shape
        spans, origin = [], []
        for size, moves in zip(sizes, (self.vertical, True), strict=True):
            reach = param.max_displacement if moves else 0
            pad = param.pad if moves else 0
            span = size + 2 * pad - 2 * reach - (param.kernel_size - 1)
            spans.append(-(-span // param.stride_1))
            origin.append(reach - pad)
        if min(spans) < 1:
            raise self.shape_error("the image is too small for max_displacement, kernel_size and pad", bottom[0])
        self.window = CorrelationWindow(
            kernel=param.kernel_size,
            stride=param.stride_1,
            origin=(origin[0], origin[1]),
            first=(first[0] * param.stride_2, first[1] * param.stride_2),
            count=count,
            step=param.stride_2,
            subtract=param.correlation_type == caffe_pb2.CorrelationParameter.SUBTRACT,
        )
        shape = (samples, count[0] * count[1], *spans)
        self.check_memory(4 * samples * shape[1] * spans[0] * spans[1], "its top")
        top[0].reshape(shape)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self.backend.correlate_forward(bottom[0].data, bottom[1].data, top[0].data, self.window)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        diffs = [blob.diff if wanted else None for blob, wanted in zip(bottom, propagate_down, strict=True)]
        a, b = bottom[0].data, bottom[1].data
        self.backend.correlate_backward(top[0].diff, a, b, diffs[0], diffs[1], self.window)


@register_layer("Correlation1D")
class Correlation1DLayer(CorrelationLayer):
    """Correlation with displacements along rows only, for stereo (FlowNet 2's `correlation_layer1d.cu`).

    `pad` adds zeros to the left and to the right. With `single_direction` 1 the displacements are 0 to
    `max_displacement`; with -1 they begin at -(max_displacement / stride_2 + 1) * stride_2 and end at -stride_2, as in
    FlowNet 2. Pixels outside the image are 0.

    Raises:
        ConfigError: single_direction is not -1, 0 or 1, and as Correlation.
        ShapeError: as Correlation.
    """

    vertical = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        direction = self.param.correlation_param.single_direction
        if direction not in (-1, 0, 1):
            raise self.error(f"correlation_param.single_direction is {direction}; it must be -1, 0 or 1")

    def displacements(self) -> tuple[tuple[int, int], tuple[int, int]]:
        param = self.param.correlation_param
        radius = param.max_displacement // param.stride_2
        if param.single_direction == 0:
            return (0, -radius), (1, 2 * radius + 1)
        return (0, 0 if param.single_direction > 0 else -(radius + 1)), (1, radius + 1)
