"""The shapes of a net's blobs, without running it."""

from __future__ import annotations

import logging

from caffepy.backend.meta import MetaBackend
from caffepy.config.dialect import Dialect, choose_dialect
from caffepy.config.filter import filter_net, net_state
from caffepy.errors import CaffepyError
from caffepy.layers import LayerContext
from caffepy.net import Net
from caffepy.net.record_shape import told_shape
from caffepy.proto import caffe_pb2

log = logging.getLogger(__name__)


def blob_shapes(net: caffe_pb2.NetParameter, phase: int | None) -> dict[str, tuple[int, ...]]:
    """The shapes of a net's blobs by name, as far as they follow from the prototxt: Input layers, sizes of crops.

    Data are not opened, and a net with Python layers is not built: their code would run.

    Args:
        net: the net.
        phase: of the net; None: TRAIN, and TEST for the blobs that are only there.
    """
    phases = (caffe_pb2.TEST, caffe_pb2.TRAIN) if phase is None else (phase,)
    shapes: dict[str, tuple[int, ...]] = {}
    for one in phases:
        try:
            shapes |= _shapes_in(net, one)
        except CaffepyError as error:
            log.debug("no shapes of blobs in phase %s: %s", caffe_pb2.Phase.Name(one), error)
    return shapes


def _shapes_in(param: caffe_pb2.NetParameter, phase: int) -> dict[str, tuple[int, ...]]:
    state = net_state(phase, param.state, net_state(phase))
    layers = filter_net(param, state).layer
    if any(layer.type == "Python" for layer in layers):
        return {}
    nvidia = choose_dialect([param], lambda *line: None) is Dialect.NVIDIA
    samples = {
        top: told[0] if index == 0 else ()
        for layer in layers
        if not layer.bottom and (told := told_shape(layer, nvidia)) is not None
        for index, top in enumerate(layer.top)
    }
    net = Net(param, LayerContext(MetaBackend(), phase=phase, sample_shapes=samples), state)
    try:
        return {name: tuple(blob.shape) for name, blob in net.blobs.items()}
    finally:
        net.close()
