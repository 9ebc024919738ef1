"""The Caffe net while it grows, and what the function of an operator sees of its node.

Every layer is set up on arrays without values, so that its tops have shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray
from onnx import NodeProto, helper

from caffepy.backend.meta import MetaBackend
from caffepy.errors import CaffepyError
from caffepy.export.onnx_import.model import describe
from caffepy.formats.binary import to_blob_proto
from caffepy.formats.dialect import Dialect
from caffepy.formats.proto import caffe_pb2
from caffepy.layers import LayerContext, layer_class
from caffepy.layers.blob import Blob
from caffepy.utils.registry import Registry

Array = NDArray[Any]
Shape = tuple[int, ...]


class UnsupportedError(Exception):
    """A node cannot be said by Caffe's layers; the message says why."""


@dataclass(frozen=True)
class Tensor:
    """A blob of the net.

    Args:
        name: the blob's.
        shape: its shape, the same as the ONNX value's.
        pads: zeros that the next convolution is to add, before and behind each spatial axis.
    """

    name: str
    shape: Shape
    pads: tuple[tuple[int, int], ...] = ()


Value = Tensor | Array


class NetBuilder:
    """Layers and their parameters.

    Args:
        name: the net's.
    """

    def __init__(self, name: str) -> None:
        self.param = caffe_pb2.NetParameter(name=name)
        self._context = LayerContext(MetaBackend(), phase=caffe_pb2.TEST, dialect=Dialect.BVLC)
        self._names: dict[str, int] = {}
        self._blob_names: dict[str, int] = {}
        """Given names, and the last number behind each."""
        self.producers: dict[str, caffe_pb2.LayerParameter] = {}
        """The layer that makes each blob."""
        self.shapes: dict[str, Shape] = {}
        """Of each blob."""

    def add_input(self, name: str, shape: Shape) -> Tensor:
        """An Input layer."""
        return self.add("Input", [], name, input_param={"shape": [{"dim": list(shape)}]})

    def reserve(self, names: Sequence[str]) -> None:
        """Keep blob names for outputs: `add` gives them to nothing else."""
        self._blob_names.update(dict.fromkeys(names, 1))

    def add(
        self, kind: str, bottoms: Sequence[Tensor], name: str, blobs: Sequence[Array] = (), **fields: Any
    ) -> Tensor:
        """A layer with one top; returns it."""
        return self.add_many(kind, bottoms, name, [name], blobs, **fields)[0]

    def add_many(
        self,
        kind: str,
        bottoms: Sequence[Tensor],
        name: str,
        tops: Sequence[str],
        blobs: Sequence[Array] = (),
        reshape_blobs: bool = False,
        **fields: Any,
    ) -> list[Tensor]:
        """A layer; returns its tops.

        Args:
            kind: the layer type.
            bottoms: what it reads.
            name: wanted for the layer.
            tops: names wanted for the tops.
            blobs: its parameters.
            reshape_blobs: whether these may have another shape of as many elements.
            fields: of the LayerParameter, e.g. ``relu_param={"negative_slope": 0.1}``.

        Raises:
            UnsupportedError: the layer refuses its settings or bottoms.
        """
        layer = caffe_pb2.LayerParameter(name=_unique(name, self._names), type=kind)
        layer.bottom.extend(bottom.name for bottom in bottoms)
        layer.top.extend(_unique(top, self._blob_names) for top in tops)
        try:
            for field, value in fields.items():
                _set(layer, field, value)
        except (ValueError, TypeError) as error:
            raise UnsupportedError(f"a setting is beyond what a prototxt holds: {error}") from error
        shapes, wanted = self._shapes(layer, bottoms)
        given = [tuple(blob.shape) for blob in blobs]
        if reshape_blobs and list(map(math.prod, given)) == list(map(math.prod, wanted)):
            blobs = [np.reshape(blob, shape) for blob, shape in zip(blobs, wanted, strict=True)]
        elif wanted != given:
            raise UnsupportedError(f"its parameters have the shapes {given}; the layer needs {wanted}")
        layer.blobs.extend(to_blob_proto(np.asarray(blob, np.float32)) for blob in blobs)
        stored = self.param.layer.add()
        stored.CopyFrom(layer)
        self.producers.update(dict.fromkeys(layer.top, stored))
        self.shapes.update(zip(layer.top, shapes, strict=True))
        return [Tensor(top, shape) for top, shape in zip(layer.top, shapes, strict=True)]

    def _shapes(self, layer: caffe_pb2.LayerParameter, bottoms: Sequence[Tensor]) -> tuple[list[Shape], list[Shape]]:
        """The shapes of the tops and of the parameters, by setting the layer up."""
        below = [Blob(self._context.backend, bottom.shape, bottom.name) for bottom in bottoms]
        tops = [Blob(self._context.backend, (), top) for top in layer.top]
        own = caffe_pb2.LayerParameter()
        own.CopyFrom(layer)
        try:
            made = layer_class(layer.type)(own, self._context)
            made.setup(below, tops)
            made.reshape(below, tops)
        except (CaffepyError, OverflowError) as error:
            raise UnsupportedError(str(error)) from error
        return [top.shape for top in tops], [blob.shape for blob in made.blobs]

    # -- layers that others are made of ----------------------------------------------------------------

    def constant(self, values: Array, name: str) -> Tensor:
        """A Parameter layer."""
        return self.add("Parameter", [], name, [values], parameter_param={"shape": {"dim": list(values.shape)}})

    def reshaped(self, x: Tensor, shape: Shape, name: str) -> Tensor:
        """The same elements in another shape."""
        if x.shape == shape:
            return x
        if len(shape) == 2 and x.shape[:1] == shape[:1] and len(x.shape) > 2:
            return self.add("Flatten", [x], name)
        if math.prod(x.shape) != math.prod(shape):
            raise UnsupportedError(f"{list(x.shape)} cannot be reshaped to {list(shape)}")
        dims = [0 if i == 0 and x.shape[:1] == shape[:1] and shape[0] else size for i, size in enumerate(shape)]
        return self.add("Reshape", [x], name, reshape_param={"shape": {"dim": dims}})

    def permuted(self, x: Tensor, order: Sequence[int], name: str) -> Tensor:
        """The axes in another order."""
        if list(order) == list(range(len(x.shape))):
            return x
        return self.add("Permute", [x], name, permute_param={"order": list(order)})

    def linear(self, x: Tensor, name: str, scale: float = 1.0, shift: float = 0.0, power: float = 1.0) -> Tensor:
        """(scale x + shift)^power."""
        return self.add("Power", [x], name, power_param={"scale": scale, "shift": shift, "power": power})

    def sliced(self, x: Tensor, axis: int, begin: int, end: int, name: str) -> Tensor:
        """Elements from `begin` to `end` along an axis."""
        size = x.shape[axis]
        if (begin, end) == (0, size):
            return x
        if not 0 <= begin < end <= size:
            raise UnsupportedError(f"elements {begin} to {end} of {size} along axis {axis} leave an empty blob")
        points = [point for point in (begin, end) if 0 < point < size]
        tops = [f"{name}/before"] * (begin > 0) + [name] + [f"{name}/behind"] * (end < size)
        made = self.add_many("Slice", [x], name, tops, slice_param={"axis": axis, "slice_point": points})
        return made[1 if begin > 0 else 0]

    def expanded(self, x: Tensor, shape: Shape, name: str) -> Tensor:
        """Repeated along axes of size 1, and with new axes before, as ONNX broadcasts."""
        x = self.reshaped(x, (1,) * (len(shape) - len(x.shape)) + x.shape, f"{name}/axes")
        for axis, size in enumerate(shape):
            if x.shape[axis] != size:
                x = self.add("Tile", [x], f"{name}/tile{axis}", tile_param={"axis": axis, "tiles": size})
        return x

    # -- the whole ---------------------------------------------------------------------------------------

    def finish(self, outputs: Sequence[tuple[str, Tensor]]) -> caffe_pb2.NetParameter:
        """The net, whose outputs have the names wanted; layers that none of them needs are gone."""
        for name, tensor in outputs:
            self._blob_names.pop(name, None)
            self.add("Split", [tensor], name)
        wanted = {name for name, _ in outputs}
        kept: list[caffe_pb2.LayerParameter] = []
        for layer in reversed(self.param.layer):
            if wanted.intersection(layer.top) or layer.type == "Input":
                kept.append(layer)
                wanted.update(layer.bottom)
        result = caffe_pb2.NetParameter(name=self.param.name, layer=reversed(kept))
        _without_final_splits(result, {name for name, _ in outputs})
        _silence_unread(result, {name for name, _ in outputs})
        return result


