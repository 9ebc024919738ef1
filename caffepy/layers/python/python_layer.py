"""Layers that users write in Python: `python_param { module layer param_str share_in_parallel }`.

The user's class has the methods of pycaffe's `caffe.Layer`: setup, reshape, forward and backward. It sees blobs as
NumPy arrays on the host, as pycaffe's `Blob` has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from caffepy.blob import Blob, FourAxes
from caffepy.layers.core.base import Blobs, Layer, register_layer
from caffepy.layers.python.python_class import PythonObject, find_class, make_object, user_errors
from caffepy.proto import caffe_pb2


class PythonLayerBase:
    """What a user's class may derive from; any class with these methods will do.

    Before each call a layer sets `param_str`, `phase` (0: training, 1: testing), `blobs` (the parameters; `add_blob`
    makes one of a shape), `rank` and `world_size` (the device among those that train together). bottom and top are
    lists of blobs with `data` and `diff`, NumPy arrays that are to be written in place (`top[0].data[...] = …`),
    `shape`, `num`, `channels`, `height`, `width`, `count` and `reshape(*shape)`.
    """

    type: ClassVar[str] = "Python"
    param_str: str
    phase: int
    blobs: ParameterBlobs
    rank: int
    world_size: int

    def setup(self, bottom: Sequence[HostBlob], top: Sequence[HostBlob]) -> None:
        """Read `param_str`, check the blobs, make parameters. Called once."""

    def reshape(self, bottom: Sequence[HostBlob], top: Sequence[HostBlob]) -> None:
        """Give the tops their shapes. Called before every forward pass."""
        raise NotImplementedError

    def forward(self, bottom: Sequence[HostBlob], top: Sequence[HostBlob]) -> None:
        """Write the tops' data."""
        raise NotImplementedError

    def backward(self, top: Sequence[HostBlob], propagate_down: list[bool], bottom: Sequence[HostBlob]) -> None:
        """Write the diffs of the bottoms that `propagate_down` marks, and add to those of the parameters."""
        raise NotImplementedError


@register_layer("Python")
class PythonLayer(Layer):
    """Calls a user's object (Caffe's `python_layer.hpp`).

    Data of bottoms and parameters are fetched from the device when the object reads them; tops' data, and after
    `backward` the diffs of bottoms and parameters, are copied back. What the object writes to a bottom's diff in
    `forward` is still there in `backward`. Every device has an object of its own. With `share_in_parallel` the devices
    of a process that train together take turns with one, whose `setup` each of them calls.
    """

    bottoms = (0, None)
    tops = (0, None)
    changes_shapes: ClassVar[bool] = True
    """Whether each forward pass sets the tops' shapes: `reshape` may look at data."""
    may_keep_shapes = True

    _object: PythonObject
    blobs_between_calls: Any = None
    """What the user's object has as `blobs` while none of its methods runs; None: what the methods have."""

    @property
    def instance(self) -> Any:
        """The user's object."""
        return self._object.instance

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.python_param
        if not param.module or not param.layer:
            raise self.error("python_param needs module and layer")
        found = find_class(param.module, param.layer, self.context.resolve, self.where)
        shared = param.share_in_parallel and self.context.shard.training
        self._object = make_object(found, self._key(found) if shared else None, self.where)
        self._blobs: dict[Blob, HostBlob] = {}
        self._parameters = ParameterBlobs(self._make_parameter)
        self._call("setup", self._hosts(bottom), self._hosts(top))
        for blob in self._parameters:
            blob.put("data")

    def _key(self, found: Any) -> tuple[Any, ...]:
        """The same for this layer of this net on all devices that train together in this process, and for no other."""
        training, number = self.context.shard.training, self.context.net_number
        return (found, training, number, self.random_name, self.param.python_param.param_str, self.backend.holds_values)

    @property
    def _where(self) -> str:
        return f"layer '{self.name}' (Python)"

    def _make_parameter(self, shape: tuple[int, ...]) -> Blob:
        return self.add_parameter(shape, caffe_pb2.FillerParameter(value=0))

    def _hosts(self, blobs: Blobs) -> list[HostBlob]:
        for blob in blobs:
            if blob not in self._blobs:
                self._blobs[blob] = HostBlob(blob)
        return [self._blobs[blob] for blob in blobs]

    def _call(self, method: str, *arguments: Any) -> None:
        """Call a method of the user's object while no other device does."""
        with self._object.lock, user_errors(method, self._object.instance, self.where):
            instance = self._object.instance
            instance.param_str, instance.phase = self.param.python_param.param_str, int(self.context.phase)
            for host, blob in zip(self._parameters, self.blobs, strict=True):
                host.blob = blob  # that of an earlier layer, where the net shares it by name after `setup`
            instance.blobs = self._parameters
            instance.rank, instance.world_size = self.context.shard.rank, self.context.shard.world_size
            try:
                getattr(instance, method)(*arguments)
            finally:
                if self.blobs_between_calls is not None:
                    instance.blobs = self.blobs_between_calls

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        for host in self._hosts(bottom):
            host.expect("data")
        self._call("reshape", self._hosts(bottom), self._hosts(top))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if not self.backend.holds_values:
            self._note([blob.data for blob in bottom], [blob.data for blob in top])
            return
        bottoms, tops = self._hosts(bottom), self._hosts(top)
        for host in tops:
            host.expect(own="data")
        for host in bottoms:
            host.expect("data", own="diff")
        for host in self._parameters:
            host.expect("data", own="diff")
        self._call("reshape", bottoms, tops)
        self._call("forward", bottoms, tops)
        for host in tops:
            host.put("data")

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        wanted = [blob for blob, down in zip(bottom, propagate_down, strict=True) if down]
        if not self.backend.holds_values:
            read = [array for blob in top for array in (blob.data, blob.diff)] + [blob.data for blob in bottom]
            self._note(read, [blob.diff for blob in wanted])
            return
        tops, bottoms = self._hosts(top), self._hosts(bottom)
        for host in tops:
            host.expect("diff")
        for index, host in enumerate(self._parameters):
            if self.accumulate(index):
                host.expect("diff")
            else:
                host.clear("diff")
        self._call("backward", tops, list(propagate_down), bottoms)
        for host in self._hosts(wanted):
            host.put("diff")
        for host, learned in zip(self._parameters, self.propagate_to_params, strict=True):
            if learned:
                host.put("diff")

    def _note(self, read: list[Any], written: list[Any]) -> None:
        """Tell a backend that computes nothing what the object may read and write."""
        for array in read:
            self.backend.to_host(array)
        for array in written:
            self.backend.from_host(None, array)

    def has_side_effects(self) -> bool:
        return True

    def capture_blocker(self) -> str | None:
        return "it runs the user's Python code on the host"


