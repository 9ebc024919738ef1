"""The text of a PyTorch module while it grows, and what the function of a layer type sees of its layer.

A function takes a `LayerCode` and returns expressions for the layer's tops: a string that gives all of them, or one
string for each top.
"""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from caffepy.errors import ConfigError
from caffepy.layers import Layer
from caffepy.layers.blob import Blob
from caffepy.layers.export_rules import TORCH, TorchView

Parameters: TypeAlias = "dict[str, NDArray[np.float32]]"

EXPORTERS, FORMS = TORCH.functions, TORCH.forms
exports = TORCH.exports

MODULE_NAMES = """
    add_module apply bfloat16 buffers call_super_init children compile cpu cuda double dump_patches eval extra_repr
    float forward get_buffer get_extra_state get_parameter get_submodule half ipu load_state_dict modules mtia
    named_buffers named_children named_modules named_parameters parameters register_backward_hook register_buffer
    register_forward_hook register_forward_pre_hook register_full_backward_hook register_full_backward_pre_hook
    register_load_state_dict_post_hook register_load_state_dict_pre_hook register_module register_parameter
    register_state_dict_post_hook register_state_dict_pre_hook requires_grad_ set_extra_state set_submodule
    share_memory state_dict to to_empty train training type xpu zero_grad T_destination
"""
"""Attributes of torch.nn.Module, which a layer cannot be called."""
FILE_NAMES = ("torch", "nn", "F", "Tensor", "Path", "load_file", "load", "math", "self", "range", "zip", "len", "int")
"""Names of the file outside of the net, which a blob cannot be called."""


class Names:
    """Distinct identifiers.

    Args:
        taken: names that are not given.
    """

    def __init__(self, taken: Sequence[str]) -> None:
        self._taken = set(taken)
        self._numbers: dict[str, int] = {}
        """The next number behind each name."""

    def new(self, wanted: str) -> str:
        """Return an identifier like `wanted` that has not been given yet."""
        name = identifier(wanted)
        found, number = name, self._numbers.get(name, 1)
        while found in self._taken or keyword.iskeyword(found):
            found, number = f"{name}_{number}", number + 1
        self._taken.add(found)
        self._numbers[name] = number
        return found


def identifier(text: str) -> str:
    """Return the text with other characters than ASCII's letters, digits and `_` replaced.

    A prototxt's names are untrusted: no character of theirs may end a string, a comment or a statement.
    """
    name = re.sub(r"\W", "_", text, flags=re.ASCII).lstrip("_")
    return name if name[:1].isalpha() else f"layer_{name}"


def comment(text: str) -> str:
    """Return the text without characters that could end a comment or a docstring."""
    return re.sub(r"[^\w./:,+-]+", "_", text, flags=re.ASCII)


def literal(text: str) -> str:
    """Return a string's literal, with escapes in place of all characters that `comment` replaces."""
    return '"' + re.sub(r"[^\w./:,+-]", lambda found: f"\\U{ord(found[0]):08x}", text, flags=re.ASCII) + '"'


# -- classes -------------------------------------------------------------------------------------------


@cache
def class_texts() -> Mapping[str, str]:
    """Return the text of each class of `modules`, in the file's order."""
    text = (Path(__file__).parent / "modules.py").read_text(encoding="utf-8")
    lines = text.splitlines()
    found = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    return {node.name: "\n".join(lines[node.lineno - 1 : node.end_lineno]) for node in found}


def names_in(text: str) -> set[str]:
    """Return the names that Python code reads."""
    return {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}


# -- the module ----------------------------------------------------------------------------------------


@dataclass
class ModuleCode:
    """The submodules, their parameters and the statements of `forward`.

    Args:
        class_name: of the module.
    """

    class_name: str
    submodules: list[tuple[str, str, str]] = field(default_factory=list)
    """Name, constructor and comment."""
    statements: list[tuple[str, str]] = field(default_factory=list)
    """Text and comment."""
    parameters: Parameters = field(default_factory=dict)
    """The state dict."""
    attributes: Names = field(default_factory=lambda: Names(MODULE_NAMES.split()))
    variables: Names = field(init=False)

    def __post_init__(self) -> None:
        self.variables = Names([*FILE_NAMES, *class_texts(), self.class_name])


@dataclass
class LayerCode(TorchView):
    """A layer with the variables of its bottoms.

    Args:
        module: the code to which the layer is added.
        layer: the layer, set up, with its parameters.
        inputs: the variables of the bottoms.
        bottoms: with their shapes.
        tops: with their shapes.
        varying: of each blob's axes whether the size follows the batch, by the blob's name.
        merged: the Scale layer that becomes a part of this BatchNorm.
    """

    module: ModuleCode
    layer: Layer
    inputs: list[str]
    bottoms: list[Blob]
    tops: list[Blob]
    varying: Mapping[str, Sequence[bool]]
    merged: Layer | None = None

    @property
    def rank(self) -> int:
        """Number of axes of the first bottom."""
        return len(self.bottoms[0].shape)

    def submodule(self, constructor: str, **parameters: NDArray[Any]) -> str:
        """Add a submodule of the layer's name with its parameters; return `self.name`."""
        name = self.module.attributes.new(self.layer.name)
        notes = [comment(self.layer.name)] * (name != self.layer.name)
        if self.merged is not None:
            notes.append(f"and {comment(self.merged.name)}")
        self.module.submodules.append((name, constructor, " ".join(notes)))
        for key, values in parameters.items():
            self.module.parameters[f"{name}.{key}"] = np.asarray(values, np.float32)
        return f"self.{name}"

    def apply(self, constructor: str, *inputs: str, **parameters: NDArray[Any]) -> str:
        """Add a submodule; return its call with some inputs, by default with the first."""
        return f"{self.submodule(constructor, **parameters)}({', '.join(inputs or [self.x])})"

    def shape_of(self, blob: Blob) -> str:
        """A blob's shape as arguments, -1 for an axis that follows the batch.

        Raises:
            ConfigError: two of its axes do.
        """
        varies = list(self.varying.get(blob.name, [])) or [False] * len(blob.shape)
        shape = [-1 if follows else size for size, follows in zip(blob.shape, varies, strict=True)]
        if shape.count(-1) > 1 or (-1 in shape and 0 in shape):
            raise self.error("its shape depends on the batch in more than one axis; give --batch N")
        return ", ".join(map(str, shape))

    def refuse(self, what: str) -> ConfigError:
        """An error: a setting cannot be expressed."""
        return self.error(f"{what} has no PyTorch form; change the setting, or export the net to ONNX (--to onnx)")
