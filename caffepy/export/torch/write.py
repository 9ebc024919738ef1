"""A net as the text of a PyTorch module, and its parameters.

The prototxt is untrusted: names reach the text only as identifiers, and in comments without special characters.

`Exported` runs an exported module by PyTorch, for checks.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from caffepy.errors import RunError, one_line
from caffepy.export.lowering import Lowering, Varying
from caffepy.export.torch import rules
from caffepy.layers import Layer
from caffepy.layers.batch_norm import BatchNormLayer
from caffepy.layers.blob import Blob
from caffepy.layers.export_rules import TORCH, TorchLayer
from caffepy.net import Net
from caffepy.net.graph import Node
from caffepy.utils.installation import MissingExtraError
from caffepy.version import __version__

_ = rules  # its functions register themselves

Parameters: TypeAlias = "dict[str, NDArray[np.float32]]"

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

    def add(self, layer: str, constructor: str, parameters: Parameters, merged: Layer | None) -> str:
        """Add a submodule of a layer's name with its parameters; return its name."""
        name = self.attributes.new(layer)
        notes = [comment(layer)] * (name != layer)
        if merged is not None:
            notes.append(f"and {comment(merged.name)}")
        self.submodules.append((name, constructor, " ".join(notes)))
        for key, values in parameters.items():
            self.parameters[f"{name}.{key}"] = np.asarray(values, np.float32)
        return name


# -- the net -------------------------------------------------------------------------------------------

WIDTH = 120
"""Longest line."""


def to_torch(net: Net, varying: Varying | None = None) -> tuple[str, Parameters]:
    """Return a net as the text of a Python file, and the state dict of its module in float32.

    The file imports torch and safetensors. It defines one class for the net, classes for layers that PyTorch has no
    module for, and `load()`, which reads the state dict from the .safetensors file beside it.

    Args:
        net: in phase TEST, with its weights, on the CPU.
        varying: see `Varying`; None: the batch is the net's.

    Raises:
        ConfigError: layers have no PyTorch form, all of which are named, or one of their settings has none.
    """
    writer = _Writer(net, varying)
    writer.add_layers()
    return writer.text(), writer.module.parameters


