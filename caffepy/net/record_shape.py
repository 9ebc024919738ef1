"""Nets without their data: record shapes from a data layer's fields, and synthetic records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from caffepy.errors import ConfigError
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.input.prefetching import PrefetchingLayer
from caffepy.layers.layer import layer_class


def _data_layer(layer: caffe_pb2.LayerParameter) -> type[PrefetchingLayer]:
    """Return the class of a data layer, or the base class for a type that reads no data or that nothing registers."""
    try:
        found = layer_class(layer.type)
    except ConfigError:
        return PrefetchingLayer
    return found if issubclass(found, PrefetchingLayer) else PrefetchingLayer


def told_shape(layer: caffe_pb2.LayerParameter, nvidia: bool) -> tuple[tuple[int, ...], str] | None:
    """Return the shape of the crops or resized images, and the names of the fields that tell it; None if unknown.

    Args:
        layer: the data layer.
        nvidia: the prototxt has NVIDIA's dialect, in which only SSD's layers apply `resize_param`.
    """
    data_layer = _data_layer(layer)
    size = data_layer.told_size(layer, nvidia)
    if size is None:
        return None
    height, width, fields = size
    return data_layer.told_image(layer, height, width), fields


def label_shapes(layer: caffe_pb2.LayerParameter, image: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the shapes of the tops after a data layer's first, for a record of shape `image` and one object."""
    return _data_layer(layer).label_shapes(layer, image)


def object_list(layer: caffe_pb2.LayerParameter, shapes: Mapping[str, Sequence[int]]) -> int | None:
    """Return the index of the top that holds one list of the objects of all images; None: there is none."""
    return _data_layer(layer).object_list(layer, shapes)


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
