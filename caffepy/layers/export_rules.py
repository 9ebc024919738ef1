"""The rules by which layer types are exported: for each format a table of functions, and what they see of a layer.

A rule says of which operators a layer consists, by the names that ONNX has for them. It sees an `OnnxLayer` or a
`TorchLayer`; a rule that both formats share sees either, and uses the methods that both have.

Rules of the types of `layers` stand in `export`. A family of forks has its own in its folder, in `export_rules`. They
are imported for the nets that have a type of the family. Nothing here needs onnx or torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from caffepy.errors import ConfigError
from caffepy.layers.blob import Blob
from caffepy.layers.known_types import layer_modules
from caffepy.layers.layer import Layer
from caffepy.utils.registry import Registry
from caffepy.utils.subpackages import import_from_subpackages

Values: TypeAlias = "str | Sequence[str] | None"
"""What a layer's tops become: names of values in ONNX, expressions in PyTorch."""
Rule: TypeAlias = Callable[[Any], Values]

_FORKS = "caffepy.forks"


@dataclass(frozen=True)
class Rules:
    """The rules of one format.

    Args:
        format: its name.
        advice: what to do with a net of which a layer has no rule.
    """

    format: str
    advice: str
    functions: Registry[Rule] = field(default_factory=lambda: Registry("exported layer type"))
    """The rule of each layer type."""
    operators: dict[str, Any] = field(default_factory=dict)
    """How operators of shared rules are said: a function of the layer, the inputs and the settings; in PyTorch also a
    text, which is that of a module if it begins with a class. In ONNX other operators are nodes of their names."""
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


def import_families(types: Iterable[str] | None = None) -> None:
    """Import the rules of the families of some layer types; None: of all families."""
    import_from_subpackages(_FORKS, "export_rules", _families(types))


def _families(types: Iterable[str] | None) -> set[str] | None:
    """The families that define some types; None, for all, where the sources, which tell them, are not installed."""
    modules = layer_modules()
    if types is None or not modules:
        return None
    found = (modules.get(one, "") for one in types)
    return {module.split(".")[2] for module in found if module.startswith(f"{_FORKS}.")}


ONNX = Rules("ONNX", "docs/how-to/onnx.md lists the types that have one")
TORCH = Rules(
    "PyTorch",
    "export the net up to them, or to ONNX (--to onnx); docs/how-to/leave-caffe.md lists the types that have a form",
)


def exports(*types: str, onnx: str, torch: str, composite: bool = False) -> Callable[[Rule], Rule]:
    """Decorator that registers a rule for layer types in both formats; `onnx` and `torch` are the forms."""

    def register(rule: Rule) -> Rule:
        ONNX.exports(*types, form=onnx, composite=composite)(rule)
        return TORCH.exports(*types, form=torch)(rule)

    return register


@dataclass(frozen=True)
class Windows:
    """The windows of a pooling layer along the spatial axes.

    Args:
        size: of the image.
        out: how many windows.
        kernel: their size.
        stride: from one to the next.
        pad: before the image; after it as much counts for the average.
    """

    size: tuple[int, ...]
    out: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    pad: tuple[int, ...]

    @property
    def after(self) -> tuple[int, ...]:
        """How far the last window reaches beyond the image; below 0 where it ends before."""
        sizes = zip(self.size, self.out, self.kernel, self.stride, self.pad, strict=True)
        return tuple((out - 1) * stride + kernel - size - pad for size, out, kernel, stride, pad in sizes)

    @property
    def overhang(self) -> tuple[int, ...]:
        """`after`, but 0 where it is below."""
        return tuple(max(end, 0) for end in self.after)

    @property
    def attributes(self) -> dict[str, Any]:
        """Those of ONNX, where rounding down gives the same windows with this padding."""
        return {"kernel_shape": list(self.kernel), "strides": list(self.stride), "pads": [*self.pad, *self.overhang]}

    def counts(self, axis: int) -> NDArray[np.int64]:
        """How many positions of each window lie in the image with `pad` on both sides, along an axis."""
        begins = np.arange(self.out[axis]) * self.stride[axis] - self.pad[axis]
        return np.minimum(begins + self.kernel[axis], self.size[axis] + self.pad[axis]) - begins


