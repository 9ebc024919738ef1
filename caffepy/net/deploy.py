"""The net that is left for predictions: Input in place of data, no losses, nothing that only training needs."""

from __future__ import annotations

from caffepy.proto import caffe_pb2


def crop_shape(layer: caffe_pb2.LayerParameter) -> tuple[int, ...] | None:
    """The shape of one record of a data layer that crops, as far as its transformation tells; None if it does not.

    The channels are as many as there are values of `mean_value`, but 3 for one value or none, and 1 with `force_gray`.
    """
    transform = layer.transform_param
    height, width = (transform.crop_size or size for size in (transform.crop_h, transform.crop_w))
    if not (height and width):
        return None
    channels = 1 if transform.force_gray else len(transform.mean_value)
    return (3 if channels <= 1 and not transform.force_gray else channels, height, width)
