"""Parameter."""

from __future__ import annotations

from caffepy.blob import check_shape
from caffepy.layers.core.base import Blobs, Layer, register_layer
from caffepy.proto import caffe_pb2


@register_layer("Parameter")
class ParameterLayer(Layer):
    """y = a learned parameter of shape `parameter_param.shape`, initially 0 (Caffe's `parameter_layer.hpp`).

    The top shares the parameter's data: what a program writes there after a pass changes the parameter.
    """

    bottoms = (0, 0)

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        shape = tuple(self.param.parameter_param.shape.dim)
        check_shape(shape, self.where)
        self.add_parameter(shape, caffe_pb2.FillerParameter())
        top[0].reshape(shape)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        """The top keeps its shape."""

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if self.tops_overwritten:
            self.backend.copy(self.blobs[0].data, top[0].data)
        else:
            top[0].bind(data=self.blobs[0].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if not self.propagate_to_params[0]:
            return
        if self.accumulate(0):
            self.backend.add(top[0].diff, self.blobs[0].diff)
        else:
            self.backend.copy(top[0].diff, self.blobs[0].diff)
