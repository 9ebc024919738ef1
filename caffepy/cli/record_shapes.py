"""The shapes of a net's records, whether its data are on this machine or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from caffepy.errors import DataError

if TYPE_CHECKING:
    from caffepy.layers import LayerContext
    from caffepy.proto import caffe_pb2

_LABELS: dict[str, tuple[int, ...]] = {"AnnotatedData": (1, 1, 8)}
"""The shape of a label, for data that are not there, where it is not one number: here one box, see the layer."""


def record_shapes(
    param: caffe_pb2.NetParameter,
    context: LayerContext,
    state: caffe_pb2.NetState,
    given: tuple[int, ...] | None,
    say: Callable[[str], object],
) -> dict[str, tuple[int, ...]]:
    """The shape of one record, by top of a data layer: as given, of the data, or of the crops or resized images.

    Args:
        param: the net.
        context: of the net, for paths and dialect.
        state: chooses the layers.
        given: what --shape says.
        say: takes a sentence about data that are not there.

    Raises:
        DataError: the data are not there, and the prototxt does not tell their shape.
    """
    from caffepy.config.dialect import Dialect, choose_dialect
    from caffepy.config.filter import filter_net
    from caffepy.net.memory_plan import read_sample_shapes
    from caffepy.proto import caffe_pb2

    dialect = context.dialect or choose_dialect([param], lambda *line: None)
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in filter_net(param, state).layer:
        if layer.bottom:
            continue
        labels = [_LABELS.get(layer.type, ())] * (len(layer.top) - 1)
        if given is not None:
            shapes |= zip(layer.top, [given, *labels], strict=False)
            continue
        try:
            single = caffe_pb2.NetParameter(layer=[layer])
            shapes |= read_sample_shapes(single, replace(context, dialect=dialect), state)
        except DataError as error:
            told = _told_shape(layer, error, dialect is Dialect.NVIDIA, say)
            shapes |= zip(layer.top, [told, *labels], strict=False)
    return shapes


def _told_shape(
    layer: caffe_pb2.LayerParameter, error: DataError, nvidia: bool, say: Callable[[str], object]
) -> tuple[int, ...]:
    """The shape of a layer's crops or resized images, for data that do not exist on this machine."""
    from caffepy.net.record_shape import told_shape

    told = told_shape(layer, nvidia)
    if told is None:
        raise DataError(f"{error}; or give the shape of one record, e.g. --shape 3,224,224") from error
    shape, fields = told
    text = ",".join(map(str, shape))
    say(f"layer '{layer.name}': its data are not there; taken as --shape {text}, from {fields}")
    return shape
