"""Any prototxt as the benchmarks measure it: made-up inputs in place of its data layers, at any batch.

Layers without bottoms give the inputs. An Input layer says their shapes; of a layer that reads data, `transform_param`
says the size of an image of three channels. What they hold follows from who reads them: labels below the number of
classes, words of an Embed, regions of a ROIPooling, the marks of a recurrent layer, else normal numbers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Made = tuple[list[int], str]
"""A blob's shape, and what it holds (`zoo_nets.Made`)."""

ENDS = {"Accuracy", "DetectionOutput", "DetectionEvaluate", "Silence"}
"""Layers that are left out where a net predicts, beside losses."""
MOVING = {"Split", "Reshape", "Flatten", "Slice", "Permute", "Power"}
"""Layers behind which an input is still what it was."""


def is_file(name: str) -> bool:
    """Whether the name of a net is that of a file."""
    return name.endswith(".prototxt")


def has_loss(path: str) -> bool:
    """Whether the file's net can be trained.

    Raises:
        SystemExit: it cannot be read.
    """
    from caffepy.errors import CaffepyError
    from caffepy.formats.load import read_net

    try:
        return any("Loss" in layer.type for layer in _of_phase(read_net(Path(path)), True).layer)
    except (CaffepyError, OSError) as error:
        raise SystemExit(str(error)) from None


def file_param(path: str, train: bool, batch: int, source: str) -> tuple[Any, dict[str, Made]]:
    """The file's NetParameter with made-up inputs, and these; see `zoo_nets.net_param`.

    Args:
        path: of the prototxt.
        train: the TRAIN phase; else the TEST phase without its losses.
        batch: images; 0 takes the file's.
        source: type of the layer that holds the inputs.

    Raises:
        SystemExit: a data layer does not say the size of its images.
    """
    from caffepy.formats.load import read_net

    net = _of_phase(read_net(Path(path)), train)
    if not train:
        _keep(net, [layer for layer in net.layer if "Loss" not in layer.type and layer.type not in ENDS])
    givers = [layer for layer in net.layer if not layer.bottom and layer.top and layer.type != "Parameter"]
    read = {bottom for layer in net.layer for bottom in layer.bottom}
    shapes = {blob: shape for layer in givers for blob, shape in _shapes(layer) if blob in read}
    old = next(iter(shapes.values()))[0]
    shapes = {blob: _resized(shape, old, batch or old) for blob, shape in shapes.items()}
    rest = [layer for layer in net.layer if layer not in givers]
    _with_source(net, "Input", shapes, rest)
    kinds = _kinds(net, train)
    _with_source(net, source, shapes, rest)
    return net, {blob: (shape, kinds.get(blob, "normal")) for blob, shape in shapes.items()}


def batch_of(path: str) -> int:
    """The file's own batch."""
    return next(iter(file_param(path, has_loss(path), 0, "Input")[1].values()))[0][0]


def _of_phase(net: Any, train: bool) -> Any:
    from caffepy.formats.load import filter_net
    from caffepy.formats.proto import caffe_pb2

    return filter_net(net, caffe_pb2.NetState(phase=caffe_pb2.TRAIN if train else caffe_pb2.TEST))


def _keep(net: Any, layers: list[Any]) -> None:
    copies = [type(layer).FromString(layer.SerializeToString()) for layer in layers]
    del net.layer[:]
    net.layer.extend(copies)


def _with_source(net: Any, source: str, shapes: dict[str, list[int]], rest: list[Any]) -> None:
    _keep(net, rest)
    rest[:] = list(net.layer)
    holder = type(rest[0])(name="inputs", type=source, top=list(shapes))
    for shape in shapes.values():
        (holder.input_param if source == "Input" else holder.dummy_data_param).shape.add(dim=shape)
    net.layer.insert(0, holder)


def _shapes(layer: Any) -> Iterator[tuple[str, list[int]]]:
    """The tops of a layer without bottoms, and their shapes."""
    if layer.type in ("Input", "DummyData"):
        shapes = (layer.input_param if layer.type == "Input" else layer.dummy_data_param).shape
        for index, top in enumerate(layer.top):
            yield top, list(shapes[min(index, len(shapes) - 1)].dim)
        return
    batch = max(param.batch_size for param in (layer.data_param, layer.image_data_param, layer.hdf5_data_param))
    side = layer.transform_param.crop_size
    if not side:
        raise SystemExit(
            f"layer '{layer.name}' ({layer.type}) does not say how large its images are: give it "
            "transform_param.crop_size, or an Input layer in its place"
        )
    for top in layer.top:
        yield top, [batch, 3, side, side] if top == layer.top[0] else [batch]


def _resized(shape: list[int], old: int, new: int) -> list[int]:
    """A shape with another batch, along axis 0 or, of blobs that begin with time steps, axis 1."""
    axis = next((axis for axis in range(min(2, len(shape))) if shape[axis] == old), None)
    return [new if index == axis else length for index, length in enumerate(shape)]


def _kinds(net: Any, train: bool) -> dict[str, str]:
    """What the inputs hold that are not normal numbers."""
    from caffepy.backend.meta import MetaBackend
    from caffepy.formats.proto import caffe_pb2
    from caffepy.layers.layer import LayerContext
    from caffepy.net import Net

    built = Net(net, LayerContext(MetaBackend(), phase=caffe_pb2.TRAIN if train else caffe_pb2.TEST))
    origins: dict[str, str] = {}
    found: dict[str, str] = {}
    image = next((blob.shape for blob in built.blobs.values() if len(blob.shape) == 4), (0, 0, 0, 0))
    for layer in built.layers:
        bottoms = [origins.get(bottom, bottom) for bottom in layer.param.bottom]
        if layer.type in MOVING:
            origins.update(dict.fromkeys(layer.param.top, bottoms[0]))
        for index, bottom in enumerate(bottoms):
            kind = _kind(layer, index, [built.blobs[name].shape for name in layer.param.bottom], image)
            if kind:
                found[bottom] = kind
    return found


def _kind(layer: Any, index: int, shapes: list[tuple[int, ...]], image: tuple[int, ...]) -> str | None:
    """What a layer wants of a bottom."""
    kind, param = layer.type, layer.param
    if kind == "Embed":
        return f"ints:{param.embed_param.input_dim}"
    if index == 1 and kind in ("LSTM", "RNN"):
        return "begins"
    if index == 1 and kind in ("ROIPooling", "PSROIPooling"):
        return f"regions:{image[0]}:{image[2]}:{image[3]}"
    if index == 1 and kind in ("SoftmaxWithLoss", "Accuracy", "HingeLoss", "MultinomialLogisticLoss", "InfogainLoss"):
        axis = param.softmax_param.axis if kind == "SoftmaxWithLoss" else 1
        return f"ints:{shapes[0][axis]}"
    if index == 1 and kind == "SigmoidCrossEntropyLoss":
        return "unit"
    return "ints:2" if kind == "ContrastiveLoss" and index == 2 else None


def short(name: str) -> str:
    """A net's name in a table."""
    return os.path.basename(name).removesuffix(".prototxt") if is_file(name) else name
