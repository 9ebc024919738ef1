"""Convolution and Deconvolution over any number of spatial axes (Caffe's `base_conv_layer.cpp`)."""

from __future__ import annotations

from collections.abc import Sequence

from caffepy.backend import Array, Convolution, Geometry
from caffepy.backend.arguments import spatial_output
from caffepy.blob import Blob
from caffepy.layers.base import Blobs, Layer, register_layer
from caffepy.layers.formulas import identity, total_with_channel


class BaseConvolutionLayer(Layer):
    """What both directions share: the prototxt, the parameters and the plan.

    Parameters: weights (out, in / group, kernel...), bias (num_output,) unless bias_term is false. All bottoms have one
    shape and share them. `engine`, `force_nd_im2col` and NVIDIA's settings of cuDNN change no result and are ignored.
    """

    half = True

    bottoms = (1, None)
    tops = (1, None)
    equal_bottoms_and_tops = True

    _plan: Convolution
    _plan_shape: tuple[int, ...] | None = None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        param = self.param.convolution_param
        shape = bottom[0].shape
        if bottom[0].axis(param.axis, f"layer '{self.name}' ({self.type})") != 1:
            raise self.error(f"axis is {param.axis}, but channels must be axis 1, as in (N, C, H, W)")
        if len(shape) < 3:
            raise self.shape_error("the bottom needs at least one spatial axis, (N, C, W)", bottom[0])
        self._geometry = self._read_geometry(len(shape) - 2)
        self._check_channels(bottom)
        self.add_parameter(self._weights_shape(shape[1]), param.weight_filler)
        if param.bias_term:
            self.add_parameter((param.num_output,), param.bias_filler)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        if bottom[0].shape[1] != self._channels or len(bottom[0].shape) != len(self._geometry.kernel) + 2:
            raise self.shape_error(
                f"the weights need {self._channels} channels and {len(self._geometry.kernel)} spatial axes",
                bottom[0], self.blobs[0],
            )  # fmt: skip
        for other in bottom[1:]:
            if other.shape != bottom[0].shape:
                raise self.shape_error("all bottoms must have one shape", bottom[0], other)
        shape = (bottom[0].shape[0], self.param.convolution_param.num_output, *self._spatial(bottom))
        for blob in top:
            blob.reshape(shape)
        if self._plan_shape != bottom[0].shape:
            self._plan = self._make_plan(bottom[0].shape, shape)
            self._plan_shape = bottom[0].shape

    # -- the two directions differ in these ----------------------------------------------------------

    def _weights_shape(self, channels: int) -> tuple[int, ...]:
        raise NotImplementedError

    def _output_size(self, size: int, axis: int) -> int:
        raise NotImplementedError

    def _make_plan(self, bottom: tuple[int, ...], top: tuple[int, ...]) -> Convolution:
        raise NotImplementedError

    # -- shared --------------------------------------------------------------------------------------

    def _spatial(self, bottom: Blobs) -> tuple[int, ...]:
        sizes = tuple(self._output_size(size, i) for i, size in enumerate(bottom[0].shape[2:]))
        if min(sizes) < 1:
            g = self._geometry
            raise self.shape_error(
                f"kernel {g.kernel} with stride {g.stride}, pad {g.pad} and dilation {g.dilation} leaves a spatial "
                f"output of {sizes}; a smaller kernel or more padding would fit",
                bottom[0],
            )
        return sizes

    def _check_channels(self, bottom: Blobs) -> None:
        param = self.param.convolution_param
        self._channels = bottom[0].shape[1]
        if param.num_output < 1:
            raise self.error("convolution_param needs num_output")
        if param.group < 1 or self._channels % param.group or param.num_output % param.group:
            raise self.shape_error(
                f"group {param.group} must divide both the {self._channels} input channels and num_output "
                f"{param.num_output}",
                bottom[0],
            )

    def _read_geometry(self, axes: int) -> Geometry:
        param = self.param.convolution_param
        geometry = Geometry(
            kernel=self._per_axis("kernel", param.kernel_size, "kernel_size", axes, None),
            stride=self._per_axis("stride", param.stride, "stride", axes, 1),
            pad=self._per_axis("pad", param.pad, "pad", axes, 0),
            dilation=self._spread(param.dilation, "dilation", axes, 1),
            group=param.group,
        )
        for what in ("kernel", "stride", "dilation"):
            if min(getattr(geometry, what)) < 1:
                raise self.error(f"{what} is {getattr(geometry, what)}; no entry may be 0")
        return geometry

    def _per_axis(
        self, stem: str, values: Sequence[int], field: str, axes: int, default: int | None
    ) -> tuple[int, ...]:
        """A setting for each spatial axis, from `<stem>_h` and `<stem>_w` or from the repeated `field`."""
        param = self.param.convolution_param
        if not (param.HasField(f"{stem}_h") or param.HasField(f"{stem}_w")):
            return self._spread(values, field, axes, default)
        if axes != 2:
            raise self.error(f"{stem}_h and {stem}_w are for two spatial axes, but here are {axes}; use {field}")
        if values:
            raise self.error(f"give either {field} or {stem}_h and {stem}_w, not both")
        return (getattr(param, f"{stem}_h"), getattr(param, f"{stem}_w"))

    def _spread(self, values: Sequence[int], field: str, axes: int, default: int | None) -> tuple[int, ...]:
        """A repeated field, given once, once for each spatial axis, or not at all if it has a default."""
        if not values and default is not None:
            return (default,) * axes
        if len(values) == 1:
            return (values[0],) * axes
        if len(values) != axes:
            raise self.error(f"{field} is given {len(values)} times, but must be once, or once for each of {axes} axes")
        return tuple(values)

    def _bias_gradient(self, blob_diffs: list[object]) -> None:
        """Add up the tops' diffs over all but the channels."""
        if self.param.convolution_param.bias_term and self.propagate_to_params[1]:
            for diff in blob_diffs:
                self.backend.reduce(identity, (diff,), (self.blobs[1].diff,), accumulate=self.accumulate(1))


