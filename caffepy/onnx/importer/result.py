"""The imported net: built, compared with the ONNX file, and written in Caffe's formats."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from google.protobuf import text_format

from caffepy.backend import create_backend
from caffepy.config.dialect import Dialect
from caffepy.errors import ConfigError, RunError
from caffepy.files import atomic_write
from caffepy.layers import LayerContext
from caffepy.net import Net
from caffepy.onnx.check import Difference, compare, random_inputs, refuse_large, run_net
from caffepy.onnx.fold import fold_batch_norms, merge_scales
from caffepy.onnx.importer.model import MAX_BYTES
from caffepy.onnx.importer.read import Shapes, input_types, read_onnx
from caffepy.onnx.libraries import run_model
from caffepy.proto import caffe_pb2
from caffepy.snapshot.binary import write_weights_binary


def build_imported(
    path: Path, name: str, batch: int = 1, shapes: Shapes | None = None, fold: bool = False
) -> tuple[caffe_pb2.NetParameter, Net]:
    """The net of an ONNX file, as a prototxt without parameters and built with them.

    Args:
        path: the file.
        name: the net's name.
        batch: the first axis of inputs where the file leaves it open.
        shapes: whole shapes of inputs, by name; "" for the only one.
        fold: merge BatchNorm and Scale into the layers before them.

    Raises:
        ConfigError: see `read_onnx`.
    """
    whole = read_onnx(path, name, batch, shapes)
    whole = fold_batch_norms(whole) if fold else merge_scales(whole)
    backend = create_backend()
    with backend.activate():
        context = LayerContext(backend, phase=caffe_pb2.TEST, dialect=Dialect.BVLC)
        net = Net(whole, context)
        net.copy_trained_layers_from(whole, str(path))
    param = caffe_pb2.NetParameter()
    param.CopyFrom(whole)
    for layer in param.layer:
        del layer.blobs[:]
    return param, net


def check_imported(path: Path, net: Net) -> list[Difference]:
    """How far the net's outputs differ from those of the ONNX file on random input.

    Raises:
        RunError: by too much, or onnxruntime cannot run the file.
    """
    types = input_types(path)
    inputs = random_inputs(net)
    feeds = {name: values.astype(types.get(name, np.dtype(np.float32))) for name, values in inputs.items()}
    found = run_net(net, {name: values.astype(np.float32) for name, values in feeds.items()})
    wanted = {name: np.asarray(values) for name, values in run_model(str(path), feeds).items()}
    differences = compare(found, wanted)
    refuse_large(differences)
    return differences


def write_imported(base: Path, param: caffe_pb2.NetParameter, net: Net) -> tuple[Path, Path]:
    """Write the prototxt and the .caffemodel; returns their paths.

    Raises:
        RunError: a file cannot be written.
    """
    try:
        text = text_format.MessageToString(param).encode()
    except UnicodeError as error:
        raise ConfigError(f"{base.name}: a name is not UTF-8") from error
    prototxt, weights = (base.with_name(f"{base.name}.{ending}") for ending in ("prototxt", "caffemodel"))
    if len(text) > MAX_BYTES:
        raise RunError(f"{prototxt}: would be larger than protobuf can read")
    write_weights_binary(weights, net, write_diff=False)
    with atomic_write(prototxt) as file:
        file.write(text)
    return prototxt, weights
