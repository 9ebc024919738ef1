"""Comparison of a net and an ONNX model on the same random input."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.blob import Blob
from caffepy.errors import RunError
from caffepy.net import Net

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
        return f"output '{self.name}': largest difference {self.largest:.3g}, {self.relative:.3g} of the largest value"


def random_inputs(net: Net, seed: int = 1) -> Arrays:
    """Return random inputs for a net: normal values, but valid indices and markers where layers read them."""
    rng = np.random.default_rng(seed)
    found: Arrays = {}
    for node in net.nodes:
        if node.layer.type == "Input":
            for top in node.tops:
                found[top.name] = _values_for(net, top, rng)
    return found


def _values_for(net: Net, blob: Blob, rng: np.random.Generator) -> NDArray[Any]:
    for layer, index in _readers(net, blob):
        if layer.type == "Embed":
            return rng.integers(0, layer.param.embed_param.input_dim, blob.shape).astype(np.float32)
        if layer.type in ("LSTM", "RNN") and index == 1:
            return np.broadcast_to((np.arange(blob.shape[0]) > 0)[:, None], blob.shape).astype(np.float32)
        if layer.type in ("BatchReindex", "ROIPooling", "PSROIPooling") and index == 1:
            return np.zeros(blob.shape, np.float32)
        if (layer.type, index) == ("LSTMUnit", 2) or (layer.type == "Filter" and index == len(layer.param.bottom) - 1):
            return rng.integers(0, 2, blob.shape).astype(np.float32)
    return rng.standard_normal(blob.shape).astype(np.float32)


def _readers(net: Net, blob: Blob) -> Iterator[tuple[Any, int]]:
    """Yield the layers that read a blob, also through Split layers, with the bottom's index."""
    for node in net.nodes:
        for index, bottom in enumerate(node.bottoms):
            if bottom is blob and node.layer.type == "Split":
                for top in node.tops:
                    yield from _readers(net, top)
            elif bottom is blob:
                yield node.layer, index


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


def difference(name: str, found: NDArray[Any], wanted: NDArray[Any]) -> Difference:
    """Return the difference of two arrays of one shape; NaN in both counts as equal."""
    a, b = found.astype(np.float64), wanted.astype(np.float64)
    with np.errstate(invalid="ignore"):
        gaps = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0, np.abs(a - b))
    largest = float(np.nan_to_num(gaps, nan=np.inf).max(initial=0))
    finite = np.abs(b[np.isfinite(b)]).max(initial=0)
    return Difference(name, largest, largest / float(finite) if finite else largest)


def refuse_large(
    differences: list[Difference], limit: float = LIMIT, so: str = "the file is not written"
) -> None:  # fmt: skip
    """Raise an error for differences above a limit; its message ends with `so`.

    Raises:
        RunError: a difference exceeds the limit.
    """
    for one in differences:
        if not one.relative <= limit:
            raise RunError(f"{one}, above the limit of {limit:g}; {so}")
