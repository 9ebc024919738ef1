"""What the function of an operator sees of a node, and the registry of these functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, helper

from caffepy.onnx.importer.builder import NetBuilder, Tensor, UnsupportedError, Value
from caffepy.onnx.importer.model import describe
from caffepy.registry import Registry

Array = NDArray[Any]
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
