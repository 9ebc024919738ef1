"""Nets without their data: record shapes from a data layer's fields, and synthetic records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from caffepy.data.clips import is_of_segments
from caffepy.errors import ConfigError
from caffepy.layers.core.base import layer_class
from caffepy.layers.input.anchor_labels import CHANNELS, LabelMap
from caffepy.layers.input.image_gt_data import crop_size
from caffepy.layers.input.prefetching import PrefetchingLayer
from caffepy.proto import caffe_pb2

_SSD = ("AnnotatedData", "VideoData")


def told_shape(layer: caffe_pb2.LayerParameter, nvidia: bool) -> tuple[tuple[int, ...], str] | None:
    """Return (C, H, W) of the crops or resized images, and the names of the fields used; None if unknown.

    Clips of VideoData have the shape (C, frames, H, W), or for TSN (C, H, W) with the channels of all frames.

    C is the number of values of `mean_value`, but 3 for one value or none, and 1 for gray images.

    Args:
        layer: the data layer.
        nvidia: the prototxt has NVIDIA's dialect, in which only SSD's layers apply `resize_param`.
    """
    size = _told_size(layer, nvidia)
    if size is None:
        return None
    height, width, fields = size
    transform = layer.transform_param
    if layer.video_data_param.HasField("source"):
        return _clip_shape(layer.video_data_param, height, width), fields
    if transform.force_gray or (layer.type == "ImageData" and not layer.image_data_param.is_color):
        return (1, height, width), fields
    channels = len(transform.mean_value)
    return (channels if channels > 1 else 3, height, width), fields


def _clip_shape(param: caffe_pb2.VideoDataParameter, height: int, width: int) -> tuple[int, ...]:
    if not is_of_segments(param):
        return 3, param.new_length, height, width
    colors = 2 if param.modality == param.FLOW else 1 if param.grayscale else 3
    return colors * param.new_length * param.num_segments, height, width


def _told_size(layer: caffe_pb2.LayerParameter, nvidia: bool) -> tuple[int, int, str] | None:
    """Return the height and width that the fields fix for all images, and the names of these fields."""
    transform, listed = layer.transform_param, layer.image_data_param
    if layer.type in WINDOW_FILES:
        return _window_file_size(layer)
    resize = transform.resize_param[0] if transform.resize_param else caffe_pb2.ResizeParameter()
    applied = bool(transform.resize_param) and (layer.type in _SSD or not nvidia)
    fixed = applied and resize.resize_mode != caffe_pb2.ResizeParameter.FIT_SMALL_SIZE
    told = (
        (transform.crop_size, transform.crop_size, "crop_size"),
        (transform.crop_h, transform.crop_w, "crop_h and crop_w"),
        (resize.height if fixed else 0, resize.width if fixed else 0, "resize_param"),
        (listed.new_height, listed.new_width, "new_height and new_width"),
        (layer.video_data_param.new_height, layer.video_data_param.new_width, "new_height and new_width"),
    )
    return next((size for size in told if size[0] and size[1]), None)


WINDOW_FILES = ("ImageGtData", "DetectionData", "EvalData")
"""Layers with images and objects of window files."""


def _window_file_size(layer: caffe_pb2.LayerParameter) -> tuple[int, int, str] | None:
    """Return the height and width of the images of a layer of `WINDOW_FILES`; wide images where both are possible."""
    if layer.type == "ImageGtData":
        size = crop_size(layer.image_gt_data_param)
        return None if size is None else (*size, "crop_height and crop_width or resize_height and resize_width")
    param = layer.detection_data_param if layer.type == "DetectionData" else layer.eval_data_param
    sides = (
        ("crop_height", "crop_width"), ("crop_short_size", "crop_long_size"), ("resize_height", "resize_width"),
        ("short_size", "long_size"),
    )  # fmt: skip
    for height, width in sides:
        if height in param.DESCRIPTOR.fields_by_name and getattr(param, height) and getattr(param, width):
            return getattr(param, height), getattr(param, width), f"{height} and {width}"
    return None


def label_shapes(layer: caffe_pb2.LayerParameter, image: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the shapes of the tops after a data layer's first, for a record of shape `image` and one object."""
    count = len(layer.top) - 1
    if layer.type == "AnnotatedData":
        return [(1, 1, 8)] * count
    if layer.type == "EvalData":
        sizes: list[tuple[int, ...]] = [(8, 1, 1), (2, 1, 1)]
        return sizes[:count]
    if layer.type not in WINDOW_FILES or len(image) != 3:
        return [()] * count
    mscnn = layer.type == "ImageGtData"
    param = layer.image_gt_data_param if mscnn else layer.detection_data_param
    strides = layer.image_gt_data_param.downsample_rate if mscnn else layer.detection_data_param.stride
    maps: list[tuple[int, ...]] = [
        (CHANNELS, *LabelMap(1, 1, max(stride, 1)).shape(image[1], image[2])) for stride in strides
    ]
    return [*maps, (7 if mscnn else 8, 1, 1)] if param.output_gt_boxes else maps


