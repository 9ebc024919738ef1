"""Crop of CRF as RNN in nets that are read."""

from __future__ import annotations

from caffepy.formats.proto.caffe_pb2 import NetParameter


def upgrade(net: NetParameter) -> None:
    """Let Crop without `crop_param` find its offset in a net for the Caffe of CRF as RNN, as that Caffe's does."""
    if any(layer.type == "MultiStageMeanfield" for layer in net.layer):
        for layer in net.layer:
            if layer.type == "Crop" and not layer.HasField("crop_param"):
                layer.type = "AutoCrop"