@register_layer("Convolution")
class ConvolutionLayer(BaseConvolutionLayer):
    """y = weights * x + bias, cross-correlation over windows (Caffe's `conv_layer.cpp`).

    Output size along an axis: floor((size + 2 pad - (dilation (kernel - 1) + 1)) / stride) + 1.
    """

    def _weights_shape(self, channels: int) -> tuple[int, ...]:
        param = self.param.convolution_param
        return (param.num_output, channels // param.group, *self._geometry.kernel)

    def _output_size(self, size: int, axis: int) -> int:
        g = self._geometry
        return spatial_output(size, g.kernel[axis], g.stride[axis], g.pad[axis], g.dilation[axis])

    def _make_plan(self, bottom: tuple[int, ...], top: tuple[int, ...]) -> Convolution:
        return self.backend.plan_convolution(bottom, self.blobs[0].shape, self._geometry, self.storage)

    @property
    def plan(self) -> Convolution:
        """The convolution of the present shapes."""
        return self._plan

    @property
    def bias(self) -> Array | None:
        """The bias, if there is one."""
        return self.blobs[1].data if self.param.convolution_param.bias_term else None

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        for x, y in zip(bottom, top, strict=True):
            self._plan.forward(x.data, self.weights(), self.bias, y.data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        self._bias_gradient([y.diff for y in top])
        for x, y, wanted in zip(bottom, top, propagate_down, strict=True):
            self.propagate(x, y.diff, wanted)

    def propagate(self, x: Blob, dy: Array, down: bool) -> None:
        """The gradients of the weights and, if `down`, of the bottom, given that of the top."""
        if self.propagate_to_params[0]:
            self._plan.backward_weights(x.data, dy, self.blobs[0].diff, self.accumulate(0))
        if down:
            self._plan.backward_data(dy, self.weights(), x.diff)


@register_layer("Deconvolution")
class DeconvolutionLayer(BaseConvolutionLayer):
    """The transpose of a convolution: its forward pass is a convolution's backward pass (Caffe's `deconv_layer.cpp`).

    Weights have shape (C, num_output / group, kernel...). Output size along an axis:
    stride (size - 1) + dilation (kernel - 1) + 1 - 2 pad.
    """

    def _weights_shape(self, channels: int) -> tuple[int, ...]:
        param = self.param.convolution_param
        return (channels, param.num_output // param.group, *self._geometry.kernel)

    def _output_size(self, size: int, axis: int) -> int:
        g = self._geometry
        return g.stride[axis] * (size - 1) + g.dilation[axis] * (g.kernel[axis] - 1) + 1 - 2 * g.pad[axis]

    def _make_plan(self, bottom: tuple[int, ...], top: tuple[int, ...]) -> Convolution:
        return self.backend.plan_convolution(top, self.blobs[0].shape, self._geometry, self.storage)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        for x, y in zip(bottom, top, strict=True):
            self._plan.backward_data(x.data, self.weights(), y.data)
            if self.param.convolution_param.bias_term:
                self.backend.apply(total_with_channel, (y.data, self.blobs[1].data), (y.data,))

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        self._bias_gradient([y.diff for y in top])
        for x, y, wanted in zip(bottom, top, propagate_down, strict=True):
            if self.propagate_to_params[0]:
                self._plan.backward_weights(y.diff, x.data, self.blobs[0].diff, self.accumulate(0))
            if wanted:
                self._plan.forward(y.diff, self.weights(), None, x.diff)
