"""The shape of a data layer's records as its own fields tell it, for data that are not there."""

from __future__ import annotations

from caffepy.proto import caffe_pb2

_SSD = ("AnnotatedData", "VideoData")


def told_shape(layer: caffe_pb2.LayerParameter, nvidia: bool) -> tuple[tuple[int, int, int], str] | None:
    """(C, H, W) of the crops or of the resized images, and the fields that say so; None where nothing does.

    The channels are as many as there are values of `mean_value`, but 3 for one value or none, and 1 for gray images.

    Args:
        layer: the data layer.
        nvidia: the prototxt is of NVIDIA's dialect, in which SSD's layers alone apply `resize_param`.
    """
    size = _told_size(layer, nvidia)
    if size is None:
        return None
    height, width, fields = size
    transform = layer.transform_param
    if transform.force_gray or (layer.type == "ImageData" and not layer.image_data_param.is_color):
        return (1, height, width), fields
    channels = len(transform.mean_value)
    return (channels if channels > 1 else 3, height, width), fields


def _told_size(layer: caffe_pb2.LayerParameter, nvidia: bool) -> tuple[int, int, str] | None:
    """Height and width of the images, whatever the records', and the fields that say so."""
    transform, listed = layer.transform_param, layer.image_data_param
    resize = transform.resize_param
    applied = transform.HasField("resize_param") and (layer.type in _SSD or not nvidia)
    fixed = applied and resize.resize_mode != caffe_pb2.ResizeParameter.FIT_SMALL_SIZE
    told = (
        (transform.crop_size, transform.crop_size, "crop_size"),
        (transform.crop_h, transform.crop_w, "crop_h and crop_w"),
        (resize.height if fixed else 0, resize.width if fixed else 0, "resize_param"),
        (listed.new_height, listed.new_width, "new_height and new_width"),
    )
    return next((size for size in told if size[0] and size[1]), None)
