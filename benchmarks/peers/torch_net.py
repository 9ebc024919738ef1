"""A described net in PyTorch, layer by layer, as one module whose forward is straight code (torch.fx)."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

import peers.more_layers  # noqa: F401 -- registers them
from peers.layers import MAKERS, Described, prior_boxes


@dataclass(frozen=True)
class Home:
    """Where a parameter of ours lies in the peer's.

    Args:
        tensor: the peer's parameter, or buffer.
        part: which part of it.
        gates: ours has the gates of an LSTM in the order i, f, o, g; theirs i, f, g, o.
        frozen: it is not learned.
    """

    tensor: Any
    part: Any = ...
    gates: bool = False
    frozen: bool = False

    def order(self, value: Any) -> Any:
        """Our numbers in the peer's order and shape."""
        if self.gates:
            i, f, o, g = value.chunk(4)
            value = torch.cat((i, f, g, o))
        return value.reshape(self.tensor[self.part].shape)


class Builder:
    """Builds a net from its description.

    Args:
        description: of `peers.description.describe`.
    """

    def __init__(self, description: dict[str, Any]) -> None:
        self.description = description
        self.root = nn.Module()
        self.graph = fx.Graph()
        self.values: dict[str, Any] = {}
        self.constants: dict[str, Any] = {}
        self.homes: dict[str, Home] = {}
        self.by_key: dict[str, str] = {}
        self.made: list[tuple[list[Any], list[list[int]]]] = []

    def build(self) -> Any:
        """The module: it takes the inputs in order and gives the total loss, or a tuple of the outputs."""
        description = self.description
        for name in description["inputs"]:
            self.values[name] = self.graph.placeholder(name)
        layers = description["layers"]
        for number, layer in enumerate(layers):
            following = layers[number + 1] if number + 1 < len(layers) else None
            if number == 0 or scale_of(layers[number - 1], layer) is None:
                self.add(number, layer, following)
        if description["losses"]:
            terms = [
                self.call(operator.mul, self.values[name], weight) for name, weight in description["losses"].items()
            ]
            total = terms[0]
            for term in terms[1:]:
                total = self.call(operator.add, total, term)
            self.graph.output(total)
        else:
            self.graph.output(tuple(self.value(name) for name in description["outputs"]))
        return fx.GraphModule(self.root, self.graph)

    def call(self, function: Any, *operands: Any) -> Any:
        """A node that calls a function."""
        return self.graph.call_function(function, operands)

    def value(self, blob: str) -> Any:
        """The node of a blob; a constant becomes a buffer."""
        if blob not in self.values:
            name = f"constant{len(self.values)}"
            self.root.register_buffer(name, self.constants[blob])
            self.values[blob] = self.graph.get_attr(name)
        return self.values[blob]

    def add(self, number: int, layer: Described, following: Described | None) -> None:
        """Append a layer, a BatchNorm together with the Scale behind it."""
        bottoms, tops = layer["bottoms"], layer["tops"]
        if layer["type"] == "Silence":
            return
        if layer["type"] == "PriorBox":
            self.constants[tops[0]] = prior_boxes(layer)
            return
        if all(bottom in self.constants for bottom in bottoms):
            result = MAKERS[layer["type"]](layer)(*(self.constants[bottom] for bottom in bottoms))
            self.constants[tops[0]] = result
            return
        if layer["type"] == "Split":
            self.values.update(dict.fromkeys(tops, self.value(bottoms[0])))
            return
        shapes = layer["shapes"]
        if layer["type"] == "BatchNorm":
            scale = scale_of(layer, following)
            name = self.batch_norm(number, layer, scale)
            tops = scale["tops"] if scale else tops
        else:
            name = self.module(number, layer)
        node = self.graph.call_module(name, tuple(self.value(bottom) for bottom in bottoms))
        nodes = [node] if len(tops) == 1 else [self.call(operator.getitem, node, i) for i in range(len(tops))]
        self.values.update(zip(tops, nodes, strict=True))
        self.made.append((nodes, shapes))

    def module(self, number: int, layer: Described) -> str:
        """Name of the layer's module; that of an earlier layer where it has the same parameters."""
        keys = layer["keys"]
        if keys and keys[0] in self.by_key:
            return self.by_key[keys[0]]
        name, module = f"m{number}", MAKERS[layer["type"]](layer)
        self.root.add_module(name, module)
        if keys:
            self.by_key[keys[0]] = name
            for key, home, frozen in zip(keys, self.places(layer, module), layer["frozen"], strict=True):
                self.homes[key] = Home(home.tensor, home.part, home.gates, frozen)
                if frozen:
                    home.tensor.requires_grad_(False)
        return name

    @staticmethod
    def places(layer: Described, module: Any) -> list[Home]:
        """Where each parameter of a layer lies."""
        if layer["type"] != "LSTM":
            inner = module.linear if layer["type"] == "InnerProduct" else module
            return [Home(inner.weight), *([Home(inner.bias)] if getattr(inner, "bias", None) is not None else [])]
        lstm, width = module.lstm, module.width
        parts = [Home(lstm.weight_ih_l0, (slice(None), slice(width)), True), Home(lstm.bias_ih_l0, ..., True)]
        if layer["settings"]["static"]:
            parts.append(Home(lstm.weight_ih_l0, (slice(None), slice(width, None)), True))
        return [*parts, Home(lstm.weight_hh_l0, ..., True)]

    def batch_norm(self, number: int, layer: Described, scale: Described | None) -> str:
        """PyTorch's batch normalisation with gain and shift, where ours has them."""
        s, shape = layer["settings"], layer["bottom_shapes"][0]
        kinds = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
        module = kinds[len(shape)](shape[1], s["eps"], s["momentum"], affine=scale is not None)
        if scale and not scale["settings"]["bias"]:
            module.bias.requires_grad_(False)
        self.root.add_module(f"m{number}", module)
        mean, variance, _ = layer["keys"]
        self.homes |= {mean: Home(module.running_mean, frozen=True), variance: Home(module.running_var, frozen=True)}
        scales = scale["keys"] if scale else []
        self.homes |= dict(zip(scales, (Home(module.weight), Home(module.bias)), strict=False))
        return f"m{number}"


