"""Passes of a TEST net on its folded, planned and captured form, of which a program sees nothing but the time.

The net's own layers run first, and whenever the program could see numbers that the other form does not have. A folded
pass gives the net's own outputs their new numbers. Hidden blobs, which are neither inputs nor outputs, keep old ones
until the program reads them: the net's own layers then run once on the inputs that the folded pass had.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

from caffepy.backend.types import address
from caffepy.errors import RunError, UserError
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.blob import Blob
from caffepy.net import Net
from caffepy.net.executor import ForwardExecutor, ShapeExecutors, Shapes
from caffepy.pycaffe.device import Device, HostArray

logger = logging.getLogger("caffepy.pycaffe")


def can_be_folded(net: Net) -> bool:
    """Whether a pass of the net does nothing but compute outputs from its inputs and parameters."""
    inputs = [net.blobs[name] for name in net.inputs]
    return (
        net.phase == caffe_pb2.TEST
        and not net.debug_info
        and all(node.bottoms or node.layer.type == "Input" for node in net.nodes)
        and not any(top is blob for node in net.nodes if node.bottoms for top in node.tops for blob in inputs)
        and not any(
            node.layer.has_side_effects() or node.layer.state() or node.layer.running_statistics() for node in net.nodes
        )
    )


class InferencePath:
    """Chooses how each whole pass of a net runs, and keeps apart what the program sees from how it was computed.

    Args:
        net: as the prototxt has it.
        device: where it computes.
        executors: of its folded form; None: it never runs so.
    """

    def __init__(self, net: Net, device: Device, executors: ShapeExecutors | None = None) -> None:
        self._net = net
        self._device = device
        self._executors = executors
        self._begun = False
        self._last: ForwardExecutor | None = None
        """What the last pass ran on while the hidden blobs have the numbers of an earlier one."""
        self._own_shapes: Shapes | None = None
        """The inputs' for which the net's own layers were last reshaped."""
        self._reshaped = False
        """Whether the program reshaped the net since the last pass."""
        self._held: list[weakref.ref[Any]] = []
        """The memory of arrays of hidden blobs and parameters that the program was given."""

    @property
    def active(self) -> bool:
        """Whether passes may run on the folded form."""
        return self._executors is not None

    @property
    def folds(self) -> bool:
        """Whether the next pass may run on the folded form, which writes inputs and outputs only."""
        return self.active and self._begun

    @property
    def hidden(self) -> set[Blob]:
        """The blobs that are neither inputs nor outputs."""
        seen = {*map(self._net.blobs.__getitem__, self._net.inputs), *self._net.outputs.values()}
        return {top for node in self._net.nodes for top in node.tops} - seen

    # -- passes --------------------------------------------------------------------------------------

    def forward(self) -> bool:
        """Run a pass on the folded form; False where the net's own layers have to run."""
        if self._executors is None or not self._begun:
            return False
        with self._device.computing():
            if self._net.context.passes.uses_random or self._is_held():  # asked after the upload
                return False
            try:
                self._run(self._executors)
            except (UserError, RunError) as error:  # the net's own layers say it if it is the program's mistake
                logger.info("Net '%s' runs layer by layer: %s", self._net.name, error)
                self.close()
                return False
        return True

    def ran(self) -> None:
        """Take note that the net's own layers have run, all of them."""
        self._begun, self._last = True, None
        self._own_shapes = _input_shapes(self._net)

    def _run(self, executors: ShapeExecutors) -> None:
        net, backend = self._net, self._net.backend
        if self._last is None:
            self._free_hidden()
        inputs = [net.blobs[name] for name in net.inputs]
        executor = executors.executor(_input_shapes(net))
        for blob in inputs:
            backend.copy(blob.data, executor.net.blobs[blob.name].data)
        executor.forward()
        if backend.asynchronous:
            backend.synchronize()
            executor.net.raise_device_errors()
        for name in net.outputs.keys() - net.inputs:
            result = executor.net.blobs[name]
            net.blobs[name].reshape(result.shape)
            backend.copy(result.data, net.blobs[name].data)
        self._last, self._reshaped = executor, False

    def _free_hidden(self) -> None:
        """Give up the memory of hidden blobs, which the folded form does not need; the next own pass reshapes all."""
        visible = [self._net.blobs[name].data for name in {*self._net.inputs, *self._net.outputs}]
        kept = set(map(address, visible))  # an output may be the memory of a hidden blob in another shape
        for blob in self.hidden:
            data = blob.allocated("data")
            if data is not None and address(data) not in kept:
                blob.drop_data()
        for node in self._net.nodes:
            node.shapes = []
            for buffer in node.layer.scratch_buffers.values():
                buffer.allocated = None

    def _is_held(self) -> bool:
        self._held = [each for each in self._held if each() is not None]
        return bool(self._held)

    # -- what the program sees -----------------------------------------------------------------------

    def look_at_values(self) -> None:
        """Called before the program is given the numbers of a hidden blob: it may do so after each pass."""
        if self.active and self._begun:
            self.stop()

    def look_at_parameters(self) -> None:
        """Called before the program is given the numbers of a parameter, which it may change."""
        if self.active:
            with self._device.turn:
                if self._last is not None:
                    self.stop()
                self.parameters_change()

    def look_at_shape(self) -> None:
        """Called before the program is told the shape of a hidden blob."""
        if not self.active:
            return
        with self._device.turn:
            if self._last is None or self._reshaped:
                return
            varying = any(node.layer.changes_shapes for node in self._net.nodes)
            if varying or self._own_shapes != _input_shapes(self._last.net):
                self.catch_up()

    def hold(self, array: HostArray) -> None:
        """Called with each array of a hidden blob or a parameter that the program is given."""
        if self.active:
            with self._device.turn:
                self._held.append(weakref.ref(array.base))

    def parameters_change(self) -> None:
        """Called before parameters get other values."""
        if self.active:
            with self._device.turn:
                self.catch_up()
                if self._executors is not None:
                    self._executors.parameters_changed()

    def reshaped(self) -> None:
        """Called when the net was reshaped."""
        self._reshaped = True

    def stop(self) -> None:
        """Run layer by layer from now on."""
        if self.active:
            with self._device.turn:  # another thread may be in the middle of a pass
                self.catch_up()
                self.close()

    def close(self) -> None:
        """Free the memory of the folded form. Takes no lock: the garbage collector may call it at any moment."""
        if self._executors is not None:
            self._executors.close()
        self._executors = None
        self._held.clear()

    def catch_up(self) -> None:
        """Give all blobs the numbers of the last pass, if that was a folded one."""
        executor, self._last = self._last, None
        if executor is None:
            return
        net = self._net
        with self._device.computing():
            seen = [_KeptBlob(net.blobs[name]) for name in dict.fromkeys([*net.inputs, *net.outputs])]
            try:
                for name in net.inputs:
                    kept, blob = executor.net.blobs[name], net.blobs[name]
                    blob.reshape(kept.shape)
                    net.backend.copy(kept.data, blob.data)
                net.forward()
            finally:
                self._restore(seen)

    def _restore(self, seen: list[_KeptBlob]) -> None:
        self._own_shapes = _input_shapes(self._net)
        if [each for each in seen if each.restore()]:
            for node in self._net.nodes:
                node.shapes = []
        if self._reshaped:
            self._net.reshape()


class _KeptBlob:
    """A blob's array, which the program may hold, and its numbers."""

    def __init__(self, blob: Blob) -> None:
        self._blob, self._shape, self._array = blob, blob.shape, blob.data
        self._numbers = blob.backend.zeros(blob.shape, blob.dtype)
        blob.backend.copy(self._array, self._numbers)

    def restore(self) -> bool:
        """Give the blob its array and numbers back; whether it had got another array."""
        moved = self._blob.shape != self._shape or self._blob.data is not self._array
        if moved:
            self._blob.reshape(self._shape)
            self._blob.bind(data=self._array)
        self._blob.backend.copy(self._numbers, self._array)
        return moved


def _input_shapes(net: Net) -> Shapes:
    return tuple(net.blobs[name].shape for name in net.inputs)
