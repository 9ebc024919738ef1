"""Static quantization of ONNX models to int8 by onnxruntime, and the data of a training net for it. Imported by cli."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from caffepy.backend.interface import Backend
from caffepy.errors import ConfigError, RunError, one_line
from caffepy.formats.dialect import choose_dialect
from caffepy.formats.load import filter_net, net_state, read_net
from caffepy.formats.paths import PathResolver
from caffepy.formats.proto import caffe_pb2
from caffepy.layers import LayerContext, layer_class
from caffepy.net import Net

Arrays = Mapping[str, NDArray[Any]]

_PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")


# -- data ----------------------------------------------------------------------------------------------


class DataReader:
    """Reads batches of records with the data layers of a training net.

    Args:
        net: of the data layers alone.
        inputs: names of the blobs that a deploy net reads.
        origin: the training net's file, for messages.

    Raises:
        ConfigError: the data layers do not give the inputs.
    """

    def __init__(self, net: Net, inputs: Iterable[str], origin: Path) -> None:
        self._net, self._inputs = net, list(inputs)
        missing = [name for name in self._inputs if name not in net.blobs]
        if missing:
            raise ConfigError(
                f"{origin}: its data layers give {', '.join(net.blobs)}; the deploy net's input '{missing[0]}' must be "
                "one of them"
            )
        tops = [node.tops for node in net.nodes if self._inputs[0] in {top.name for top in node.tops}][0]
        self.label: str | None = tops[1].name if len(tops) == 2 else None
        """The blob of labels: the second top of the layer that gives the first input."""

    def batch(self) -> tuple[Arrays, NDArray[Any] | None]:
        """Return the inputs and the labels of the next batch."""
        self._net.forward()
        values = {name: np.array(self._net.blobs[name].host_data(), np.float32) for name in self._inputs}
        return values, None if self.label is None else np.array(self._net.blobs[self.label].host_data()).reshape(-1)


@contextmanager
def open_data(path: Path, phase: int, inputs: Iterable[str], backend: Backend, batches: int) -> Iterator[DataReader]:
    """Yield a reader of the records of a training net in a phase; close its files afterwards.

    Args:
        path: the training net's prototxt.
        phase: TRAIN or TEST.
        inputs: see `DataReader`.
        backend: on the CPU.
        batches: how many are read.

    Raises:
        ConfigError: the net has no data layers in the phase, or they do not give the inputs.
        DataError: the records cannot be read.
    """
    whole = read_net(path)
    param = filter_net(whole, net_state(phase, whole.state, caffe_pb2.NetState()))
    others = ("Input", "Parameter")
    layers = [
        layer
        for layer in param.layer
        if not layer.bottom and layer.type not in others and layer_class(layer.type).bottoms[0] == 0
    ]
    if not layers:
        raise ConfigError(f"{path}: the net has no data layers in the {caffe_pb2.Phase.Name(phase)} phase")
    del param.layer[:]
    param.layer.extend(layers)
    with backend.activate():
        context = LayerContext(
            backend, phase=phase, resolve=PathResolver(path), dialect=choose_dialect([whole]), test_iter=batches
        )
        net = Net(param, context, param.state)
        try:
            yield DataReader(net, inputs, path)
        finally:
            net.close()


# -- quantization --------------------------------------------------------------------------------------


class _Samples:
    """Gives onnxruntime one sample after the other."""

    def __init__(self, samples: Iterable[Arrays]) -> None:
        self._samples = iter(samples)

    def get_next(self) -> dict[str, NDArray[Any]] | None:
        """Return the next sample, None behind the last."""
        found = next(self._samples, None)
        return None if found is None else dict(found)


def _behind_products(model: ModelProto) -> list[str]:
    """Return the names of the nodes whose results no convolution and no product uses."""
    used: set[str] = set()
    names = []
    for node in reversed(model.graph.node):
        if node.op_type in _PRODUCTS or not used.isdisjoint(node.output):
            used.update(node.input)
        else:
            names.append(node.name)
    return names


def quantize(model: ModelProto, samples: Iterable[Arrays]) -> bytes:
    """Return a model whose convolutions and products compute with int8, with scales of weights by channel.

    The samples give the ranges of activations. Q and DQ operators hold the scales (QDQ format).
    Nodes behind the last convolution or product, such as softmax and the decoding of boxes, stay float32.

    Args:
        model: float32.
        samples: inputs by name.

    Raises:
        RunError: onnxruntime cannot quantize the model.
    """
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

    unused = logging.NullHandler()
    logging.getLogger().addHandler(unused)  # without a handler of the root, onnxruntime would add one that prints all
    # Nodes that stay float32 may have infinite ranges.
    with tempfile.TemporaryDirectory() as folder, np.errstate(all="ignore"):
        path = Path(folder) / "int8.onnx"
        try:
            quantize_static(
                model,
                path,
                _Samples(samples),
                quant_format=QuantFormat.QDQ,
                per_channel=True,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                nodes_to_exclude=_behind_products(model),
            )
        except (ValueError, RuntimeError, TypeError, KeyError) as error:
            raise RunError(f"onnxruntime cannot quantize the model: {one_line(str(error))}") from error
        finally:
            logging.getLogger().removeHandler(unused)
        return path.read_bytes()


def accuracies(
    runs: Sequence[Callable[[Arrays], Arrays]], reader: DataReader, batches: int, output: str
) -> tuple[list[float], int]:
    """Return for each of some models the share of images whose highest score is that of their label, and their number.

    Args:
        runs: each computes outputs from inputs.
        reader: of images with labels.
        batches: how many are read.
        output: the scores (N, C, ...), with one number for each class.

    Raises:
        ConfigError: there is not one label for each image.
    """
    right, count = np.zeros(len(runs)), 0
    for _ in range(batches):
        inputs, labels = reader.batch()
        images = len(next(iter(inputs.values())))
        if labels is None or len(labels) != images:
            raise ConfigError(f"accuracy needs one label for each image, as classifiers have; '{output}' is not scored")
        for index, run in enumerate(runs):
            right[index] += (run(inputs)[output].reshape(images, -1).argmax(1) == labels).sum()
        count += images
    return [float(number) for number in right / count], count
