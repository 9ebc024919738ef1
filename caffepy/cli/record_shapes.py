"""Record shapes of a net, with or without its data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from caffepy.errors import DataError

if TYPE_CHECKING:
    from caffepy.layers import LayerContext
    from caffepy.proto import caffe_pb2


def record_shapes(
    param: caffe_pb2.NetParameter,
    context: LayerContext,
    state: caffe_pb2.NetState,
    given: tuple[int, ...] | None,
    say: Callable[[str], object],
) -> dict[str, tuple[int, ...]]:
    """Return the shape of one record by top of a data layer: as given, from the data, or from the layer's fields.

    Args:
        param: the net.
        context: gives paths and dialect.
        state: selects the layers.
        given: the value of --shape.
        say: reports missing data.

    Raises:
        DataError: the data are missing and the prototxt does not give their shape.
    """
    from caffepy.config.dialect import Dialect, choose_dialect
    from caffepy.config.filter import filter_net
    from caffepy.net.memory_plan import read_sample_shapes
    from caffepy.net.record_shape import label_shapes
    from caffepy.proto import caffe_pb2

    dialect = context.dialect or choose_dialect([param], lambda *line: None)
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in filter_net(param, state).layer:
        if layer.bottom:
            continue
        if given is not None:
            shapes |= zip(layer.top, [given, *label_shapes(layer, given)], strict=False)
            continue
        try:
            single = caffe_pb2.NetParameter(layer=[layer])
            shapes |= read_sample_shapes(single, replace(context, dialect=dialect), state)
        except DataError as error:
            told = _told_shape(layer, error, dialect is Dialect.NVIDIA, say)
            shapes |= zip(layer.top, [told, *label_shapes(layer, told)], strict=False)
    return shapes


def _told_shape(
    layer: caffe_pb2.LayerParameter, error: DataError, nvidia: bool, say: Callable[[str], object]
) -> tuple[int, ...]:
    """Return the shape of a layer's crops or resized images, for missing data."""
    from caffepy.net.record_shape import told_shape

    told = told_shape(layer, nvidia)
    if told is None:
        raise DataError(f"{error}; or give the shape of one record, e.g. --shape 3,224,224") from error
    shape, fields = told
    text = ",".join(map(str, shape))
    say(f"layer '{layer.name}': its data are missing; using --shape {text}, from {fields}")
    return shape
