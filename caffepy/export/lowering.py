"""The layers of a net by the rules of one format, in the net's order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from caffepy.errors import ConfigError
from caffepy.layers.blob import Blob
from caffepy.layers.export_rules import Rules, import_families
from caffepy.net import Net
from caffepy.net.graph import Node

Varying = Mapping[str, Sequence[bool]]
"""Of each blob's axes whether their size follows the batch."""


class Lowering:
    """What both formats share: which values and inputs there are while layer by layer is added.

    Args:
        net: in phase TEST, with its weights, on a backend that holds values.
        rules: those of the format.
        varying: see `Varying`; None: the batch is the net's.

    Raises:
        ConfigError: layers have no form, all of which are named.
    """

    def __init__(self, net: Net, rules: Rules, varying: Varying | None) -> None:
        import_families(layer.type for layer in net.layers)
        missing = [layer for layer in net.layers if layer.type not in rules.functions and layer.type != "Input"]
        if missing:
            named = ", ".join(f"'{layer.name}' ({layer.type})" for layer in missing)
            raise ConfigError(
                f"{len(missing)} of the net's layers have no {rules.format} form: {named}; {rules.advice}"
            )
        self.net, self.varying = net, varying or {}
        self.values: dict[Blob, str] = {}
        """The value that each blob has by now."""
        self.inputs: dict[Blob, str] = {}
        """Inputs that a layer reads."""

    def add_layers(self) -> None:
        """Add all layers."""
        read = {bottom for node in self.net.nodes for bottom in node.bottoms}
        for index, node in enumerate(self.net.nodes):
            if node.layer.type == "Input":
                for top in node.tops:
                    if top in read:
                        self.values[top] = self.inputs[top] = self.input_name(top)
            else:
                self.add(index, node, [self.values[bottom] for bottom in node.bottoms])

    def outputs(self) -> dict[str, Blob]:
        """The net's outputs that have a value.

        Raises:
            ConfigError: there is none.
        """
        found = {name: blob for name, blob in self.net.outputs.items() if blob in self.values}
        if not found:
            raise ConfigError(f"net '{self.net.name}' has no output: layers read each of its blobs")
        return found

    # Each format has its own:

    def input_name(self, top: Blob) -> str:
        """The value of an input."""
        raise NotImplementedError

    def add(self, index: int, node: Node, inputs: list[str]) -> None:
        """Add a layer, the net's number `index`."""
        raise NotImplementedError