@dataclass
class ExportedLayer:
    """A layer with the names of its bottoms' values, in either format.

    Args:
        target: what it is added to: ONNX's graph, or the module.
        layer: the layer, set up, with its parameters.
        inputs: the values of the bottoms: names in ONNX, variables in PyTorch.
        bottoms: with their shapes.
        tops: with their shapes.
        varying: of each blob's axes whether the size follows the batch, by the blob's name; empty: the batch is fixed.
    """

    rules: ClassVar[Rules]

    target: Any
    layer: Any
    inputs: list[str]
    bottoms: list[Blob]
    tops: list[Blob]
    varying: Mapping[str, Sequence[bool]] = field(default_factory=dict)

    @property
    def param(self) -> Any:
        """The layer's prototxt."""
        return self.layer.param

    @property
    def x(self) -> str:
        """The first bottom's value."""
        return self.inputs[0]

    @property
    def rank(self) -> int:
        """Number of axes of the first bottom."""
        return len(self.bottoms[0].shape)

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

    def as_type(self, layer_type: str) -> Values:
        """What the rule of another type gives, for a type of a fork that is exported as one of Caffe's."""
        return self.rules.functions.get(layer_type)(self)

    def shape_of(self, blob: Blob) -> list[int]:
        """A blob's shape for a constant, -1 where it follows the batch.

        Raises:
            ConfigError: two of its axes do.
        """
        varies = self.varying.get(blob.name) or [False] * len(blob.shape)
        shape = [-1 if follows else size for size, follows in zip(blob.shape, varies, strict=True)]
        if shape.count(-1) > 1 or (-1 in shape and 0 in shape):
            raise self.error("its shape depends on the batch in more than one axis; export it with --batch N")
        return shape

    def windows(self, geometry: Any) -> Windows:
        """The windows of a layer with this geometry."""
        image, windows = (blob.shape[2:] for blob in (self.bottoms[0], self.tops[0]))
        return Windows(image, windows, geometry.kernel, geometry.stride, geometry.pad)

    def needs_onnx(self, what: str) -> None:
        """Refuse a setting that PyTorch's form does not have.

        Raises:
            ConfigError: the format is PyTorch.
        """
        if self.rules is TORCH:
            raise self.error(f"{what} has no PyTorch form; change the setting, or export the net to ONNX (--to onnx)")

    def add(self, operator: str, *inputs: Any, **settings: Any) -> str:
        """An operator's value."""
        form = self.rules.operators.get(operator)
        said: str = form(self, *inputs, **settings) if callable(form) else self.write(operator, inputs, settings)
        return said

    def write(self, operator: str, inputs: Sequence[Any], settings: Mapping[str, Any]) -> str:
        """The value of an operator that the format has itself."""
        raise NotImplementedError

    def reshaped(self, value: str, shape: Sequence[int]) -> str:
        """The value in another shape; -1 is worked out, and in ONNX 0 keeps an axis."""
        return self.add("Reshape", value, tuple(shape))

    def in_shape_of(self, value: str, blob: Blob) -> str:
        """The value in a blob's shape."""
        return self.reshaped(value, self.shape_of(blob))


# -- ONNX ----------------------------------------------------------------------------------------------

FLOAT, INT64, BOOL = 1, 7, 9
"""ONNX's numbers of types of elements."""
REDUCE_AXES_ARE_INPUTS, GRID_SAMPLE, LINEAR = 18, 16, 20
"""The first versions of the operators where axes are inputs, with GridSample, and where bilinear is called linear."""
PARAMETER_NAMES = ["W", "B", "C", "D", "E", "F"]
"""Behind the layer's name, the constants that hold its parameters."""


