"""Reshape of caffe_srgan in nets that are read."""

from __future__ import annotations

from caffepy.formats.proto.caffe_pb2 import NetParameter


def upgrade(net: NetParameter) -> None:
    """Give a Reshape with `pixelshuffler` the type PixelShuffle."""
    for layer in net.layer:
        if layer.type == "Reshape" and layer.reshape_param.pixelshuffler != 1:
            layer.type = "PixelShuffle"
