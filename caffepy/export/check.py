"""Comparison of a net and its export on the same random input."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.errors import RunError, printable
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.blob import Blob
from caffepy.layers.layer import PassCounter
from caffepy.net import Net
from caffepy.net.graph import Node

log = logging.getLogger(__name__)

LIMIT = 1e-4
"""Tolerance relative to the output's largest absolute value."""

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Difference:
    """The difference of one output.

    Args:
        name: the output's name.
        largest: the largest absolute difference.
        relative: `largest` over the output's largest absolute value.
    """

    name: str
    largest: float
    relative: float

    def __str__(self) -> str:
        size = f"largest difference {self.largest:.3g}, {self.relative:.3g} of the largest value"
        return f"output '{printable(self.name)}': {size}"


def random_inputs(net: Net, seed: int = 1) -> Arrays:
    """Return random inputs for a net: normal values, or what makes a layer that reads them take each of its branches.

    Indices and markers are valid. Boxes may be inverted or empty, regions may lie outside of their image, and scores
    may be equal.
    """
    rng = np.random.default_rng(seed)
    found: Arrays = {}
    for node in net.nodes:
        if node.layer.type == "Input":
            for top in node.tops:
                found[top.name] = _values_for(net, top, rng)
    return found


def _values_for(net: Net, blob: Blob, rng: np.random.Generator) -> NDArray[Any]:
    for node, index in _readers(net, blob):
        values = _special_values(node, index, blob.shape, rng)
        if values is not None:
            return values.astype(np.float32)
    return rng.standard_normal(blob.shape).astype(np.float32)


