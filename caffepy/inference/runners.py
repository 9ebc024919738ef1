"""A net that is only tested, folded, planned and captured for each of the last few shapes of its inputs."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from caffepy.errors import ConfigError, ShapeError
from caffepy.layers.core.base import PassCounter
from caffepy.net import Net
from caffepy.net.forward_runner import ForwardRunner, prepare_inference
from caffepy.proto import caffe_pb2

MAX_SHAPES = 4
"""Shapes of the inputs whose nets, with memory and graphs, are kept at the same time."""

Shapes = tuple[tuple[int, ...], ...]


class ShapeRunners:
    """Runners of nets that use the parameters of `net`.

    Args:
        net: of the TEST phase, with Input layers, as the prototxt has it.
        param: what it was made of, as read.
        state: with which its layers were chosen; None: as `Net` chooses them.
        eager: never capture CUDA graphs.
    """

    def __init__(
        self, net: Net, param: caffe_pb2.NetParameter, state: caffe_pb2.NetState | None = None, eager: bool = False
    ) -> None:
        self._net = net
        self._param = param
        self._state = state
        self._eager = eager
        self._written = {name: net.blobs[name].shape for name in net.inputs}
        self.kept: OrderedDict[Shapes, ForwardRunner] = OrderedDict()
        """By the inputs' shapes, the one used last at the end."""
        self._last: ForwardRunner | None = None

    def runner(self, shapes: Shapes) -> ForwardRunner:
        """The runner for these shapes of the inputs, in the net's order.

        Raises:
            ShapeError: the net has no parameters for them, or layers cannot take them.
        """
        runner = self.kept.get(shapes)
        if runner is None:
            runner = self._make(shapes)
            if len(self.kept) >= MAX_SHAPES:
                self.kept.popitem(last=False)[1].close()
            self.kept[shapes] = runner
        self.kept.move_to_end(shapes)
        if self._last is not runner:
            if self._last is not None:
                _hand_on_states(self._last.net, runner.net)
            self._last = runner
        return runner

    def parameters_changed(self) -> None:
        """Let all runners take the parameters' present values in their next passes."""
        for runner in self.kept.values():
            runner.parameters_changed()

    def close(self) -> None:
        """Free the device's memory. Idempotent."""
        for runner in self.kept.values():
            runner.close()
        self.kept.clear()
        self._last = None

    def _make(self, shapes: Shapes) -> ForwardRunner:
        context = replace(self._net.context, passes=PassCounter(), fills=False)
        param = self._with_shapes(shapes)
        try:
            return prepare_inference(param, context, self._state, shared_with=self._net, eager=self._eager)
        except ConfigError as error:
            given = ", ".join(f"{name} {shape_text(s)}" for name, s in zip(self._written, shapes, strict=True))
            raise ShapeError(f"net '{param.name}' has no parameters for inputs of shape {given}: {error}") from error

    def _with_shapes(self, shapes: Shapes) -> caffe_pb2.NetParameter:
        """The net with other shapes of its inputs; Input layers of other phases and stages are left as they are."""
        wanted = dict(zip(self._written, shapes, strict=True))
        param = caffe_pb2.NetParameter()
        param.CopyFrom(self._param)
        for layer in param.layer:
            if layer.type == "Input" and all(top in wanted for top in layer.top):
                del layer.input_param.shape[:]
                for top in layer.top:
                    layer.input_param.shape.add(dim=wanted[top])
        return param


def _hand_on_states(source: Net, target: Net) -> None:
    """Give a net the states that another one's last pass left to the next pass; 0 where their shapes differ."""
    for old, new in zip(source.state(), target.state(), strict=True):
        if tuple(old.shape) == tuple(new.shape):
            target.backend.copy(old, new)
        else:
            target.backend.fill(new, 0)


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape as messages show it: ``2 x 3 x 6 x 6``."""
    return " x ".join(map(str, shape))
