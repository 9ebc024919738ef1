"""The rules by which layer types are exported: for each format a table of functions, and what they see of a layer.

Rules of the types of `layers` stand in `export`. A family of forks has its own in its folder, in `export_rules`. They
are imported for the nets that have a type of the family. Nothing here needs onnx or torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from caffepy.errors import ConfigError
from caffepy.layers.blob import Blob
from caffepy.layers.known_types import layer_modules
from caffepy.utils.registry import Registry

Values: TypeAlias = "str | Sequence[str] | None"
"""What a layer's tops become: names of values in ONNX, expressions in PyTorch."""
Rule: TypeAlias = Callable[[Any], Values]

_FORKS = "caffepy.forks"


@dataclass(frozen=True)
class Rules:
    """The rules of one format.

    Args:
        functions: the rule of each layer type.
    """

    functions: Registry[Rule]
    forms: dict[str, str] = field(default_factory=dict)
    """What each type becomes, for the documents."""
    composites: set[str] = field(default_factory=set)
    """Types that become several nodes and cannot be recognised as one layer; the model's metadata describe them."""

    def exports(self, *types: str, form: str, composite: bool = False) -> Callable[[Rule], Rule]:
        """Decorator that registers a rule for layer types.

        Args:
            types: the layer types.
            form: the operators, modules or functions that they become.
            composite: see `composites`.
        """
        self.forms.update(dict.fromkeys(types, form))
        if composite:
            self.composites.update(types)
        return self.functions.register(*types)

    def apply(self, layer_type: str, view: Any) -> Values:
        """Return what the rule of another type gives, for a type of a fork that is exported as one of Caffe's."""
        return self.functions.get(layer_type)(view)


def import_families(types: Iterable[str] | None = None) -> None:
    """Import the rules of the families of some layer types; None: of all families."""
    for family in sorted(_families(types)):
        name = f"{_FORKS}.{family}.export_rules"
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)


def _families(types: Iterable[str] | None) -> set[str]:
    """The families that define some types; all of them where the sources, which tell them, are not installed."""
    modules = layer_modules()
    if types is None or not modules:
        return {module.name for module in pkgutil.iter_modules(importlib.import_module(_FORKS).__path__)}
    found = (modules.get(one, "") for one in types)
    return {module.split(".")[2] for module in found if module.startswith(f"{_FORKS}.")}


ONNX = Rules(Registry("layer type with an ONNX form"))
TORCH = Rules(Registry("layer type with a PyTorch form"))


class ExportedLayer(Protocol):
    """A layer with the names of its bottoms' values, in either form."""

    layer: Any
    inputs: list[str]
    bottoms: list[Blob]
    tops: list[Blob]

    @property
    def param(self) -> Any:
        """The layer's prototxt."""
        return self.layer.param

    @property
    def x(self) -> str:
        """The first bottom's value."""
        return self.inputs[0]

    def weights(self, index: int) -> NDArray[np.float32]:
        """A parameter's values."""
        return np.asarray(self.layer.blobs[index].host_data(), np.float32)

    def axis(self, index: int) -> int:
        """An axis of the first bottom, from 0."""
        return self.bottoms[0].axis(index, f"layer '{self.layer.name}'")

    def error(self, message: str) -> ConfigError:
        """An error that names the layer and its type."""
        error: ConfigError = self.layer.error(message)
        return error


# -- ONNX ----------------------------------------------------------------------------------------------

FLOAT, INT64 = 1, 7
"""ONNX's numbers of types of elements."""


class OnnxView(ExportedLayer, Protocol):
    """A layer for a rule of ONNX; `caffepy.export.onnx.graph.LayerView` describes each name."""

    graph: Any

    def add(self, operator: str, *inputs: str, **attributes: Any) -> str: ...
    def add_many(self, operator: str, count: int, *inputs: str, **attributes: Any) -> list[str]: ...
    def floats(self, values: Any, name: str = "constant") -> str: ...
    def ints(self, *values: int) -> str: ...
    def parameter(self, index: int, shape: Sequence[int] | None = None) -> str: ...
    def scaled(self, value: str, factor: float, term: float = 0.0) -> str: ...
    def reduce(self, operator: str, value: str, axes: Sequence[int], keepdims: bool = True) -> str: ...
    def reshaped(self, value: str, shape: Sequence[int]) -> str: ...
    def windows(self, geometry: Any) -> Any: ...
    def average(self, value: str, windows: Any) -> str: ...
    def sampled(self, positions: str) -> str: ...
    def shape_of(self, blob: Blob, what: str) -> list[int]: ...
    def in_shape_of(self, value: str, blob: Blob) -> str: ...
    def refuse_varying(self, blob: Blob, axes: Sequence[int]) -> None: ...


# -- PyTorch -------------------------------------------------------------------------------------------


class TorchView(ExportedLayer, Protocol):
    """A layer for a rule of PyTorch; `caffepy.export.torch.code.LayerCode` describes each name."""

    @property
    def rank(self) -> int: ...
    def submodule(self, constructor: str, **parameters: NDArray[Any]) -> str: ...
    def apply(self, constructor: str, *inputs: str, **parameters: NDArray[Any]) -> str: ...
    def shape_of(self, blob: Blob) -> str: ...
    def refuse(self, what: str) -> ConfigError: ...


def number(value: float) -> str:
    """Return a float32 as the shortest literal that gives it."""
    single = np.float32(value)
    if not np.isfinite(single):
        return f'float("{single}")'
    return str(single)


def numbers(values: Sequence[float]) -> str:
    """Return a tuple's literal."""
    return f"({', '.join(map(number, values))}{',' * (len(values) == 1)})"


def pair(values: Sequence[int]) -> str:
    """Return one size along all axes as a number, different ones as a tuple."""
    return str(values[0]) if len(set(values)) == 1 else f"({', '.join(map(str, values))})"


def call(name: str, *arguments: Any, **settings: Any) -> str:
    """Return the text of a call; settings that are None are left out."""
    parts = [str(argument) for argument in arguments]
    parts += [f"{key}={value}" for key, value in settings.items() if value is not None]
    return f"{name}({', '.join(parts)})"


def affine(value: str, factor: float, term: float = 0.0) -> str:
    """The text of value * factor + term."""
    value = value if factor == 1 else f"{number(factor)} * {value}"
    return value if term == 0 else f"{value} + {number(term)}"
