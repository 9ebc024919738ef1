"""What a net is made of, as pycaffe names it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from caffepy import blob as core
from caffepy.net import Net as CoreNet
from caffepy.net.wiring import Node
from caffepy.pycaffe.blob import Blob, BlobVec, Watch
from caffepy.pycaffe.core.device import Device
from caffepy.pycaffe.core.inference_path import InferencePath
from caffepy.pycaffe.layer import visible_layer


class NetStructure:
    """The part of `Net` that says what is in it: blobs, layers, parameters, by name and by number."""

    device: Device
    _core: CoreNet
    _inference: InferencePath

    @property
    def net(self) -> CoreNet:
        """caffepy's net; it runs layer by layer from then on, so that all its numbers can be seen."""
        self._inference.stop()
        return self._core

    @cached_property
    def _nodes(self) -> list[Node]:
        """The layers of the prototxt with Split layers, without the Cast layers that caffepy puts in."""
        return [node for node in self._core.schedule if node.layer.type != "Cast"]

    def _parameter_blobs(self) -> Iterable[Any]:
        return (blob for layer in self._core.layers for blob in layer.blobs)

    @cached_property
    def blobs(self) -> OrderedDict[str, Blob]:
        """The blobs by name, in the order in which layers make them, those of Split layers included."""
        path, hidden = self._inference, self._inference.hidden
        seen = Watch(reshaped=self._reshape_before_forward)
        unseen = Watch(
            before_data=path.look_at_values, before_shape=path.look_at_shape, before_all=path.stop, given=path.hold,
            reshaped=self._reshape_before_forward,
        )  # fmt: skip
        return OrderedDict(
            (name, Blob(top, self.device, replace(unseen if top in hidden else seen, before_diff=self._diff_use(top))))
            for name, top in self._tops.items()
        )

    def _diff_use(self, top: core.Blob) -> Callable[[], None]:
        """What is called before the program uses the diff of a top: it may write that of a loss, as in Caffe."""
        return partial(self._core.let_program_write_diff, top)

    @cached_property
    def _tops(self) -> OrderedDict[str, core.Blob]:
        found: OrderedDict[str, core.Blob] = OrderedDict()
        for node in self._nodes:
            for top in node.tops:
                if not any(top is bottom for bottom in node.bottoms):
                    found[top.name] = top
        return found

    @cached_property
    def layers(self) -> list[Any]:
        """The layers; of a Python layer the user's object."""
        stop = self._inference.stop
        return [visible_layer(node.layer, self.device, self._blobs_of(node), stop) for node in self._nodes]

    def _blobs_of(self, node: Node) -> BlobVec:
        path = self._inference
        watch = Watch(path.look_at_parameters, self._bind_diffs, before_all=path.stop, given=path.hold)
        return BlobVec(Blob(blob, self.device, watch) for blob in node.layer.blobs)

    def _bind_diffs(self) -> None:
        _ = self._core.parameters.diff

    def _reshape_before_forward(self) -> None:
        for node in self._core.schedule:
            node.shapes = []

    @cached_property
    def params(self) -> OrderedDict[str, BlobVec]:
        """The parameters of each layer that has some, by its name."""
        pairs = zip(self._layer_names, self.layers, strict=True)
        return OrderedDict((name, layer.blobs) for name, layer in pairs if len(layer.blobs))

    @cached_property
    def layer_dict(self) -> OrderedDict[str, Any]:
        """The layers by name."""
        return OrderedDict(zip(self._layer_names, self.layers, strict=True))

    @cached_property
    def blob_loss_weights(self) -> OrderedDict[str, float]:
        """Each blob's weight in the loss, by name."""
        return OrderedDict((name, self._core.loss_weight(top)) for name, top in self._tops.items())

    @cached_property
    def inputs(self) -> list[str]:
        """The blobs that the program fills: tops of Input layers."""
        return list(self._core.inputs)

    @cached_property
    def outputs(self) -> list[str]:
        """The blobs that no layer reads."""
        return list(self._core.outputs)

    @cached_property
    def top_names(self) -> OrderedDict[str, list[str]]:
        """The tops of each layer, by its name."""
        return OrderedDict((node.layer.name, [top.name for top in node.tops]) for node in self._nodes)

    @cached_property
    def bottom_names(self) -> OrderedDict[str, list[str]]:
        """The bottoms of each layer, by its name."""
        return OrderedDict(
            (node.layer.name, list(node.layer.param.bottom[: len(node.bottoms)])) for node in self._nodes
        )

    @property
    def name(self) -> str:
        return self._core.name

    # -- the names that scripts take from the compiled module -------------------------------------------

    @cached_property
    def _layer_names(self) -> list[str]:
        return [node.layer.name for node in self._nodes]

    @property
    def _blob_names(self) -> list[str]:
        return list(self.blobs)

    @property
    def _blobs(self) -> list[Blob]:
        return list(self.blobs.values())

    @property
    def _blob_loss_weights(self) -> list[float]:
        return list(self.blob_loss_weights.values())

    @property
    def _inputs(self) -> list[int]:
        return [self._blob_names.index(name) for name in self.inputs]

    @property
    def _outputs(self) -> list[int]:
        return [self._blob_names.index(name) for name in self.outputs]

    def _top_ids(self, layer: int) -> list[int]:
        return [self._blob_names.index(top.name) for top in self._nodes[layer].tops]

    def _bottom_ids(self, layer: int) -> list[int]:
        node = self._nodes[layer]
        return [self._blob_names.index(name) for name in node.layer.param.bottom[: len(node.bottoms)]]