@dataclass
class OnnxLayer(ExportedLayer):
    """A layer for a rule of ONNX."""

    rules = ONNX

    def write(self, operator: str, inputs: Sequence[Any], settings: Mapping[str, Any]) -> str:
        """A node with one output; its value."""
        return self.add_many(operator, 1, *inputs, **settings)[0]

    def add_many(self, operator: str, count: int, *inputs: Any, **attributes: Any) -> list[str]:
        """A node; its values. Of the inputs a number becomes a constant of float32, a tuple of int64."""
        names = [
            value if isinstance(value, str) else self.ints(*value) if isinstance(value, tuple) else self.floats(value)
            for value in inputs
        ]
        outputs: list[str] = self.target.add(self.layer.name, operator, names, count, **attributes)
        return outputs

    def floats(self, values: Any, name: str = "constant") -> str:
        """A constant of float32."""
        return self._constant(np.asarray(values, np.float32), name)

    def ints(self, *values: int) -> str:
        """A constant of one axis of int64."""
        return self._constant(np.array(values, np.int64), "ints")

    def _constant(self, values: NDArray[Any], name: str) -> str:
        constant: str = self.target.constant(values, f"{self.layer.name}/{name}")
        return constant

    def parameter(self, index: int, shape: Sequence[int] | None = None) -> str:
        """A constant with a parameter's values, in another shape if one is given."""
        values = self.weights(index)
        return self.floats(values if shape is None else values.reshape(shape), PARAMETER_NAMES[index])

    def scaled(self, value: str, factor: float, term: float = 0.0) -> str:
        """value * factor + term."""
        if factor != 1:
            value = self.add("Mul", value, factor)
        return value if term == 0 else self.add("Add", value, term)

    def reduce(self, operator: str, value: str, axes: Sequence[int], keepdims: bool = True) -> str:
        """A reduction over axes, as the version of the operators has it."""
        if operator == "ReduceSum" or self.target.opset >= REDUCE_AXES_ARE_INPUTS:
            return self.add(operator, value, self.ints(*axes), keepdims=int(keepdims))
        return self.add(operator, value, axes=list(axes), keepdims=int(keepdims))

    def average(self, value: str, windows: Windows) -> str:
        """Caffe's average of windows, whose divisor counts padding up to `pad` on either side."""
        if max(windows.out) == 1 and not any(windows.pad) and windows.kernel == windows.size:
            return self.add("GlobalAveragePool", value)
        if not any(windows.pad):
            return self.add("AveragePool", value, **windows.attributes, count_include_pad=0)
        pooled = self.add("AveragePool", value, **windows.attributes, count_include_pad=1)
        if all(over <= pad for over, pad in zip(windows.overhang, windows.pad, strict=True)):
            return pooled
        counts = map(windows.counts, range(len(windows.pad)))
        factors = np.prod(windows.kernel) / functools.reduce(np.multiply.outer, counts)
        return self.add("Mul", pooled, self.floats(factors[None, None]))

    def sampled(self, positions: str) -> str:
        """The first bottom at positions (N, 2, H', W') in pixels; pixels outside are 0.

        Raises:
            ConfigError: the operators have no GridSample, or a side of the image is one pixel.
        """
        height, width = self.bottoms[0].shape[2:]
        if self.target.opset < GRID_SAMPLE:
            raise self.error(f"needs GridSample, which ONNX has from opset {GRID_SAMPLE} on; export it with --opset")
        if min(height, width) < 2:
            raise self.error("samples an image with a side of one pixel, for which ONNX's positions are not defined")
        factors = np.reshape([2 / (width - 1), 2 / (height - 1)], (1, 2, 1, 1))
        scaled = self.add("Sub", self.add("Mul", positions, factors), 1)
        grid = self.add("Transpose", scaled, perm=[0, 2, 3, 1])
        mode = "linear" if self.target.opset >= LINEAR else "bilinear"
        return self.add("GridSample", self.x, grid, align_corners=1, mode=mode, padding_mode="zeros")

    def joined(self, values: Sequence[str], axis: int) -> str:
        """The values one behind the other along an axis."""
        return values[0] if len(values) == 1 else self.add("Concat", *values, axis=axis)

    def split(self, sizes: Sequence[int], axis: int) -> list[str]:
        """Parts of the first bottom along an axis."""
        self.refuse_varying(self.bottoms[0], [axis])
        return self.add_many("Split", len(sizes), self.x, self.ints(*sizes), axis=axis)

    def refuse_varying(self, blob: Blob, axes: Iterable[int]) -> None:
        """Refuse sizes along axes that follow the batch, where they become constants.

        Raises:
            ConfigError: one does.
        """
        varies = self.varying.get(blob.name, ())
        if any(axis < len(varies) and varies[axis] for axis in axes):
            raise self.error(f"the size of '{blob.title}' depends on the batch; export it with --batch N")


# -- PyTorch -------------------------------------------------------------------------------------------


@dataclass
class TorchLayer(ExportedLayer):
    """A layer for a rule of PyTorch.

    Args:
        merged: the Scale layer that becomes a part of this BatchNorm.
    """

    rules = TORCH

    merged: Layer | None = None

    def submodule(self, constructor: str, **parameters: NDArray[Any]) -> str:
        """Add a submodule of the layer's name with its parameters; return `self.name`."""
        name: str = self.target.add(self.layer.name, constructor, parameters, self.merged)
        return f"self.{name}"

    def apply(self, constructor: str, *inputs: str, **parameters: NDArray[Any]) -> str:
        """Add a submodule; return its call with some inputs, by default with the first."""
        return f"{self.submodule(constructor, **parameters)}({', '.join(inputs or [self.x])})"

    def write(self, operator: str, inputs: Sequence[Any], settings: Mapping[str, Any]) -> str:
        """The expression for an operator, of a new submodule if it is said as a module."""
        form, values = TORCH.operators[operator], list(map(_text, inputs))
        text = form.format(*values, x=self.x, **{key: _text(value) for key, value in settings.items()})
        return self.apply(text, *values) if form.startswith("nn.") or form[0].isupper() else text

    def scaled(self, value: str, factor: float, term: float = 0.0) -> str:
        """value * factor + term."""
        return affine(value, factor, term)

    def joined(self, values: Sequence[str], axis: int) -> str:
        """The values one behind the other along an axis."""
        return f"torch.cat([{', '.join(values)}], dim={axis})"

    def split(self, sizes: Sequence[int], axis: int) -> str:
        """Parts of the first bottom along an axis."""
        return f"{self.x}.split({list(sizes)}, dim={axis})"


AnyLayer: TypeAlias = OnnxLayer | TorchLayer


def _text(value: Any) -> str:
    """An operand or a setting as it stands in PyTorch."""
    if isinstance(value, float):
        return number(value)
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


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
