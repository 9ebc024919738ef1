"""DepthwiseConvolution and ConvolutionDepthwise: a convolution of each channel by itself."""

from __future__ import annotations

from caffepy.layers.core.base import Blobs, register_layer
from caffepy.layers.vision.convolution import ConvolutionLayer
from caffepy.proto import caffe_pb2


@register_layer("DepthwiseConvolution")
class DepthwiseConvolutionLayer(ConvolutionLayer):
    """Convolution, whose `group` the prototxt gives; MobileNet's forks of Caffe have faster code for it."""


@register_layer("ConvolutionDepthwise")
class ConvolutionDepthwiseLayer(ConvolutionLayer):
    """Convolution with as many groups as channels, whatever `group` says; weights (C, 1, kernel…)."""

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.convolution_param
        channels = bottom[0].shape[bottom[0].axis(param.axis, self.where)]
        if param.num_output and param.num_output != channels:
            raise self.shape_error(
                f"num_output is {param.num_output}; a depthwise convolution has as many outputs as channels, "
                f"{channels}: leave it out or use Convolution with group",
                bottom[0],
            )
        own = caffe_pb2.LayerParameter()
        own.CopyFrom(self.param)
        own.convolution_param.group = own.convolution_param.num_output = channels
        self.param = own
        super().setup(bottom, top)
