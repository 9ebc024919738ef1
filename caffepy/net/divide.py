"""Decides whether devices divide the passes of a net: its records in a training, its batches in a test."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from caffepy.formats.proto import caffe_pb2
from caffepy.layers.layer import LayerContext, layer_class
from caffepy.layers.python import PythonLayer
from caffepy.net.graph import Node

log = logging.getLogger(__name__)

_ALONE = "%s depends on earlier passes: device 0 alone scores this net, in the order of the batches"
_WHOLE = (
    "%s depends on earlier passes: the records are not divided, and all %d devices train on the same batches, as one "
    "device does; --batch per-device gives each device batches of its own, as in BVLC Caffe"
)
_OWN = (
    "%s depends on earlier passes: each of the %d devices follows the passes of its own batches alone, as in BVLC "
    "Caffe; let each batch begin its sequences"
)


def number_made_samples(nodes: Sequence[Node], context: LayerContext) -> None:
    """Number the samples of a net whose only data are made by Python layers, for random numbers that belong to samples.

    Devices that divide their data then draw what one device draws for the whole batch.
    """
    if context.first_sample is None:
        made = (node.tops[0].shape for node in nodes if isinstance(node.layer, PythonLayer) and not node.bottoms)
        if batch := next((shape[0] for shape in made if shape), 0):
            context.number_samples(batch)


def divide_passes(net: caffe_pb2.NetParameter, context: LayerContext) -> None:
    """Set `undivided` of the context's shard: whether a layer depends on earlier passes. The log names the layer.

    A training is undivided only if data layers read records, which the devices would divide.

    Args:
        net: the filtered net.
        context: of the net.

    Raises:
        ConfigError: the class of a Python layer cannot be loaded.
    """
    shard = context.shard = replace(context.shard, undivided=False)
    if shard.world_size == 1:
        return
    classes = [(layer, layer_class(layer.type, f"layer '{layer.name}'")) for layer in net.layer]
    found = next((layer for layer, cls in classes if cls.depends_on_earlier_passes(layer, context)), None)
    if found is None:
        return
    where, training = f"layer '{found.name}' ({found.type})", context.phase == caffe_pb2.TRAIN
    warning = logging.WARNING if context.log_level == logging.INFO else context.log_level
    if not training:
        log.log(context.log_level, _ALONE, where)
    elif not any(cls.prefetches for _, cls in classes):
        return
    elif shard.per_device_batch:
        log.log(warning, _OWN, where, shard.world_size)
        return
    else:
        log.log(warning, _WHOLE, where, shard.world_size)
    context.shard = replace(shard, undivided=True)
