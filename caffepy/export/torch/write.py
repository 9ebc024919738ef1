"""A net as the text of a PyTorch module, and its parameters.

The prototxt is untrusted: names reach the text only as identifiers, and in comments without special characters.

`run_exported` runs an exported module by PyTorch, for checks.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.errors import ConfigError, RunError, one_line
from caffepy.export.torch import rules
from caffepy.export.torch.code import (
    EXPORTERS,
    FILE_NAMES,
    LayerCode,
    ModuleCode,
    Names,
    Parameters,
    class_texts,
    comment,
    identifier,
    literal,
    names_in,
)
from caffepy.layers import Layer
from caffepy.layers.batch_norm import BatchNormLayer
from caffepy.layers.blob import Blob
from caffepy.layers.export_rules import import_families
from caffepy.net import Net
from caffepy.net.graph import Node
from caffepy.utils.installation import MissingExtraError
from caffepy.version import __version__

_ = rules  # its functions register themselves

WIDTH = 120
"""Longest line."""

Varying = Mapping[str, Sequence[bool]]


def to_torch(net: Net, varying: Varying | None = None) -> tuple[str, Parameters]:
    """Return a net as the text of a Python file, and the state dict of its module in float32.

    The file imports torch and safetensors. It defines one class for the net, classes for layers that PyTorch has no
    module for, and `load()`, which reads the state dict from the .safetensors file beside it.

    Args:
        net: in phase TEST, with its weights, on the CPU.
        varying: of each blob's axes whether their size follows the batch; None: the batch is the net's.

    Raises:
        ConfigError: layers have no PyTorch form, all of which are named, or one of their settings has none.
    """
    import_families(layer.type for layer in net.layers)
    missing = [layer for layer in net.layers if layer.type not in EXPORTERS and layer.type != "Input"]
    if missing:
        named = ", ".join(f"'{layer.name}' ({layer.type})" for layer in missing)
        raise ConfigError(
            f"{len(missing)} of the net's layers have no PyTorch form: {named}; export the net up to them, or to ONNX "
            "(--to onnx); docs/how-to/leave-caffe.md lists the types that have a form"
        )
    writer = _Writer(net, varying or {})
    for index, node in enumerate(net.nodes):
        writer.add(index, node)
    return writer.text(), writer.module.parameters


class _Writer:
    """The module while it grows, layer by layer.

    Args:
        net: the net.
        varying: see `to_torch`.
    """

    def __init__(self, net: Net, varying: Varying) -> None:
        self.net, self.varying = net, varying
        name = identifier(net.name) if net.name else "Net"
        self.module = ModuleCode(Names([*FILE_NAMES, *class_texts()]).new(name[0].upper() + name[1:]))
        self.variables: dict[Blob, str] = {}
        """The variable that holds each blob by now."""
        self.inputs: list[Blob] = []
        self.arguments: list[str] = []
        self.last_read = {bottom: index for index, node in enumerate(net.nodes) for bottom in node.bottoms}
        self.last_read |= dict.fromkeys(net.outputs.values(), len(net.nodes))
        """The last layer that reads each blob."""
        self.merged = dict(filter(None, map(self._mergeable, range(len(net.nodes)))))
        """The Scale layers that become parts of BatchNorm layers."""
        self.scales = set(map(id, self.merged.values()))

    def add(self, index: int, node: Node) -> None:
        """Add a layer."""
        if node.layer.type == "Input":
            for top in node.tops:
                if top in self.last_read:
                    self.variables[top] = self.module.variables.new(top.name)
                    self.arguments.append(self.variables[top])
                    self.inputs.append(top)
            return
        inputs = [self.variables[bottom] for bottom in node.bottoms]
        if id(node.layer) in self.scales:
            self.variables[node.tops[0]] = inputs[0]
            return
        code = LayerCode(
            self.module, node.layer, inputs, node.bottoms, node.tops, self.varying, self.merged.get(node.layer)
        )
        found = EXPORTERS.get(node.layer.type)(code)
        if isinstance(found, str):
            self._assign(index, node, ", ".join(self._variable(index, node, top) for top in node.tops), found)
        elif found is not None:
            for top, value in zip(node.tops, found, strict=True):
                if value in inputs:
                    self.variables[top] = value
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
        wanted = self.variables.get(top, "")
        in_use = {
            name for blob, name in self.variables.items() if blob is not top and self.last_read.get(blob, -1) > index
        }
        if not wanted or wanted in in_use:
            wanted = self.module.variables.new(top.name)
        self.variables[top] = wanted
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
        outputs = {name: self.variables[blob] for name, blob in self.net.outputs.items() if blob in self.variables}
        if not outputs:
            raise ConfigError(f"net '{self.net.name}' has no output: layers read each of its blobs")
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
        arguments = ", ".join(f"{name}: Tensor" for name in self.arguments)
        lines.append(f"    def forward(self, {arguments}) -> {kind}:")
        for statement, note in module.statements:
            lines += _wrapped(f"        {statement}", note)
        return [*lines, *_wrapped(f"        return {result}")]

    def _summary(self, outputs: Mapping[str, str]) -> str:
        inputs = ", ".join(
            f"{name} {self._shape(blob)}" for name, blob in zip(self.arguments, self.inputs, strict=True)
        )
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
    """Return the outputs of a module that `to_torch` wrote.

    Args:
        path: the .py file, with the .safetensors file beside it.
        inputs: by name, in the order of the module's arguments.
        outputs: names in the net's order.

    Raises:
        RunError: PyTorch refuses the module or fails.
    """
    torch = importlib.import_module("torch")
    spec = importlib.util.spec_from_file_location(f"caffepy_exported_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        net = module.load()
        values = [torch.from_numpy(np.ascontiguousarray(array, np.float32)) for array in inputs.values()]
        with torch.inference_mode():
            found = net(*values)
    except Exception as error:  # its exceptions have no common base class
        raise RunError(f"PyTorch cannot run the module: {one_line(str(error))}") from error
    results = found if isinstance(found, dict) else {outputs[0]: found}
    return {name: value.detach().float().numpy() for name, value in results.items()}