def scale_of(layer: Described, following: Described | None) -> Described | None:
    """The Scale right behind a BatchNorm, with one number of its own for each channel."""
    if layer["type"] != "BatchNorm" or following is None or following["type"] != "Scale":
        return None
    alone = following["bottoms"] == layer["tops"] and len(following["bottoms"]) == 1
    return following if alone and following["parameters"][0] == layer["bottom_shapes"][0][1:2] else None


def learned(description: dict[str, Any]) -> int:
    """Numbers that our net learns."""
    sizes = {}
    for layer in description["layers"]:
        if layer["type"] != "BatchNorm":
            for key, shape, frozen in zip(layer["keys"], layer["parameters"], layer["frozen"], strict=True):
                size = 1
                for length in shape:
                    size *= length
                sizes[key] = 0 if frozen else size
    return sum(sizes.values())


def build(description: dict[str, Any]) -> tuple[Any, dict[str, Home]]:
    """The net, and where our parameters lie in it.

    Raises:
        SystemExit: it has not the parameters or shapes that ours has.
    """
    builder = Builder(description)
    with torch.device("cpu"):
        net = builder.build()
    count = sum(parameter.numel() for parameter in net.parameters() if parameter.requires_grad)
    if count != learned(description):
        raise SystemExit(f"PyTorch's net learns {count:,} numbers, ours {learned(description):,}: not compared")
    net.train(description["train"])  # one image of one pixel is no batch to normalise in training
    check_shapes(builder, net)
    return net, builder.homes


def check_shapes(builder: Builder, net: Any) -> None:
    """Compare the shapes of all blobs, without computing values.

    Raises:
        SystemExit: one differs.
    """
    wanted = {node.name: shape for nodes, shapes in builder.made for node, shape in zip(nodes, shapes, strict=True)}

    class Watcher(fx.Interpreter):
        def run_node(self, node: Any) -> Any:
            result = super().run_node(node)
            if node.name in wanted and list(result.shape) != wanted[node.name]:
                raise SystemExit(f"{node}: PyTorch's has {list(result.shape)}, ours {wanted[node.name]}: not compared")
            return result

    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        made = [
            torch.zeros(shape, dtype=torch.int64 if kind.startswith("ints") else torch.float32)
            for shape, kind in builder.description["inputs"].values()
        ]
        Watcher(net).run(*made)