# -- blobs ---------------------------------------------------------------------------------------------


class HostBlob(FourAxes):
    """A blob's values and derivatives as C-contiguous float32 arrays on the host.

    Values are copied from the device when they are first asked for in a pass. The arrays stay the layer's own between
    passes; the layer copies back what the user's method is to have written.

    Args:
        blob: the net's.
    """

    def __init__(self, blob: Blob) -> None:
        self.blob = blob
        self._arrays: dict[str, Any] = {}
        self._current: set[str] = set()
        """The parts that need not be fetched before they are read."""

    @property
    def data(self) -> Any:
        """The values."""
        return self._part("data")

    @property
    def diff(self) -> Any:
        """The derivatives."""
        return self._part("diff")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.blob.shape

    @property
    def count(self) -> int:
        return self.blob.count

    def reshape(self, *shape: int) -> None:
        """Give the blob another shape; without arguments a single number."""
        self.blob.reshape(tuple(shape))

    def _part(self, name: str) -> Any:
        array = self._arrays.get(name)
        if array is None or array.shape != self.blob.shape:
            array = self._arrays[name] = np.zeros(self.blob.shape, np.float32)
        if name not in self._current:
            self._current.add(name)
            blob = self.blob
            array[...] = blob.backend.to_host(blob.data if name == "data" else blob.diff)
        return array

    # -- for the layer -------------------------------------------------------------------------------

    def expect(self, fetched: str = "", own: str = "") -> None:
        """Say what the next method of the user reads: part `fetched` comes from the device, `own` is the host's."""
        self._current.discard(fetched)
        if own:
            self._current.add(own)

    def clear(self, name: str) -> None:
        """Let a part begin at 0."""
        self._current.add(name)
        self._part(name)[...] = 0

    def put(self, name: str) -> None:
        """Copy a part to the device."""
        self._current.add(name)
        blob = self.blob
        blob.backend.from_host(self._part(name), blob.data if name == "data" else blob.diff)


class ParameterBlobs(Sequence[HostBlob]):
    """A user's layer's parameters; `add_blob` makes the next one, as in pycaffe.

    Args:
        make: makes a parameter of a shape, filled with zeros.
    """

    def __init__(self, make: Callable[[tuple[int, ...]], Blob]) -> None:
        self._make = make
        self._blobs: list[HostBlob] = []

    def add_blob(self, *shape: int) -> HostBlob:
        """Make the next parameter, filled with zeros; only in `setup`."""
        assert math.prod(shape) >= 0
        self._blobs.append(HostBlob(self._make(tuple(int(size) for size in shape))))
        return self._blobs[-1]

    def __getitem__(self, index: Any) -> Any:
        return self._blobs[index]

    def __len__(self) -> int:
        return len(self._blobs)

    def __iter__(self) -> Iterator[HostBlob]:
        return iter(self._blobs)