class _Writer(Lowering):
    """The module while it grows, layer by layer.

    Args:
        net: the net.
        varying: see `to_torch`.
    """

    def __init__(self, net: Net, varying: Varying | None) -> None:
        super().__init__(net, TORCH, varying)
        name = identifier(net.name) if net.name else "Net"
        self.module = ModuleCode(Names([*FILE_NAMES, *class_texts()]).new(name[0].upper() + name[1:]))
        self.last_read = {bottom: index for index, node in enumerate(net.nodes) for bottom in node.bottoms}
        self.last_read |= dict.fromkeys(net.outputs.values(), len(net.nodes))
        """The last layer that reads each blob."""
        self.merged = dict(filter(None, map(self._mergeable, range(len(net.nodes)))))
        """The Scale layers that become parts of BatchNorm layers."""
        self.scales = set(map(id, self.merged.values()))

    def input_name(self, top: Blob) -> str:
        """The argument of `forward`."""
        return self.module.variables.new(top.name)

    def add(self, index: int, node: Node, inputs: list[str]) -> None:
        """Add a layer."""
        if id(node.layer) in self.scales:
            self.values[node.tops[0]] = inputs[0]
            return
        code = TorchLayer(
            self.module, node.layer, inputs, node.bottoms, node.tops, self.varying, self.merged.get(node.layer)
        )
        found = TORCH.functions.get(node.layer.type)(code)
        if isinstance(found, str):
            self._assign(index, node, ", ".join(self._variable(index, node, top) for top in node.tops), found)
        elif found is not None:
            for top, value in zip(node.tops, found, strict=True):
                if value in inputs:
                    self.values[top] = value
                else:
                    self._assign(index, node, self._variable(index, node, top), value)

    def _assign(self, index: int, node: Node, variables: str, value: str) -> None:
        if variables == value:
            return
        name = node.layer.name
        known = identifier(name) in variables.split(", ") or "self." in value
        self.module.statements.append((f"{variables} = {value}", "" if known else comment(name)))

    def _variable(self, index: int, node: Node, top: Blob) -> str:
        """The variable of a top: the blob's own, unless another blob in it is still read."""
        wanted = self.values.get(top, "")
        in_use = {
            name for blob, name in self.values.items() if blob is not top and self.last_read.get(blob, -1) > index
        }
        if not wanted or wanted in in_use:
            wanted = self.module.variables.new(top.name)
        self.values[top] = wanted
        return wanted

    def _mergeable(self, index: int) -> tuple[Layer, Layer] | None:
        """The BatchNorm at an index and the Scale behind it, if no other layer reads the blob between them."""
        node = self.net.nodes[index]
        layer = node.layer
        if not isinstance(layer, BatchNormLayer) or layer.scale_bias or len(node.tops) != 1:
            return None
        readers = [other for other in self.net.nodes[index + 1 :] if node.tops[0] in other.bottoms]
        if not readers or readers[0].layer.type != "Scale" or len(readers[0].bottoms) != 1:
            return None
        scale = readers[0].layer
        in_place = readers[0].tops[0] is node.tops[0]
        if not in_place and (len(readers) > 1 or node.tops[0] in self.net.outputs.values()):
            return None
        fits = scale.blobs[0].shape == (node.bottoms[0].shape[1],) and scale.param.scale_param.axis == 1
        return (layer, scale) if fits else None

    # -- text ------------------------------------------------------------------------------------------

    def text(self) -> str:
        """The whole file."""
        outputs = {name: self.values[blob] for name, blob in self.outputs().items()}
        own = self._class_lines(outputs)
        loader = [
            'def load(path=Path(__file__).with_suffix(".safetensors")):',
            '    """Return the net with its weights, for inference."""',
            f"    net = {self.module.class_name}()",
            "    net.load_state_dict(load_file(path))",
            "    return net.eval()",
        ]
        code = "\n".join([*own, *loader])
        classes = _classes_for(code)
        used = names_in("\n".join([*classes, code]))
        head = [
            f'"""{self.module.class_name}, a Caffe net, as a PyTorch module. Written by caffepy {__version__}."""',
            "",
        ]
        head += ["import math"] * ("math" in used)
        head += ["from pathlib import Path", "", *["import torch"] * ("torch" in used)]
        head += ["from safetensors.torch import load_file"]
        head += [f"from torch import {', '.join(name for name in ('Tensor', 'nn') if name in used)}"]
        head += ["from torch.nn import functional as F"] * ("F" in used)
        return "\n\n\n".join(["\n".join(head), *classes, "\n".join(own), "\n".join(loader)]) + "\n"

    def _class_lines(self, outputs: Mapping[str, str]) -> list[str]:
        module = self.module
        result, kind = next(iter(outputs.values())), "Tensor"
        if len(outputs) > 1:
            result = "{" + ", ".join(f"{literal(name)}: {variable}" for name, variable in outputs.items()) + "}"
            kind = "dict[str, Tensor]"
        lines = [f"class {module.class_name}(nn.Module):", '    """' + self._summary(outputs) + '"""', ""]
        if module.submodules:
            lines += ["    def __init__(self):", "        super().__init__()"]
            for name, constructor, note in module.submodules:
                lines += _wrapped(f"        self.{name} = {constructor}", note)
            lines.append("")
        arguments = ", ".join(f"{name}: Tensor" for name in self.inputs.values())
        lines.append(f"    def forward(self, {arguments}) -> {kind}:")
        for statement, note in module.statements:
            lines += _wrapped(f"        {statement}", note)
        return [*lines, *_wrapped(f"        return {result}")]

    def _summary(self, outputs: Mapping[str, str]) -> str:
        inputs = ", ".join(f"{name} {self._shape(blob)}" for blob, name in self.inputs.items())
        results = ", ".join(f"{comment(name)} {self._shape(self.net.outputs[name])}" for name in outputs)
        return f"{inputs} to {results}."

    def _shape(self, blob: Blob) -> str:
        varies = self.varying.get(blob.name) or [False] * len(blob.shape)
        return f"({', '.join('N' if one else str(size) for size, one in zip(blob.shape, varies, strict=True))})"