def _set(message: Any, field: str, value: Any) -> None:
    """A field, of lists and dicts as messages."""
    if isinstance(value, Message):
        getattr(message, field).CopyFrom(value)
    elif isinstance(value, dict):
        inner = getattr(message, field)
        inner.SetInParent()
        for name, part in value.items():
            _set(inner, name, part)
    elif isinstance(value, list):
        target = getattr(message, field)
        for part in value:
            if isinstance(part, dict):
                one = target.add()
                for name, inner_value in part.items():
                    _set(one, name, inner_value)
            else:
                target.append(part)
    else:
        setattr(message, field, value)


def _unique(wanted: str, taken: dict[str, int]) -> str:
    name, number = wanted, taken.get(wanted, 1)
    while name in taken:
        number += 1
        name = f"{wanted}_{number}"
    taken[name] = 1
    taken[wanted] = number
    return name


def _without_final_splits(net: caffe_pb2.NetParameter, outputs: set[str]) -> None:
    """Give the last layer's top the output's name if no other layer reads it, in place of a Split layer."""
    readers: dict[str, int] = {}
    for layer in net.layer:
        for bottom in layer.bottom:
            readers[bottom] = readers.get(bottom, 0) + 1
    producers = {top: layer for layer in net.layer for top in layer.top}
    kept = []
    for layer in net.layer:
        source = layer.bottom[0] if layer.type == "Split" and layer.top[0] in outputs else ""
        producer = producers.get(source)
        if producer is not None and readers[source] == 1 and source not in outputs and producer.type != "Input":
            producer.top[list(producer.top).index(source)] = layer.top[0]
        else:
            kept.append(layer)
    copies: list[Message] = [caffe_pb2.LayerParameter.FromString(layer.SerializeToString()) for layer in kept]
    del net.layer[:]
    net.layer.extend(copies)  # type: ignore[arg-type]