def _special_values(node: Node, index: int, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[Any] | None:
    """Values for a bottom of a layer; None: any will do."""
    layer = node.layer
    if layer.type == "Embed":
        return rng.integers(0, layer.param.embed_param.input_dim, shape)
    if layer.type in ("LSTM", "RNN") and index == 1:
        return np.broadcast_to((np.arange(shape[0]) > 0)[:, None], shape)
    if layer.type == "BatchReindex" and index == 1:
        return rng.integers(0, node.bottoms[0].shape[0], shape)
    if layer.type in ("ROIPooling", "PSROIPooling") and index == 1:
        return _regions(node, shape, rng)
    if (layer.type, index) == ("LSTMUnit", 2) or (layer.type == "Filter" and index == len(layer.param.bottom) - 1):
        return rng.integers(0, 2, shape)
    if layer.type == "ArgMax":
        return rng.integers(-3, 4, shape) / 2
    if layer.type == "DetectionOutput" and index < len(_BOXES):
        return _BOXES[index](node, shape, rng)
    return None


def _regions(node: Node, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[Any]:
    """Regions of all images with corners in halves of a pixel, some inverted, some outside."""
    layer, image = node.layer, node.bottoms[0].shape
    own = layer.param.psroi_pooling_param if layer.type == "PSROIPooling" else layer.param.roi_pooling_param
    sides = np.array([image[3], image[2]] * 2)
    corners = rng.integers(-sides, 4 * sides, (int(np.prod(shape)) // 5, 4)) / 2
    corners /= own.spatial_scale or 1
    return np.concatenate([rng.integers(0, image[0], (len(corners), 1)), corners], axis=1).reshape(shape)


def _codes(node: Node, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[Any]:
    """Locations of boxes: a third near the priors, a third far from them and inverted where they can be, a third empty.

    Some are equal.
    """
    values = rng.standard_normal((int(np.prod(shape)) // 4, 4))
    kinds = rng.integers(0, 3, len(values))
    values[kinds == 1] *= 4
    values[kinds == 2, 2:] = -100  # no extent, or far below the other corner
    values[1::5] = values[: len(values) - 1 : 5]
    return values.reshape(shape)


def _scores(node: Node, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[Any]:
    """Scores above 0, half of them equal to others; all different where std::sort would order equal ones."""
    count = int(np.prod(shape))
    values = rng.permutation(count)
    if node.layer.param.detection_output_param.keep_top_k < 0:
        values //= 2
    return ((values + 1) / (count + 1)).reshape(shape)


def _priors(node: Node, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[Any]:
    """Boxes with extents within an image of side 1, and variances."""
    low = rng.uniform(0, 0.7, (int(np.prod(shape)) // 8, 2))
    boxes = np.concatenate([low, low + rng.uniform(0.05, 0.3, low.shape)], axis=1)
    return np.stack([boxes, np.tile([0.1, 0.1, 0.2, 0.2], (len(boxes), 1))]).reshape(shape)


_BOXES = (_codes, _scores, _priors)
"""By the index of DetectionOutput's bottom."""


def _readers(net: Net, blob: Blob) -> Iterator[tuple[Node, int]]:
    """Yield the layers that read a blob, also through Split layers, with the bottom's index."""
    for node in net.nodes:
        for index, bottom in enumerate(node.bottoms):
            if bottom is blob and node.layer.type == "Split":
                for top in node.tops:
                    yield from _readers(net, top)
            elif bottom is blob:
                yield node, index


# -- layers by themselves ------------------------------------------------------------------------------

BRANCHING = frozenset({"ArgMax", "DetectionOutput", "ROIPooling"})
"""Types whose results depend on comparisons that values behind other layers seldom reach."""


def layers_alone(net: Net, seed: int = 1) -> Iterator[tuple[Net, Arrays]]:
    """Yield each layer of `BRANCHING` behind other layers as a net of its own, with inputs that reach its branches.

    Bottoms that any values suit, and priors, keep those of the net's last pass.
    """
    rng = np.random.default_rng(seed)
    given = {top for node in net.nodes if node.layer.type == "Input" for top in node.tops}
    for node in net.nodes:
        if node.layer.type not in BRANCHING or given.issuperset(node.bottoms):
            continue
        param = caffe_pb2.NetParameter(name=node.layer.name)
        inputs: Arrays = {}
        for index, blob in enumerate(node.bottoms):
            name = f"bottom{index}"
            param.layer.add(name=name, type="Input", top=[name]).input_param.shape.add(dim=blob.shape)
            own = np.array(blob.host_data(), np.float32)
            special = _special_values(node, index, blob.shape, rng)
            is_prior = (node.layer.type, index) == ("DetectionOutput", _BOXES.index(_priors))
            inputs[name] = own if special is None or is_prior else special.astype(np.float32)
        layer = param.layer.add()
        layer.CopyFrom(node.layer.param)
        del layer.bottom[:], layer.top[:]
        layer.bottom.extend(inputs)
        layer.top.extend(f"top{index}" for index in range(len(node.tops)))
        with net.backend.activate():
            yield Net(param, replace(net.context, passes=PassCounter(), run_fillers=False)), inputs


def larger_batch(inputs: Arrays) -> Arrays:
    """Return the inputs with a copy of the first sample appended."""
    return {name: np.concatenate([values, values[:1]]) for name, values in inputs.items()}


def run_net(net: Net, inputs: Mapping[str, NDArray[Any]]) -> Arrays:
    """Return the net's outputs for some inputs; recurrent state starts at 0.

    Raises:
        RunError: a layer failed.
    """
    with net.backend.activate():
        for name, values in inputs.items():
            net.blobs[name].reshape(values.shape)
            net.backend.from_host(values, net.blobs[name].data)
        for state in net.state():
            net.backend.fill(state, 0)
        with net.backend.compile_helper(net.reversed_passes):
            net.forward()
        net.raise_device_errors()
        return {name: np.asarray(blob.host_data()) for name, blob in net.outputs.items()}


def compare(found: Mapping[str, NDArray[Any]], wanted: Mapping[str, NDArray[Any]]) -> list[Difference]:
    """Return the difference of each output from its expected value.

    Raises:
        RunError: an output is missing or has another shape.
    """
    differences = []
    for name, expected in wanted.items():
        if name not in found or found[name].shape != expected.shape:
            shape = found[name].shape if name in found else "absent"
            raise RunError(f"output '{name}' has the shape {expected.shape} in one net and {shape} in the other")
        differences.append(difference(name, found[name], expected))
    return differences


def compare_outputs(
    found: Mapping[str, NDArray[Any]],
    wanted: Mapping[str, NDArray[Any]],
    net: Net,
    feeds: Mapping[str, NDArray[Any]],
    run_other: Callable[[Net, Mapping[str, NDArray[Any]]], Mapping[str, NDArray[Any]]],
    limit: float = LIMIT,
) -> list[Difference]:
    """Return the differences of a net's outputs, or of the scores and locations of boxes whose own exceed the limit.

    Scores that are equal up to rounding can change the order of boxes, and which boxes are kept.

    Args:
        found: outputs of the export.
        wanted: outputs of `net`.
        net: the net.
        feeds: the inputs of both.
        run_other: exports another net and runs it.
        limit: as for `refuse_large`.

    Raises:
        RunError: an output is missing or has another shape.
    """
    given = {top for node in net.nodes if node.layer.type == "Input" for top in node.tops}
    finders = [n for n in net.nodes if n.layer.type == "DetectionOutput" and not given.issuperset(n.bottoms)]
    boxes = {name for name, blob in net.outputs.items() if any(blob in node.tops for node in finders)}
    differences = compare(found, {name: values for name, values in wanted.items() if name not in boxes})
    try:
        of_boxes = compare(found, {name: wanted[name] for name in wanted if name in boxes})
        refuse_large(of_boxes, limit)
    except RunError:
        log.info("Net '%s': rounding may have reordered boxes; their scores and locations are compared", net.name)
        before = _without(net, finders)
        reached = run_net(before, feeds)  # first: the layers take the batch of `feeds`
        of_boxes = compare(run_other(before, feeds), reached)
    return differences + of_boxes


def _without(net: Net, nodes: Collection[Node]) -> Net:
    """Return the net without some layers at its end."""
    param = caffe_pb2.NetParameter(name=net.name)
    param.layer.extend(node.layer.param for node in net.nodes if node not in nodes)
    with net.backend.activate():
        result = Net(param, replace(net.context, passes=PassCounter(), run_fillers=False))
        result.share_trained_layers_with(net)
    return result


def difference(name: str, found: NDArray[Any], wanted: NDArray[Any]) -> Difference:
    """Return the difference of two arrays of one shape; NaN in both counts as equal."""
    a, b = found.astype(np.float64), wanted.astype(np.float64)
    with np.errstate(invalid="ignore"):
        gaps = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0, np.abs(a - b))
    largest = float(np.nan_to_num(gaps, nan=np.inf).max(initial=0))
    finite = np.abs(b[np.isfinite(b)]).max(initial=0)
    return Difference(name, largest, largest / float(finite) if finite else largest)


def refuse_large(differences: list[Difference], limit: float = LIMIT, so: str = "the file is not written") -> None:
    """Raise an error for differences above a limit; its message ends with `so`.

    Raises:
        RunError: a difference exceeds the limit.
    """
    for one in differences:
        if not one.relative <= limit:
            raise RunError(f"{one}, above the limit of {limit:g}; {so}")