def object_list(layer: caffe_pb2.LayerParameter, shapes: Mapping[str, Sequence[int]]) -> int | None:
    """Return the index of the top that holds one list of the objects of all images; None: there is none."""
    if layer.type == "AnnotatedData" and layer.annotated_data_param.yolo_data_type == 1:
        return None
    if layer.type == "AnnotatedData":
        return 1 if len(layer.top) > 1 and shapes.get(layer.top[1], (1,))[-1] > 1 else None
    if layer.type == "EvalData":
        return 1
    listed = layer.image_gt_data_param.output_gt_boxes or layer.detection_data_param.output_gt_boxes
    return len(layer.top) - 1 if layer.type in WINDOW_FILES and listed else None


def without_data(
    net: caffe_pb2.NetParameter,
    shapes: Mapping[str, Sequence[int]],
    devices: int = 1,
    *,
    filler: str = "constant",
    as_inputs: bool = False,
) -> caffe_pb2.NetParameter:
    """Return a copy with DummyData in place of data layers: the first top is filled, labels are 0, boxes empty.

    Args:
        net: the net as read; layers of all phases and stages are replaced.
        shapes: shape of one record by top, as `LayerContext.sample_shapes`; other tops have one element per record.
        devices: the number of devices that divide a batch.
        filler: filler type of the first top.
        as_inputs: create Input layers instead.

    Raises:
        ConfigError: a layer's batch_size is not positive.
    """
    result = caffe_pb2.NetParameter()
    result.CopyFrom(net)
    for layer in result.layer:
        if not issubclass(layer_class(layer.type, f"layer '{layer.name}'"), PrefetchingLayer):
            continue
        objects = object_list(layer, shapes)
        batch = -(-_take_batch_size(layer) // devices)
        layer.type = "Input" if as_inputs else "DummyData"
        given = layer.input_param.shape if as_inputs else layer.dummy_data_param.shape
        for index, top in enumerate(layer.top):
            is_list = index == objects  # rows of -1 are empty
            given.add(dim=(1 if is_list else batch, *shapes.get(top, ())))
            if not as_inputs:
                kind = "constant" if index else filler
                layer.dummy_data_param.data_filler.add(type=kind, value=-1.0 if is_list else 0.0)
    return result


def _take_batch_size(layer: caffe_pb2.LayerParameter) -> int:
    """Return the batch_size of a data layer and clear its fields for reading records."""
    size = 0
    for field, value in layer.ListFields():
        if field.message_type is not None and "batch_size" in field.message_type.fields_by_name:
            size = max(size, value.batch_size)
            layer.ClearField(field.name)
    if size <= 0:
        raise ConfigError(f"layer '{layer.name}' ({layer.type}): batch_size must be given and positive")
    return size
