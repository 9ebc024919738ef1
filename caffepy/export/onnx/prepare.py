"""From files to the net that is exported: layers of training left out, batch set, weights loaded."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.backend import create_backend
from caffepy.backend.interface import Backend
from caffepy.backend.meta import MetaBackend
from caffepy.errors import ConfigError
from caffepy.formats.caffemodel import read_caffemodel
from caffepy.formats.dialect import Dialect, choose_dialect
from caffepy.formats.load import filter_net, net_state, read_net
from caffepy.formats.paths import PathResolver
from caffepy.formats.proto import caffe_pb2
from caffepy.layers import LayerContext, layer_class, replaces_built_in
from caffepy.net import Net
from caffepy.net.memory_plan import with_batch

log = logging.getLogger(__name__)

_ONLY_FOR_TRAINING = frozenset({"Accuracy", "DetectionEvaluate", "FLOWriter", "HDF5Output", "ImgWriter"})
"""Layers without a loss that no net for inference needs."""

_STATISTICS = ("BatchNorm", "BN")
"""Layers whose parameters stay float32: a variance may be beyond the range of float16."""


@dataclass(frozen=True)
class Settings:
    """How a net is built for export.

    Args:
        phase: whose layers are taken; all compute as in TEST.
        level: the net state's.
        stages: likewise.
        batch: the first axis of all inputs; None: as the prototxt says.
    """

    phase: int = caffe_pb2.TEST
    level: int = 0
    stages: Sequence[str] = field(default_factory=tuple)
    batch: int | None = None


def open_for_export(model: Path, weights: Sequence[Path], settings: Settings) -> tuple[Net, caffe_pb2.NetParameter]:
    """The net with its weights, on the CPU, and the message that it was built of.

    Raises:
        CaffepyError: whatever is wrong with the files.
    """
    whole = read_net(model)
    param = inference_net(whole, settings)
    net = build(param, create_backend(), model, choose_dialect([whole]))
    for path in weights:
        net.copy_trained_layers_from(read_caffemodel(path), str(path))
    return net, param


def round_to_half(net: Net) -> None:
    """Round the net's parameters to float16, but for the statistics of BatchNorm.

    Raises:
        ConfigError: a value is beyond the range of float16.
    """
    for layer in net.layers:
        if layer.type in _STATISTICS:
            continue
        for index, blob in enumerate(layer.blobs):
            with np.errstate(over="ignore"):
                values = np.asarray(blob.host_data(), np.float32).astype(np.float16)
            if not np.isfinite(values).all():
                raise layer.error(f"parameter {index} has values that float16 cannot hold; export without --half")
            net.backend.from_host(values.astype(np.float32), blob.data)


def as_half(values: NDArray[Any]) -> NDArray[Any]:
    """Return float32 values as float16 if none of them changes, else unchanged."""
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    return half if np.array_equal(half.astype(values.dtype), values) else values


def build(param: caffe_pb2.NetParameter, backend: Backend, model: Path = Path(), dialect: Dialect | None = None) -> Net:
    """A net for inference.

    Args:
        param: its layers.
        backend: where it computes.
        model: its file, for the paths in it.
        dialect: that of the net that `param` is a part of; None: the fields of `param` choose it.
    """
    with backend.activate():
        context = LayerContext(backend, phase=caffe_pb2.TEST, resolve=PathResolver(model), dialect=dialect)
        return Net(param, context, param.state)


def varying_axes(param: caffe_pb2.NetParameter, model: Path = Path()) -> dict[str, list[bool]]:
    """Of each blob's axes whether their size follows the batch."""
    first, second = (build(with_batch(param, batch), MetaBackend(), model) for batch in (2, 3))
    found = {}
    for name, blob in first.blobs.items():
        other = second.blobs[name].shape
        if len(other) != len(blob.shape):
            raise ConfigError(f"blob '{name}' has another number of axes for another batch; export it with --batch N")
        found[name] = [a != b for a, b in zip(blob.shape, other, strict=True)]
    return found


def inference_net(param: caffe_pb2.NetParameter, settings: Settings) -> caffe_pb2.NetParameter:
    """The layers of a net that inference needs, filtered by phase, with the batch set.

    Inputs that none of these layers reads, such as labels, are left out.

    Raises:
        ConfigError: a layer reads records, or nothing is left.
    """
    own = caffe_pb2.NetState(level=settings.level, stage=settings.stages)
    net = filter_net(param, net_state(settings.phase, param.state, own))
    kept = [layer for layer in net.layer if not _is_for_training(layer)]
    read = {bottom for layer in kept for bottom in layer.bottom}
    result = caffe_pb2.NetParameter(name=net.name, state=net.state)
    result.state.phase = caffe_pb2.TEST
    for layer in kept:
        own_layer = _without_unread(layer, read)
        if own_layer is not None:
            own_layer.phase = caffe_pb2.TEST
            result.layer.append(own_layer)
    if not any(layer.type != "Input" for layer in result.layer):
        phase = caffe_pb2.Phase.Name(net.state.phase)
        raise ConfigError(f"the net has no layers for inference in the {phase} phase; give --phase or --stage")
    return with_batch(result, settings.batch) if settings.batch is not None else result


def _is_for_training(layer: caffe_pb2.LayerParameter) -> bool:
    return layer.type in _ONLY_FOR_TRAINING or layer_class(layer.type, f"layer '{layer.name}'").is_loss


def _without_unread(layer: caffe_pb2.LayerParameter, read: set[str]) -> caffe_pb2.LayerParameter | None:
    """The layer, an Input without the tops that no layer reads; None if no top is left.

    Raises:
        ConfigError: it reads records.
    """
    cls = layer_class(layer.type)
    if replaces_built_in(layer.type):
        raise ConfigError(
            f"layer '{layer.name}' ({layer.type}) is of a class that the program registered, which cannot be exported"
        )
    if cls.prefetches or (cls.bottoms == (0, 0) and layer.type not in ("Input", "Parameter", "DummyData")):
        raise ConfigError(
            f"layer '{layer.name}' ({layer.type}) reads records, which an exported net does not; export the deploy "
            "net, whose Input layer says the image's shape"
        )
    result = caffe_pb2.LayerParameter()
    result.CopyFrom(layer)
    if layer.type != "Input":
        return result
    chosen = [index for index, top in enumerate(layer.top) if top in read]
    for top in set(layer.top) - read:
        log.info("input '%s' is left out: no layer of the export reads it", top)
    shapes = layer.input_param.shape
    del result.top[:], result.input_param.shape[:]
    result.top.extend(layer.top[index] for index in chosen)
    result.input_param.shape.extend(
        [shapes[index] for index in chosen] if len(shapes) == len(layer.top) else list(shapes)
    )
    return result if chosen else None
