"""Trial of a net without its data: builds it in each phase and stage, and passes made-up values through it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from caffepy.backend import create_backend
from caffepy.backend.interface import Backend
from caffepy.backend.meta import MetaBackend
from caffepy.errors import CaffepyError, DataError
from caffepy.formats.dialect import Dialect, choose_dialect
from caffepy.formats.load import filter_net, net_state
from caffepy.formats.paths import PathResolver
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.input.arrays import MemoryDataLayer
from caffepy.layers.input.prefetching import PrefetchingLayer
from caffepy.layers.layer import LayerContext, layer_class
from caffepy.net.memory_plan import with_batch
from caffepy.net.net import Net
from caffepy.net.record_shape import label_shapes, object_list, told_shape, without_data

Shape = tuple[int, ...]

BUILDS, RUNS = "build", "run"
MOST_STAGES = 6
"""Stages of a net, of which pairs are tried."""
TRIAL_BATCH = 2
"""Records of a batch."""


def net_states(param: caffe_pb2.NetParameter) -> list[caffe_pb2.NetState]:
    """Return a state for each phase and set of stages that the rules of the net's layers name; TEST if no phase.

    States that leave the same layers count once. A state without a layer that makes blobs is left out. Sets have two
    stages at most, and one if there are more than `MOST_STAGES`.
    """
    rules = [rule for layer in param.layer for rule in (*layer.include, *layer.exclude)]
    phases = sorted({rule.phase for rule in rules if rule.HasField("phase")} or {caffe_pb2.TEST})
    stages = sorted({stage for rule in rules for stage in (*rule.stage, *rule.not_stage)})
    found: dict[bytes, caffe_pb2.NetState] = {}
    most = 2 if len(stages) <= MOST_STAGES else 1
    for phase in phases:
        for chosen in itertools.chain(*(itertools.combinations(stages, count) for count in range(most + 1))):
            state = net_state(phase, param.state, caffe_pb2.NetState(stage=chosen))
            layers = filter_net(param, state).layer
            if any(not layer.bottom for layer in layers):
                found.setdefault(b"".join(layer.SerializeToString() for layer in layers), state)
    return list(found.values())


def try_net(param: caffe_pb2.NetParameter, path: Path, record: Shape | None = None) -> Iterator[str]:
    """Build a net in its states, then run it forward in each, and backward in the TRAIN phase.

    No rule says which stages belong together: a phase counts as built if the net is built in one of its states. Data
    layers become DummyData layers. No file is written.

    Args:
        param: the net as read.
        path: its file, for relative paths.
        record: shape of a record, for data layers whose fields do not tell it.

    Yields:
        `BUILDS` when the net is built in each phase, then `RUNS`.

    Raises:
        CaffepyError: the net is refused in all states of a phase, or a pass fails.
    """
    resolve = PathResolver(path)
    nets, refused = list[caffe_pb2.NetParameter](), dict[int, CaffepyError]()
    for state in net_states(param):
        try:
            nets.append(prepared(filter_net(param, state), record, resolve))
        except CaffepyError as error:
            refused.setdefault(state.phase, error)
    for phase in refused.keys() - {net.state.phase for net in nets}:
        raise refused[phase]
    yield BUILDS
    backend = create_backend(threads=1)
    with backend.activate():
        for each in nets:
            net = _build(each, backend, resolve)
            _fill(net)
            net.clear_param_diffs()
            net.forward()
            net.raise_device_errors()
            if net.phase == caffe_pb2.TRAIN and any(any(layer.loss_weights) for layer in net.layers):
                net.backward()
            net.close()
    yield RUNS


def prepared(net: caffe_pb2.NetParameter, record: Shape | None, resolve: PathResolver) -> caffe_pb2.NetParameter:
    """Return a filtered net without data that can be built: made-up records, labels of the shapes that readers take.

    Batches have `TRIAL_BATCH` records, or the file's own number if a layer wants it.

    Args:
        net: the net, filtered for one state; it is changed.
        record: shape of a record, for data layers whose fields do not tell it.
        resolve: of the net's paths.

    Raises:
        DataError: a data layer's fields do not tell the shape of a record, and `record` is None.
        CaffepyError: the net cannot be built.
    """
    _remove_outputs(net)
    shapes = _told_shapes(net, record)
    small = with_batch(net, TRIAL_BATCH)
    shapes = _fit_labels(small, shapes, resolve)
    result = without_data(small, shapes, filler="gaussian")
    try:
        _build(result, MetaBackend(), resolve)
    except CaffepyError:
        result = without_data(net, shapes, filler="gaussian")
        _build(result, MetaBackend(), resolve)
    return result


def _remove_outputs(net: caffe_pb2.NetParameter) -> None:
    """Turn layers that only write files into Silence layers, and arrays of a program into data of DummyData layers."""
    for layer in net.layer:
        kind = layer_class(layer.type, f"layer '{layer.name}'")
        if kind.tops == (0, 0):
            layer.type = "Silence"
        elif issubclass(kind, MemoryDataLayer):
            memory = layer.memory_data_param
            layer.type = "DummyData"
            layer.dummy_data_param.shape.add(dim=[memory.batch_size, memory.channels, memory.height, memory.width])
            layer.dummy_data_param.shape.add(dim=[memory.batch_size])
        layer.detection_output_param.ClearField("save_output_param")


def _data_layers(net: caffe_pb2.NetParameter) -> Iterator[caffe_pb2.LayerParameter]:
    """Yield the layers that read records."""
    return (layer for layer in net.layer if issubclass(layer_class(layer.type), PrefetchingLayer))


def _told_shapes(net: caffe_pb2.NetParameter, record: Shape | None) -> dict[str, Shape]:
    """Return the shape of a record by top, as data layers tell it, otherwise `record`."""
    nvidia = choose_dialect([net], lambda *line: None) is Dialect.NVIDIA
    shapes: dict[str, Shape] = {}
    for layer in _data_layers(net):
        told = told_shape(layer, nvidia)
        image = told[0] if told else record
        if image is None:
            raise DataError(
                f"layer '{layer.name}' ({layer.type}): its fields do not tell the size of a record; give the shape of "
                "one, e.g. --shape 3,224,224"
            )
        shapes |= zip(layer.top, [image, *label_shapes(layer, image)], strict=False)
    return shapes


# -- labels ----------------------------------------------------------------------------------------------


def _fit_labels(net: caffe_pb2.NetParameter, shapes: Mapping[str, Shape], resolve: PathResolver) -> dict[str, Shape]:
    """Return the shapes with those of labels that their readers accept.

    A regression loss compares labels of the prediction's shape. A classification of pixels has one label for each
    pixel. No table of types says so: a shape fits if the layers that read the label can be built.
    """
    result = dict(shapes)
    labels = []
    for layer in _data_layers(net):
        objects = object_list(layer, shapes)
        labels += [top for index, top in enumerate(layer.top) if index and index != objects]
    labels = list(dict.fromkeys(labels))
    for index, label in enumerate(labels):
        try:
            known = _build(_independent(net, labels[index:], result), MetaBackend(), resolve)
        except CaffepyError:
            return result  # the net is refused for another reason
        blobs = {name: tuple(blob.shape) for name, blob in known.blobs.items()}
        choices = [result[label], *_predicted(net, label, blobs)]
        reduced = [_independent(net, labels[index + 1 :], {**result, label: shape}) for shape in choices]
        fitting = (shape for shape, one in zip(choices, reduced, strict=True) if _fits(one, resolve))
        result[label] = next(fitting, result[label])
    return result


def _independent(
    net: caffe_pb2.NetParameter, unknown: Iterable[str], shapes: Mapping[str, Shape]
) -> caffe_pb2.NetParameter:
    """Return the net without its data and without the layers that depend on blobs of unknown shape."""
    dropped = set(unknown)
    result = without_data(net, shapes)
    kept = []
    for layer in result.layer:
        if dropped.isdisjoint(layer.bottom):
            kept.append(layer)
        else:
            dropped.update(layer.top)
    del result.layer[:]
    result.layer.extend(kept)
    return result


def _predicted(net: caffe_pb2.NetParameter, label: str, blobs: Mapping[str, Sequence[int]]) -> list[Shape]:
    """Return shapes of a label's records, from the other bottoms of layers that read the label or a part of it."""
    parts, shapes = {label}, []
    for layer in net.layer:
        if not parts.isdisjoint(layer.bottom):
            shapes += [tuple(blobs[name]) for name in layer.bottom if name in blobs and name not in parts]
            parts.update(layer.top)
    whole = list(dict.fromkeys(shape for shape in shapes if len(shape) > 1))
    together = [(sum(shape[1] for shape in whole), *whole[0][2:])] if len(whole) > 1 else []
    choices = [*((1, *shape[2:]) for shape in whole), *(shape[1:] for shape in whole), *together]
    return list(dict.fromkeys(choices))


def _fits(net: caffe_pb2.NetParameter, resolve: PathResolver) -> bool:
    try:
        _build(net, MetaBackend(), resolve)
    except CaffepyError:
        return False
    return True


def _build(net: caffe_pb2.NetParameter, backend: Backend, resolve: PathResolver) -> Net:
    state = net.state
    return Net(net, LayerContext(backend, phase=state.phase, resolve=resolve), state)


def _fill(net: Net) -> None:
    """Fill the first Input top with normal numbers and others with 0, and stored variances of BatchNorm with 1.

    The stored variance of an untrained net is 0: fifty layers that multiply by a hundred overflow.
    """
    first = True
    for layer, tops in zip(net.layers, net.tops, strict=True):
        if layer.type == "BatchNorm":
            for blob in layer.blobs[1:3]:
                blob.data[...] = 1
        if layer.type == "Input" and first and tops:
            values = np.random.default_rng(0).standard_normal(tops[0].shape, np.float32)
            net.context.backend.from_host(values, tops[0].data)
            first = False
