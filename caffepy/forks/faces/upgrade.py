"""Settings of caffe-windows and dgd_person_reid in nets that are read."""

from __future__ import annotations

from caffepy.formats.proto.caffe_pb2 import NetParameter

_OF_CAFFE_WINDOWS = frozenset(
    {"ChannelScale", "GlobalLSEMargin", "InnerDistance", "LabelSpecificAdd", "LabelSpecificRescale"}
)
"""Types that show that a net is for caffe-windows."""


def upgrade(net: NetParameter) -> None:
    _mark_normalize(net)
    _name_crops(net)


def _mark_normalize(net: NetParameter) -> None:
    """Give a Normalize without settings an empty `normalize_param` in a net for caffe-windows.

    Such a net has a fully connected layer with normalised weights, a layer of `_OF_CAFFE_WINDOWS`, or a Normalize with
    `normalize_param`.
    """
    if any(
        layer.type in _OF_CAFFE_WINDOWS or layer.HasField("normalize_param") or layer.inner_product_param.normalize
        for layer in net.layer
    ):
        for layer in net.layer:
            if layer.type == "Normalize" and not layer.HasField("norm_param"):
                layer.normalize_param.SetInParent()


def _name_crops(net: NetParameter) -> None:
    """Give `crop_height` and `crop_width` of dgd_person_reid's Data and ImageData the names that SSD's Caffe has."""
    for layer in net.layer:
        transform = layer.transform_param
        if layer.type in ("Data", "ImageData") and transform.crop_height and transform.crop_width:
            transform.crop_h, transform.crop_w = transform.crop_height, transform.crop_width
            transform.ClearField("crop_height")
            transform.ClearField("crop_width")
