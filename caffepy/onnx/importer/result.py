"""The imported net: built, written in Caffe's formats, loaded from these files and compared with the ONNX file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from google.protobuf import text_format

from caffepy.backend import create_backend
from caffepy.config.load import read_net
from caffepy.errors import ConfigError, RunError
from caffepy.files import atomic_write, check_writable
from caffepy.layers import LayerContext
from caffepy.net import Net
from caffepy.onnx.check import Difference, compare, random_inputs, refuse_large, run_net
from caffepy.onnx.fold import fold_batch_norms, merge_scales
from caffepy.onnx.importer.model import MAX_BYTES
from caffepy.onnx.importer.read import Shapes, input_types, read_onnx
from caffepy.onnx.libraries import run_model
from caffepy.proto import caffe_pb2
from caffepy.snapshot.caffemodel import read_caffemodel, write_caffemodel


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
        net = Net(whole, LayerContext(backend, phase=caffe_pb2.TEST))
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


def write_imported(
    base: Path, param: caffe_pb2.NetParameter, net: Net, check: Callable[[Net], None] | None = None
) -> tuple[Path, Path]:
    """Write the prototxt and the .caffemodel; returns their paths.

    Args:
        base: the paths without their endings.
        param: the net without its parameters.
        net: the net with its parameters.
        check: called with the net that the two files load as; if it raises, neither file is there.

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
    for path in (prototxt, weights):
        check_writable(path)
    with tempfile.TemporaryDirectory(prefix=".caffepy-import-", dir=base.parent) as folder:
        written = Path(folder, prototxt.name), Path(folder, weights.name)
        with atomic_write(written[0]) as file:
            file.write(text)
        write_caffemodel(written[1], net.name, net.layers)
        if check is not None:
            check(_load(*written))
        for path in (weights, prototxt):
            os.replace(Path(folder, path.name), path)
    return prototxt, weights


def _load(prototxt: Path, weights: Path) -> Net:
    """The net of two files, in the dialect that the prototxt's fields choose."""
    backend = create_backend()
    with backend.activate():
        net = Net(read_net(prototxt), LayerContext(backend, phase=caffe_pb2.TEST))
        net.copy_trained_layers_from(read_caffemodel(weights), str(weights))
    return net