def _classes_for(code: str) -> list[str]:
    """The texts of the classes that code uses, directly or through other classes."""
    texts, wanted = class_texts(), names_in(code)
    while not wanted.issuperset(more := {name for own in wanted & set(texts) for name in names_in(texts[own])}):
        wanted |= more
    return [text for name, text in texts.items() if name in wanted]


def _wrapped(line: str, note: str = "") -> list[str]:
    """Return a statement with a comment; the arguments of a long one get lines of their own."""
    if note and len(line) + len(note) + 4 <= WIDTH:
        return [f"{line}  # {note}"]
    indent = " " * (len(line) - len(line.lstrip()))
    notes = [f"{indent}# {note}"] if note else []
    begin = _last_argument_list(line) if len(line) > WIDTH else 0
    if not begin:
        return [*notes, line]
    inner = f"{indent}    "
    lines = [inner]
    for part in _parts(line[begin:-1]):
        if len(lines[-1]) + len(part) > WIDTH and lines[-1] != inner:
            lines.append(inner)
        lines[-1] += part
    return [*notes, line[:begin], *(text.rstrip() for text in lines), f"{indent}{line[-1]}"]


def _last_argument_list(line: str) -> int:
    """Return where the bracket that ends the line begins, behind it; 0 if the line ends otherwise."""
    depth = 0
    for place in range(len(line) - 1, -1, -1):
        depth += (line[place] in ")]}") - (line[place] in "([{")
        if depth == 0:
            return place + 1 if line[place] in "([{" else 0
    return 0


def _parts(arguments: str) -> list[str]:
    """Return pieces of a list of arguments between which a line may end: arguments, and elements of lists in them."""
    pieces, begin, brackets = [], 0, ""
    for place, character in enumerate(arguments):
        if character in "([{":
            brackets += character
        elif character in ")]}":
            brackets = brackets[:-1]
        elif character == " " and "(" not in brackets:
            pieces.append(arguments[begin : place + 1])
            begin = place + 1
    return [*pieces, arguments[begin:]]


EXTRA = "torch"
"""The extra that installs torch."""
LIMIT = 1e-5
"""Tolerance relative to the output's largest absolute value."""


def require_torch(purpose: str) -> None:
    """Check that torch can be imported.

    Raises:
        MissingExtraError: it is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise MissingExtraError("torch", EXTRA, purpose)


def run_exported(path: Path, inputs: Mapping[str, NDArray[Any]], outputs: list[str]) -> dict[str, NDArray[Any]]:
    """Return the outputs of a module that `to_torch` wrote; see `Exported`.

    Raises:
        RunError: PyTorch refuses the module or fails.
    """
    return Exported(path, outputs).run(inputs)


class Exported:
    """A module that `to_torch` wrote, with its weights.

    Args:
        path: the .py file, with the .safetensors file beside it.
        outputs: names in the net's order.

    Raises:
        RunError: PyTorch refuses the module.
    """

    def __init__(self, path: Path, outputs: list[str]) -> None:
        self._torch, self._outputs = importlib.import_module("torch"), outputs
        spec = importlib.util.spec_from_file_location(f"caffepy_exported_{path.stem}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
            self._net = module.load()
        except Exception as error:  # its exceptions have no common base class
            raise _refused(error) from error

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return the outputs for inputs by name, in the order of the module's arguments.

        Raises:
            RunError: PyTorch fails.
        """
        torch = self._torch
        try:
            values = [torch.from_numpy(np.ascontiguousarray(array, np.float32)) for array in inputs.values()]
            with torch.inference_mode():
                found = self._net(*values)
        except Exception as error:
            raise _refused(error) from error
        results = found if isinstance(found, dict) else {self._outputs[0]: found}
        return {name: value.detach().float().numpy() for name, value in results.items()}


def _refused(error: Exception) -> RunError:
    return RunError(f"PyTorch cannot run the module: {one_line(str(error))}")
