"""Nets whose data are not there: the shape of a record as a data layer's fields tell it, and made-up records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from caffepy.errors import ConfigError
from caffepy.layers.core.base import layer_class
from caffepy.layers.input.prefetching import PrefetchingLayer
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


def without_data(
    net: caffe_pb2.NetParameter,
    shapes: Mapping[str, Sequence[int]],
    devices: int = 1,
    *,
    filler: str = "constant",
    as_inputs: bool = False,
) -> caffe_pb2.NetParameter:
    """A copy whose layers that read records are DummyData layers: the first top is filled, labels are 0, boxes none.

    Args:
        net: as read; layers of all phases and stages are replaced.
        shapes: of one record, by top, as `LayerContext.sample_shapes`; others have one number a record.
        devices: that divide a batch.
        filler: type of the first top's filler.
        as_inputs: make Input layers instead, for a caller that fills them.

    Raises:
        ConfigError: a layer's batch_size is not positive.
    """
    result = caffe_pb2.NetParameter()
    result.CopyFrom(net)
    for layer in result.layer:
        if not issubclass(layer_class(layer.type, f"layer '{layer.name}'"), PrefetchingLayer):
            continue
        batch = -(-_take_batch_size(layer) // devices)
        boxes = layer.type == "AnnotatedData" and len(layer.top) > 1 and shapes.get(layer.top[1], (1,))[-1] > 1
        layer.type = "Input" if as_inputs else "DummyData"
        given = layer.input_param.shape if as_inputs else layer.dummy_data_param.shape
        for index, top in enumerate(layer.top):
            is_list = boxes and index == 1  # one of all images' boxes, in which rows of -1 are none
            given.add(dim=(1 if is_list else batch, *shapes.get(top, ())))
            if not as_inputs:
                kind = "constant" if index else filler
                layer.dummy_data_param.data_filler.add(type=kind, value=-1.0 if is_list else 0.0)
    return result


def _take_batch_size(layer: caffe_pb2.LayerParameter) -> int:
    """The batch_size of a data layer, whose fields about the reading of records are cleared."""
    size = 0
    for field, value in layer.ListFields():
        if field.message_type is not None and "batch_size" in field.message_type.fields_by_name:
            size = max(size, value.batch_size)
            layer.ClearField(field.name)
    if size <= 0:
        raise ConfigError(f"layer '{layer.name}' ({layer.type}): batch_size must be given and positive")
    return size