def _silence_unread(net: caffe_pb2.NetParameter, outputs: set[str]) -> None:
    read = {bottom for layer in net.layer for bottom in layer.bottom} | outputs
    unread = [top for layer in net.layer for top in layer.top if top not in read]
    if unread:
        net.layer.add(name="unread", type="Silence", bottom=unread)


Results: TypeAlias = "Value | Sequence[Value | None]"
Importer: TypeAlias = "Callable[[NodeView], Results]"

IMPORTERS: Registry[Importer] = Registry("ONNX operator")
IMPORTED_AS: dict[str, str] = {}
"""What each operator becomes, for docs/how-to/onnx.md."""


def imports(*operators: str, form: str) -> Callable[[Importer], Importer]:
    """Decorator that registers a function for operators.

    Args:
        operators: names of ONNX's own domain.
        form: the layers that they become.
    """
    IMPORTED_AS.update(dict.fromkeys(operators, form))
    return IMPORTERS.register(*operators)


@dataclass
class NodeView:
    """A node with its inputs' values.

    Args:
        node: the node.
        inputs: constants, blobs, or None for those left out.
        net: what layers are added to.
        opset: the version of the operators.
        readers: the operators that read the node's first output.
    """

    node: NodeProto
    inputs: list[Value | None]
    net: NetBuilder
    opset: int
    readers: Sequence[NodeProto] = ()

    @property
    def name(self) -> str:
        """Wanted for the layer and its first top."""
        return str(self.node.output[0]) if self.node.output and self.node.output[0] else describe(self.node)

    def attribute(self, name: str, default: Any = None) -> Any:
        """An attribute's value.

        Raises:
            UnsupportedError: it is of a type that no operator known here has.
        """
        for one in self.node.attribute:
            if one.name == name:
                try:
                    value = helper.get_attribute_value(one)
                except ValueError as error:
                    raise UnsupportedError(f"its attribute {name} cannot be read") from error
                return value.decode(errors="replace") if isinstance(value, bytes) else value
        return default

    def number(self, name: str, default: int) -> int:
        """An attribute that is a whole number."""
        value = self.attribute(name, default)
        if not isinstance(value, int) or abs(value) >= 2**31:
            raise UnsupportedError(f"its attribute {name} is {value!r:.40}, no whole number of 32 bits")
        return value

    def real(self, name: str, default: float) -> float:
        """An attribute that is a number."""
        value = self.attribute(name, default)
        if not isinstance(value, int | float):
            raise UnsupportedError(f"its attribute {name} is {value!r:.40}, no number")
        return float(value)

    def numbers(self, name: str, default: Sequence[int] | None = None, count: int | None = None) -> list[int]:
        """An attribute that is a list of whole numbers, `count` of them."""
        value = self.attribute(name)
        value = default if value is None else value
        if value is None or not isinstance(value, Sequence | tuple) or not all(isinstance(v, int) for v in value):
            raise UnsupportedError(f"its attribute {name} must be given as whole numbers")
        if (count is not None and len(value) != count) or any(abs(v) >= 2**31 for v in value):
            raise UnsupportedError(f"its attribute {name} is {list(value)[:8]}, not {count} numbers of 32 bits")
        return list(value)

    def has(self, index: int) -> bool:
        """Whether an input is there."""
        return index < len(self.inputs) and self.inputs[index] is not None

    def value(self, index: int) -> Value:
        """An input, constant or blob."""
        if not self.has(index):
            raise UnsupportedError(f"its input {index} is missing")
        found = self.inputs[index]
        assert found is not None
        return found

    def blob(self, index: int = 0) -> Tensor:
        """An input as a blob; a constant becomes a Parameter layer."""
        value = self.value(index)
        if isinstance(value, Tensor):
            if value.pads and self.node.op_type != "Conv":
                raise UnsupportedError("its input has padding that only a convolution can take")
            return value
        return self.net.constant(np.asarray(value, np.float32), f"{self.name}/constant{index}")

    def constant(self, index: int) -> Array:
        """An input that is a constant.

        Raises:
            UnsupportedError: it is not.
        """
        value = self.value(index)
        if isinstance(value, Tensor):
            raise UnsupportedError(f"its input '{self.node.input[index]}' is computed; only a constant can be imported")
        return value

    def whole_numbers(self, index: int) -> list[int]:
        """A constant input of one axis, as whole numbers."""
        values = self.constant(index)
        if values.ndim > 1 or values.size > 64 or values.dtype.kind not in "iu":
            raise UnsupportedError(f"its input '{self.node.input[index]}' must be a few whole numbers")
        return [int(value) for value in np.atleast_1d(values)]

    def axis(self, value: int, axes: int) -> int:
        """An axis from 0."""
        if not -axes <= value < axes:
            raise UnsupportedError(f"axis {value} does not exist among {axes}")
        return value % axes

    def add(self, kind: str, bottoms: Sequence[Tensor], blobs: Sequence[Array] = (), **fields: Any) -> Tensor:
        """A layer with the node's name."""
        return self.net.add(kind, bottoms, self.name, blobs, **fields)
