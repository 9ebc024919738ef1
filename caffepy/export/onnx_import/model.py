"""Reading an ONNX file from anybody: sizes, names and order are checked before anything is made of it."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from caffepy.errors import ConfigError
from caffepy.formats.messages import describe_content
from caffepy.utils.files import open_regular, read_regular

MAX_BYTES = 2**31 - 1
"""Of a file; protobuf can hold no more."""
MAX_NODES = 100_000
MAX_AXES = 32
MAX_ELEMENTS = 2**31 - 1
_NUMBERS = "FLOAT DOUBLE FLOAT16 BFLOAT16 INT64 INT32 INT16 INT8 UINT8 UINT16 UINT32 UINT64 BOOL"
_TYPES = set(map(TensorProto.DataType.Value, _NUMBERS.split()))

Array = NDArray[Any]


def read_model(path: Path) -> ModelProto:
    """The model in a file.

    Raises:
        ConfigError: it cannot be read or is no ONNX model.
    """
    try:
        content = read_regular(path, MAX_BYTES)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    model = ModelProto()
    try:
        model.ParseFromString(content)
    except (DecodeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not an ONNX model, or damaged: {describe_content(content)}") from error
    if not model.HasField("graph") or not model.graph.node:
        raise ConfigError(f"{path}: not an ONNX model: it has no graph with nodes")
    if len(model.graph.node) > MAX_NODES:
        raise ConfigError(f"{path}: has {len(model.graph.node)} nodes; at most {MAX_NODES} are read")
    if not all(isinstance(name, str) for name in _names(model)):  # protobuf gives what is not UTF-8 as bytes
        raise ConfigError(f"{path}: not an ONNX model, or damaged: a name is not UTF-8")
    return model


def _names(model: ModelProto) -> Iterator[object]:
    """Every name of a model's nodes, values, attributes and metadata."""
    graph = model.graph
    for node in graph.node:
        yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
        yield from (one.name for one in node.attribute)
    for values in (graph.initializer, graph.input, graph.output):
        yield from (one.name for one in values)
    for tensor in graph.initializer:
        yield from (text for entry in tensor.external_data for text in (entry.key, entry.value))
    yield from (text for entry in model.metadata_props for text in (entry.key, entry.value))
    yield from (one.domain for one in model.opset_import)


def opset_of(model: ModelProto, path: Path) -> int:
    """The version of ONNX's own operators.

    Raises:
        ConfigError: the model names none.
    """
    versions = [one.version for one in model.opset_import if one.domain in ("", "ai.onnx")]
    if not versions or not 1 <= versions[0] < 1000:
        raise ConfigError(f"{path}: names no version of ONNX's operators (opset_import)")
    return versions[0]


def constants_of(graph: GraphProto, path: Path) -> dict[str, Array]:
    """All stored tensors by name, those in other files too.

    Raises:
        ConfigError: one is not whole, too large, of a type without numbers, or lies outside the model's folder.
    """
    if graph.sparse_initializer:
        raise ConfigError(f"{path}: has sparse tensors, which are not read; store them densely")
    return {tensor.name: to_array(tensor, path) for tensor in graph.initializer}


def to_array(tensor: TensorProto, path: Path) -> Array:
    """The values of a tensor; see `constants_of`."""
    where = f"{path}: tensor '{tensor.name}'"
    if tensor.data_type not in _TYPES:
        raise ConfigError(f"{where} is of the type {tensor.data_type}, which holds no numbers that a net could take")
    shape = tuple(tensor.dims)
    check_size(shape, where)
    if tensor.HasField("segment"):
        raise ConfigError(f"{where} is stored in segments, which are not read")
    try:
        if tensor.data_location == TensorProto.EXTERNAL:
            return _external(tensor, path, where)
        return np.asarray(numpy_helper.to_array(tensor))
    except (ValueError, TypeError, OverflowError, AttributeError) as error:
        raise ConfigError(f"{where} has not the values that its shape {list(shape)} needs") from error


def check_size(shape: Sequence[int], where: str) -> None:
    """Refuse a shape that no blob can have.

    Raises:
        ConfigError: it is negative or too large.
    """
    if len(shape) > MAX_AXES or any(size < 0 for size in shape) or math.prod(shape) > MAX_ELEMENTS:
        raise ConfigError(f"{where} has the shape {list(shape)[:MAX_AXES]}; at most {MAX_ELEMENTS} elements are read")


def _external(tensor: TensorProto, path: Path, where: str) -> Array:
    """Values beside the model, in a file of its folder or below it."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    kind = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    size = math.prod(tensor.dims) * kind.itemsize
    file = _inside(path, entries.get("location", ""), where)
    begin, length = (int(entries.get(key, default)) for key, default in (("offset", 0), ("length", size)))
    try:
        with open_regular(file) as source:
            whole = os.fstat(source.fileno()).st_size
            if length != size or begin < 0 or begin + size > whole:
                raise ConfigError(f"{where} needs {size} bytes from {begin} on of {file.name}, which has {whole}")
            source.seek(begin)
            content = source.read(size)
    except OSError as error:
        raise ConfigError(f"{where} lies in {file}, which cannot be read: {error.strerror}") from error
    return np.frombuffer(content, kind.newbyteorder("<")).astype(kind).reshape(tuple(tensor.dims))


def _inside(path: Path, location: str, where: str) -> Path:
    """The file of external data."""
    folder = path.parent.resolve()
    if location and "\0" not in location and not os.path.isabs(location):
        file = (folder / location).resolve()
        if file.is_relative_to(folder):
            return file
    raise ConfigError(f"{where} lies in {location!r}, which is not in the model's folder; such files are not read")


def in_order(graph: GraphProto, path: Path) -> list[NodeProto]:
    """Return the nodes in topological order.

    Raises:
        ConfigError: they form a cycle, two give one value, or a value comes from nowhere.
    """
    outputs = Counter(name for node in graph.node for name in node.output if name)
    known = {tensor.name for tensor in graph.initializer} | {one.name for one in graph.input} | {""}
    twice = [name for name, count in outputs.items() if count > 1 or name in known]
    if twice:
        raise ConfigError(f"{path}: the value '{twice[0]}' is made more than once")
    waiting: dict[str, list[int]] = {}
    missing = []
    for index, node in enumerate(graph.node):
        needed = {name for name in node.input if name not in known}
        if lost := sorted(name for name in needed if name not in outputs):
            raise ConfigError(f"{path}: node '{describe(node)}' reads '{lost[0]}', which nothing gives")
        missing.append(len(needed))
        for name in needed:
            waiting.setdefault(name, []).append(index)
    return _sorted(graph, missing, waiting, path)


def _sorted(graph: GraphProto, missing: list[int], waiting: dict[str, list[int]], path: Path) -> list[NodeProto]:
    ready = [index for index, count in enumerate(missing) if count == 0][::-1]
    order: list[NodeProto] = []
    while ready:
        node = graph.node[ready.pop()]
        order.append(node)
        for name in node.output:
            for index in reversed(waiting.get(name, [])):
                missing[index] -= 1
                if missing[index] == 0:
                    ready.append(index)
    if len(order) < len(graph.node):
        stuck = next(node for node, count in zip(graph.node, missing, strict=True) if count)
        raise ConfigError(f"{path}: node '{describe(stuck)}' depends on itself: the graph has a cycle")
    return order


def describe(node: NodeProto) -> str:
    """A node's name, or where it has none the value that it makes."""
    return str(node.name or next(iter(node.output), "") or node.op_type)
