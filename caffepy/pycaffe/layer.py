"""The layers of a net in pycaffe, and standalone layers (NVIDIA's `create_layer`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf import text_format

from caffepy.formats.proto import caffe_pb2
from caffepy.layers.layer import LAYERS, LayerContext, import_layer_types, layer_class
from caffepy.layers.layer import Layer as CoreLayer
from caffepy.layers.python import PythonLayer
from caffepy.net.graph import Node
from caffepy.pycaffe.blob import Blob, BlobVec, unwrap
from caffepy.pycaffe.device import Device, mode
from caffepy.pycaffe.errors import ArgumentError, as_users_raise


def layer_type_list() -> list[str]:
    """Return all layer types in alphabetical order."""
    import_layer_types()
    return sorted(LAYERS)


class LayerBase:
    """A built-in layer; a Python layer of a net is the user's object instead.

    Args:
        layer: caffepy's layer.
        device: the layer's device.
        blobs: its parameters; None: wrap the layer's parameters.
        before_layer: called before the program gets caffepy's layer, through which it can change any state.
    """

    def __init__(
        self,
        layer: CoreLayer,
        device: Device,
        blobs: BlobVec | None = None,
        before_layer: Callable[[], None] | None = None,
    ) -> None:
        self._layer = layer
        self._device = device
        self._blobs = blobs
        self._before_layer = before_layer

    @property
    def layer(self) -> CoreLayer:
        """caffepy's layer. From then on the net runs layer by layer, because the program can change any state."""
        if self._before_layer is not None:
            self._before_layer()
        return self._layer

    @property
    def type(self) -> str:
        return self._layer.type

    @property
    def blobs(self) -> BlobVec:
        """The parameters."""
        if self._blobs is None or len(self._blobs) != len(self._layer.blobs):
            self._blobs = BlobVec(Blob(blob, self._device) for blob in self._layer.blobs)
        return self._blobs

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        """Read the prototxt and create the parameters."""
        with self._device.computing(), as_users_raise(), self._node(bottom, top).named_errors():
            self._layer.setup(unwrap(bottom), unwrap(top))

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        """Set the tops' shapes from the bottoms' shapes."""
        with self._device.computing(), as_users_raise():
            self._node(bottom, top).reshape()

    def SetUp(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:  # noqa: N802
        """`setup`, the tops' loss weights, and `reshape` (NVIDIA's Caffe)."""
        written = list(self._layer.param.loss_weight)
        default = [float(self._layer.is_loss and index == 0) for index in range(len(top))]
        self._layer.loss_weights = written or default
        self.setup(bottom, top)
        self.reshape(bottom, top)

    def Reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:  # noqa: N802
        """`reshape` (NVIDIA's Caffe)."""
        self.reshape(bottom, top)

    def Forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> float:  # noqa: N802
        """Reshape, compute the tops' data, and return the layer's part of the loss (NVIDIA's Caffe)."""
        self.reshape(bottom, top)
        node = self._node(bottom, top)
        with self._device.computing(), as_users_raise(), node.named_errors():
            self._layer.forward(node.bottoms, node.tops)
            host = self._device.backend.to_host
            weights = zip(node.tops, self._layer.loss_weights, strict=False)
            return sum(weight * float(host(top.data).sum()) for top, weight in weights if weight)

    def Backward(  # noqa: N802
        self, top: Sequence[Blob], propagate_down: Sequence[bool], bottom: Sequence[Blob]
    ) -> None:
        """Compute the selected bottoms' diffs and add to the parameters' diffs (NVIDIA's Caffe)."""
        node = self._node(bottom, top)
        with self._device.computing(), as_users_raise(), node.named_errors():
            for blob in self._layer.blobs:
                blob.gradient_started = True
            self._layer.backward(node.tops, list(propagate_down), node.bottoms)

    def _node(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Node:
        return Node(self._layer, unwrap(bottom), unwrap(top))

    def __repr__(self) -> str:
        return f"<caffe.Layer {self._layer.name!r} of type {self.type}>"


def visible_layer(layer: CoreLayer, device: Device, blobs: BlobVec, before_layer: Callable[[], None]) -> Any:
    """Return the element of `net.layers` for a layer; for a Python layer the user's object, with `blobs` set.

    Other arguments as in `LayerBase`.
    """
    if isinstance(layer, PythonLayer):
        layer.blobs_between_calls = layer.instance.blobs = blobs
        return layer.instance
    return LayerBase(layer, device, blobs, before_layer)


class LayerParameter:
    """A layer's prototxt, for `create_layer` (NVIDIA's Caffe).

    Args:
        param: a LayerParameter message or its text form.

    Raises:
        ArgumentError: `param` is neither.
    """

    def __init__(self, param: Any) -> None:
        self.param = _layer_param(param)

    def from_python(self, param: Any) -> None:
        """Set the parameter from a message or text."""
        self.param = _layer_param(param)

    def to_python(self) -> caffe_pb2.LayerParameter:
        """Return a copy as a message."""
        copy = caffe_pb2.LayerParameter()
        copy.CopyFrom(self.param)
        return copy


def _layer_param(param: Any) -> caffe_pb2.LayerParameter:
    message = caffe_pb2.LayerParameter()
    if isinstance(param, LayerParameter):
        message.CopyFrom(param.param)
    elif hasattr(param, "SerializeToString"):
        message.ParseFromString(param.SerializeToString())
    elif isinstance(param, str):
        try:
            text_format.Parse(param, message)
        except text_format.ParseError as error:
            raise ArgumentError(f"this is not a LayerParameter in text form: {error}") from error
    else:
        raise ArgumentError(f"a LayerParameter or its text is needed, not {type(param).__name__}")
    return message


def create_layer(param: Any) -> LayerBase:
    """Return a standalone layer on the current device (NVIDIA's Caffe); call its SetUp, then Forward and Backward.

    Args:
        param: a LayerParameter as a message or in text form.

    Raises:
        ArgumentError: `param` is neither.
        ConfigError: the layer type is unknown.
    """
    device, message = mode.present_device(), _layer_param(param)
    if not message.HasField("phase"):
        message.phase = caffe_pb2.TRAIN
    context = LayerContext(device.backend, phase=message.phase, seed=mode.next_seed())
    with device.active():
        return LayerBase(layer_class(message.type, f"layer '{message.name}'")(message, context), device)
