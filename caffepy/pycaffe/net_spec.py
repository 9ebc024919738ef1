"""Nets defined in Python, for example `layers.Convolution(bottom, …)` (pycaffe's `net_spec.py`).

A call such as `layers.ReLU` returns the layer's tops, the bottoms of further calls. `NetSpec` names tops and writes the
layers. Unnamed layers are numbered by type, for example `Convolution1`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from caffepy.formats.proto import caffe_pb2
from caffepy.formats.proto.caffe_pb2 import LayerParameter, NetParameter, PoolingParameter
from caffepy.formats.prototxt import POOLING_SHAPES
from caffepy.layers.layer import unknown_type_advice
from caffepy.pycaffe.layer import layer_type_list
from caffepy.utils.registry import suggest

logger = logging.getLogger(__name__)

Names = dict[Any, str]


def param_name_dict() -> dict[str, str]:
    """Return the LayerParameter field of each layer type's parameters, without `_param`.

    Example:
        >>> param_name_dict()["InnerProduct"]
        'inner_product'
    """
    found: dict[str, str] = {}
    for field in LayerParameter.DESCRIPTOR.fields:
        if field.name.endswith("_param") and field.message_type is not None:
            found.setdefault(field.message_type.name.removesuffix("Parameter"), field.name.removesuffix("_param"))
    return found


_FIELDS = {**param_name_dict(), "Deconvolution": "convolution"}
"""Fields of LayerParameter by layer type, without `_param`; a fork of SSD's gives Deconvolution's settings directly."""


def to_proto(*tops: Top | Function) -> NetParameter:
    """Return the layers that compute all tops; unnamed layers are named by type and number."""
    return _net_of(tops, {})


def _net_of(tops: Any, names: Names) -> NetParameter:
    layers: dict[Function, LayerParameter] = {}
    numbers: Counter[str] = Counter()
    for top in tops:
        top._to_proto(layers, names, numbers)
    return NetParameter(layer=layers.values())


def assign_proto(proto: Message, name: str, val: Any) -> None:
    """Set a field from a Python value: a dict becomes a message; a list, tuple or array a repeated field.

    Any other value becomes the only element of a repeated field. Sizes of Pooling for each axis become a shape.

    Raises:
        AttributeError: the message has no such field.
        TypeError, ValueError: the field cannot hold the value.
    """
    if isinstance(proto, PoolingParameter) and name in POOLING_SHAPES and isinstance(val, (list, tuple)):
        proto, name, val = getattr(proto, POOLING_SHAPES[name]), "dim", list(val)
    descriptor = proto.DESCRIPTOR
    if name not in descriptor.fields_by_name:
        raise AttributeError(
            f"{descriptor.name} has no field '{name}'; {suggest(name, list(descriptor.fields_by_name))}"
        )
    field = getattr(proto, name)
    if isinstance(val, np.ndarray):
        val = val.tolist()
    if isinstance(val, Mapping) and not hasattr(field, "extend"):
        for key, item in val.items():
            assign_proto(field, key, item)
        return
    for value in val if isinstance(val, (list, tuple)) and hasattr(field, "extend") else [val]:
        if isinstance(value, Mapping):
            item = field.add()
            for key, part in value.items():
                assign_proto(item, key, part)
            continue
        try:
            _put(proto, name, value)
        except (AttributeError, TypeError, ValueError) as error:
            raise type(error)(_refusal(proto, name, value)) from error


_WHOLE = (
    FieldDescriptor.CPPTYPE_INT32,
    FieldDescriptor.CPPTYPE_INT64,
    FieldDescriptor.CPPTYPE_UINT32,
    FieldDescriptor.CPPTYPE_UINT64,
)


def _put(proto: Message, name: str, value: Any) -> None:
    """Set a field, or append to a repeated one. A whole number may be a float: scripts of Python 2 divide by /."""
    field = getattr(proto, name)
    whole = isinstance(value, float) and value.is_integer()
    if whole and proto.DESCRIPTOR.fields_by_name[name].cpp_type in _WHOLE:
        value = int(value)
    if hasattr(field, "extend"):
        field.append(value)
    elif isinstance(value, Message):
        field.CopyFrom(value)
    else:
        setattr(proto, name, value)


def _refusal(proto: Message, name: str, value: Any) -> str:
    """Return the error message for a value that a field cannot hold."""
    message = proto.DESCRIPTOR
    field = message.fields_by_name[name]
    if field.message_type is not None:
        wanted = f"a dict with fields of {field.message_type.name}"
    elif field.enum_type is not None:
        wanted = f"one of {', '.join(field.enum_type.values_by_name)}"
    elif field.cpp_type == field.CPPTYPE_BOOL:
        wanted = "True or False"
    elif field.cpp_type == field.CPPTYPE_STRING:
        wanted = "a text"
    elif field.cpp_type in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
        wanted = "a number"
    else:
        sign = " of 0 or more" if field.cpp_type in (field.CPPTYPE_UINT32, field.CPPTYPE_UINT64) else ""
        wanted = f"a whole number{sign}"
    whole = "; write int(…), or divide by //" if isinstance(value, float) and "whole" in wanted else ""
    return f"{name} of {message.name} is {value!r} and takes {wanted}{whole}"


class Top:
    """A top of a layer.

    Args:
        fn: the layer.
        n: its index among the layer's tops.
    """

    def __init__(self, fn: Function, n: int) -> None:
        self.fn = fn
        self.n = n

    def __repr__(self) -> str:
        return f"Top({self.fn.type_name}, {self.n})"

    def to_proto(self) -> NetParameter:
        """Return the layers that compute this blob."""
        return to_proto(self)

    def _to_proto(self, layers: dict[Function, LayerParameter], names: Names, autonames: Counter[str]) -> None:
        self.fn._to_proto(layers, names, autonames)

    def _update(self, params: Mapping[str, Any]) -> None:
        self.fn._update(params)


class Function:
    """A layer: its type, its bottoms and its parameters.

    Args:
        type_name: Caffe's name of the type.
        inputs: the bottoms.
        params: fields of the type's parameter message or of LayerParameter, and two options: `ntop`, the number of
            tops, and `in_place`.

    Raises:
        TypeError: a bottom is not a `Top`, for example the tuple of a layer with several tops.
    """

    def __init__(self, type_name: str, inputs: tuple[Any, ...], params: dict[str, Any]) -> None:
        for index, bottom in enumerate(inputs):
            if not isinstance(bottom, Top):
                raise TypeError(f"{type_name} input {index} is not a Top (type is {type(bottom)})")
        self.type_name = type_name
        self.inputs: tuple[Top, ...] = inputs
        self.params = params
        self.ntop: int = params.pop("ntop", 1)
        self.in_place: bool = params.pop("in_place", False)
        self.tops = tuple(Top(self, n) for n in range(self.ntop))

    def to_proto(self) -> NetParameter:
        """Return the layers up to this one. For layers without tops."""
        return to_proto(self)

    def _update(self, params: Mapping[str, Any]) -> None:
        self.params.update(params)

    def _get_name(self, names: Names, autonames: Counter[str]) -> str:
        if self not in names:
            first = self.tops[0] if self.ntop > 0 else self
            names[self] = self._get_top_name(first, names, autonames)
        return names[self]

    def _get_top_name(self, top: Top | Function, names: Names, autonames: Counter[str]) -> str:
        if top not in names:
            autonames[self.type_name] += 1
            names[top] = f"{self.type_name}{autonames[self.type_name]}"
        return names[top]

    def _to_proto(self, layers: dict[Function, LayerParameter], names: Names, autonames: Counter[str]) -> None:
        """Add this layer after the layers that it depends on."""
        pending: list[Function] = [self]
        while pending:
            function = pending[-1]
            needed = [bottom.fn for bottom in function.inputs if bottom.fn not in layers]
            if needed and function not in layers:
                pending.append(needed[0])
                continue
            pending.pop()
            if function not in layers:
                layers[function] = function._message(layers, names, autonames)

    def _message(self, layers: dict[Function, LayerParameter], names: Names, autonames: Counter[str]) -> LayerParameter:
        layer = LayerParameter(type=self.type_name)
        layer.bottom.extend(layers[bottom.fn].top[bottom.n] for bottom in self.inputs)
        if self.in_place:
            layer.top.extend(layer.bottom)
        else:
            layer.top.extend(self._get_top_name(top, names, autonames) for top in self.tops)
        layer.name = self._get_name(names, autonames)
        for key, value in self.params.items():
            self._assign(layer, key, value)
        return layer

    def _assign(self, layer: LayerParameter, key: str, value: Any) -> None:
        """Set a field of the type's own message if it has that field, else of LayerParameter."""
        own = f"{_FIELDS.get(self.type_name, '')}_param"
        target: Message = layer
        if not key.endswith("param") and own in layer.DESCRIPTOR.fields_by_name:
            message = getattr(layer, own)
            target = message if key in message.DESCRIPTOR.fields_by_name else layer
        if key not in target.DESCRIPTOR.fields_by_name:
            raise AttributeError(
                f"layer type {self.type_name} has no parameter '{key}': neither "
                f"{self.type_name}Parameter nor LayerParameter has a field of this name; {self._advice(key, layer)}"
            )
        try:
            assign_proto(target, key, value)
        except (AttributeError, TypeError, ValueError) as error:
            raise type(error)(f"layer '{layer.name}' ({self.type_name}): {error}") from error

    def _advice(self, key: str, layer: LayerParameter) -> str:
        own = f"{_FIELDS.get(self.type_name, '')}_param"
        types = layer_type_list()
        if self.type_name not in types:
            return f"nor is there such a layer type; {unknown_type_advice(self.type_name)}"
        fields = getattr(layer, own) if own in layer.DESCRIPTOR.fields_by_name else layer
        return suggest(key, list(fields.DESCRIPTOR.fields_by_name))


class NetSpec:
    """A net: named tops, assigned as attributes or items.

    Example:
        >>> n = NetSpec()
        >>> n.data = layers.Input(shape=dict(dim=[1, 3, 8, 8]))
        >>> n.conv1 = layers.Convolution(n.data, kernel_size=3, num_output=2)
        >>> n["relu1"] = layers.ReLU(n.conv1, in_place=True)
        >>> [layer.name for layer in n.to_proto().layer]
        ['data', 'conv1', 'relu1']
    """

    tops: dict[str, Any]

    def __init__(self) -> None:
        super().__setattr__("tops", {})

    def __setattr__(self, name: str, value: Any) -> None:
        self.tops[name] = value

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattribute__("tops")[name]
        except KeyError:
            raise AttributeError(f"the net has no top '{name}'; assign it before it is used") from None

    def __setitem__(self, key: str, value: Any) -> None:
        self.tops[key] = value

    def __getitem__(self, item: str) -> Any:
        return self.tops[item]

    def __delitem__(self, name: str) -> None:
        del self.tops[name]

    def __delattr__(self, name: str) -> None:
        del self.tops[name]

    def __contains__(self, name: str) -> bool:
        return name in self.tops

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.tops]

    def keys(self) -> list[str]:
        """Return the names in the order of assignment (NVIDIA's)."""
        return list(self.tops)

    def vals(self) -> list[Any]:
        """Return the tops in the order of assignment (NVIDIA's)."""
        return list(self.tops.values())

    def update(self, name: str, params: Mapping[str, Any]) -> None:
        """Set further parameters of a top's layer (NVIDIA's)."""
        self.tops[name]._update(params)

    def to_proto(self, verbose: bool = False) -> NetParameter:
        """Return the layers of all assigned tops; `verbose` (NVIDIA's) logs the names."""
        if verbose:
            logger.info("the net's tops: %s", ", ".join(f"{name} of {top!r}" for name, top in self.tops.items()))
        return _net_of(self.tops.values(), {top: name for name, top in self.tops.items()})


class Layers:
    """`Layers().Convolution(bottom, kernel_size=3)` returns the top of a convolution; every layer type is an attribute.

    A layer with several tops returns a tuple of tops, a layer without tops returns the `Function`.
    """

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def layer_fn(*args: Any, **kwargs: Any) -> Any:
            fn = Function(name, args, kwargs)
            if fn.ntop == 0:
                return fn
            return fn.tops[0] if fn.ntop == 1 else fn.tops

        return layer_fn


class _Constants:
    """The enum values of a parameter message."""

    def __init__(self, message: type[Message]) -> None:
        self._message = message

    def __getattr__(self, name: str) -> Any:
        return getattr(self._message, name)


class Parameters:
    """`Parameters().Pooling.MAX` is `caffe_pb2.PoolingParameter.MAX`; every parameter message is an attribute."""

    def __getattr__(self, name: str) -> _Constants:
        message = getattr(caffe_pb2, f"{name}Parameter", None)
        if message is None:
            raise AttributeError(f"there is no message '{name}Parameter' in caffe.proto")
        return _Constants(message)


layers = Layers()
params = Parameters()
