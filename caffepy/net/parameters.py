"""Learnable parameters: ownership, sharing, and the flat buffers.

Owns the memory of parameters and gradients. Sharing rules: Caffe's `net.cpp` (AppendParam).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from caffepy.backend.expression import Each, expression
from caffepy.backend.interface import Backend
from caffepy.backend.types import Array, address, is_plain
from caffepy.errors import ConfigError, OutOfMemoryError
from caffepy.formats.blobs import format_shape
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.blob import Blob
from caffepy.layers.layer import Layer

ALIGNMENT = 64
"""Alignment of each parameter in elements: 256 bytes, for vector and tensor units."""

DEFAULT_BUCKETS = 3
"""The default of `reduce_buckets` (NVIDIA Caffe: 6). An all-reduce takes multiprocessors from concurrent convolutions.

Milliseconds of an iteration on two H200 with 6, 3 and 1 buckets, and on one GPU: ResNet-50 in FLOAT16, 256
images, 27.1, 26.8, 26.8, and 26.3; in FLOAT 60.1, 60.0, 59.7, and 58.7; CaffeNet in FLOAT16, 256 images, 4.66, 4.67,
5.07, and 4.24; GoogLeNet in FLOAT16, 64 images, 5.28, 5.10, 5.17, and 4.84. On two H100, ResNet-50 in FLOAT16: 36.3,
36.2, 35.9, and 35.3.
"""


def bucket_count(param: caffe_pb2.NetParameter) -> int:
    """Return the number of buckets in which several devices all-reduce a net's gradients.

    0 means one bucket per parameter, as in NVIDIA Caffe's `Net::ReduceAndUpdate`.

    Raises:
        ConfigError: the number is negative.
    """
    if param.reduce_buckets < 0:
        raise ConfigError(
            f"the net's reduce_buckets is {param.reduce_buckets}; give the number of parts in which gradients are "
            "exchanged, or 0 for one part for each parameter"
        )
    return param.reduce_buckets if param.HasField("reduce_buckets") else DEFAULT_BUCKETS


@dataclass
class Parameter:
    """One parameter, listed once under its owner even if layers share it.

    Args:
        layer: the owner.
        index: index in the owner's blobs.
        blob: values and gradient, views of the flat buffers.
        lr_mult: multiplier of the learning rate.
        decay_mult: multiplier of the weight decay.
        start: first element in the flat buffers.
        stop: one past the last element.
    """

    layer: Layer
    index: int
    blob: Blob
    lr_mult: float
    decay_mult: float
    start: int = 0
    stop: int = 0


class SharedBlob(Blob):
    """The blob of a layer that shares a parameter of an earlier layer by its name (Caffe's `Net::ShareWeights`).

    It views the owner's values in its own shape, until another net shares its values with this layer. Its gradient is
    always the owner's.

    Args:
        owner: the earlier layer's blob.
        shape: has as many elements as the owner's.
        name: for messages.
    """

    def __init__(self, owner: Blob, shape: tuple[int, ...], name: str) -> None:
        self._owner = owner
        super().__init__(owner.backend, shape, name)
        self.follow(owner)

    @property
    def diff(self) -> Array:
        """The owner's gradient in this blob's shape."""
        return self.in_own_shape(self._owner.diff)

    @property
    def gradient_owner(self) -> Blob:
        return self._owner

    @property
    def gradient_started(self) -> bool:
        """The owner's flag."""
        return self._owner.gradient_started

    @gradient_started.setter
    def gradient_started(self, value: bool) -> None:
        self._owner.gradient_started = value


class ParameterTable:
    """Collects the parameters of a net's layers, in Caffe's order, and resolves sharing by name."""

    def __init__(self) -> None:
        self.parameters: list[Parameter] = []
        self._named: dict[str, Parameter] = {}
        self._written: dict[str, caffe_pb2.ParamSpec] = {}

    def add(self, layer: Layer) -> None:
        """Add a layer's parameters; replace parameters shared with an earlier layer by `SharedBlob`s.

        Raises:
            ConfigError: more ParamSpecs than parameters, or sharing between incompatible parameters.
        """
        if len(layer.param.param) > len(layer.blobs):
            raise layer.error(
                f"too many params: {len(layer.param.param)} are specified, the layer has {len(layer.blobs)} parameters"
            )
        for index in range(len(layer.blobs)):
            given = index < len(layer.param.param)
            spec = layer.param.param[index] if given else caffe_pb2.ParamSpec()
            layer.propagate_to_params[index] = spec.lr_mult != 0
            if spec.name and spec.name in self._named:
                self._share(layer, index, spec)
            else:
                self._own(layer, index, spec)

    def _own(self, layer: Layer, index: int, spec: caffe_pb2.ParamSpec) -> None:
        parameter = Parameter(layer, index, layer.blobs[index], spec.lr_mult, spec.decay_mult)
        self.parameters.append(parameter)
        if spec.name:
            self._named[spec.name] = parameter
            self._written[spec.name] = caffe_pb2.ParamSpec()
            self._written[spec.name].CopyFrom(spec)

    def _share(self, layer: Layer, index: int, spec: caffe_pb2.ParamSpec) -> None:
        owner = self._named[spec.name]
        self._merge_multiplier(layer, spec, owner, "lr_mult")
        self._merge_multiplier(layer, spec, owner, "decay_mult")
        shape = layer.blobs[index].shape
        if shape != owner.blob.shape:
            self._check_permissive(layer, index, spec, owner)
        layer.blobs[index] = SharedBlob(owner.blob, shape, f"{layer.name}[{index}]")

    def _merge_multiplier(self, layer: Layer, spec: caffe_pb2.ParamSpec, owner: Parameter, multiplier: str) -> None:
        """Merge a multiplier: one written value holds for both; two must be equal."""
        if not spec.HasField(multiplier):
            return
        written = self._written[spec.name]
        value = getattr(spec, multiplier)
        if written.HasField(multiplier) and getattr(written, multiplier) != value:
            raise layer.error(
                f"shared param '{spec.name}' has {multiplier} {value:g} here and "
                f"{getattr(written, multiplier):g} in layer '{owner.layer.name}'; write the same, or one of them only"
            )
        setattr(written, multiplier, value)
        setattr(owner, multiplier, value)

    @staticmethod
    def _check_permissive(layer: Layer, index: int, spec: caffe_pb2.ParamSpec, owner: Parameter) -> None:
        shape = layer.blobs[index].shape
        shapes = f"the owner's shape is {format_shape(owner.blob.shape)}, the sharing layer's is {format_shape(shape)}"
        message = f"cannot share param '{spec.name}' owned by layer '{owner.layer.name}'"
        if spec.share_mode != caffe_pb2.ParamSpec.PERMISSIVE:
            raise layer.error(f"{message}; shape mismatch: {shapes} (share_mode: PERMISSIVE compares counts only)")
        if layer.blobs[index].count != owner.blob.count:
            raise layer.error(f"{message}; count mismatch: {shapes}")
        if not (is_plain(shape) and is_plain(owner.blob.shape)):
            raise layer.error(
                f"{message}: {shapes}; sharing across shapes is possible only where memory order is the logical order, "
                "not for convolution weights"
            )


@expression
def add_change(data: Each, after: Each, before: Each) -> Each:
    return data + (after - before)


class ParameterBuffer:
    """The memory of a net's parameters and gradients. The placement of the parameters does not change.

    The parameters of a net that trains are in one flat array, so that an update, a broadcast and a snapshot take one
    call each. Each parameter of an inference net has separate memory (`unflattened`) and can be offloaded. Gradients
    are in one flat array in both cases.

    Flat arrays are laid out in the order in which the backward pass finishes the gradients: the last layer's first.
    The blobs' values are kept. Parameters with lr_mult 0 come last: they are broadcast and saved, but not updated. The
    gradient buffer has `FLAGS` elements for flags between the two parts.

    Args:
        backend: allocates the memory.
        parameters: in Caffe's order, the first layer's first.
        unflattened: each parameter keeps separate memory; `data` is then unavailable.
    """

    FLAGS = 64
    """Elements behind the learned parameters' gradients, all-reduced with them."""

    def __init__(self, backend: Backend, parameters: list[Parameter], unflattened: bool = False) -> None:
        self.backend = backend
        self.parameters = parameters
        self.size = self._lay_out()
        self._lock = threading.Lock()
        self._diff: Array | None = None
        self.copies: dict[str, Array] = {}
        """Copies of `data` in other dtypes; see `refresh`."""
        self._single_copies: list[tuple[Blob, str]] = []
        """Copies of single parameters; see `refresh_single`."""
        self._left = False
        """Whether parameters have been offloaded before."""
        self._filled = False
        self._data: Array | None = None
        self._borrowed: list[Parameter] = []
        """The parameters in the memory of another net."""
        self._before: dict[Blob, Array] = {}
        """Values before a change of parameters whose memory an earlier parameter shares: their changes add up."""
        self._staging: Array | None = None
        """A flat copy of all parameters, if some are in the memory of another net."""
        if not unflattened:
            self._data = self._allocate()
            for parameter in self.parameters:
                parameter.blob.move(self.view(self._data, parameter))

    def _allocate(self) -> Array:
        try:
            return self.backend.zeros((self.size,))
        except OutOfMemoryError as error:
            largest = max(self.parameters, key=lambda parameter: parameter.blob.count)
            raise error.within(
                f"the net's parameters, the largest of which has layer '{largest.layer.name}'"
            ) from error

    @property
    def data(self) -> Array:
        """All parameters, flat and filled. Not available if unflattened.

        A copy if some parameters are in the memory of another net: call `written` after changes. The previous memory of
            these parameters is not written, because another net may use it.
        """
        assert self._data is not None, "each parameter has separate memory"
        if not self._filled:
            for parameter in self.parameters:
                parameter.blob.fill()
            self._filled = True
        if self._staging is None:
            return self._data
        self.backend.copy(self._data, self._staging)
        for parameter in self._borrowed:
            self.backend.copy(parameter.blob.data, self.view(self._staging, parameter))
        for blob, before in self._before.items():
            self.backend.copy(blob.data, before)
        return self._staging

    def written(self) -> None:
        """Copy `data` to the parameters if it is a copy of them."""
        if self._staging is None:
            return
        for parameter in sorted(self.parameters, key=lambda parameter: parameter.blob in self._before):
            after, memory = self.view(self._staging, parameter), parameter.blob.data
            if parameter.blob in self._before:
                self.backend.apply(add_change, (memory, after, self._before[parameter.blob]), (memory,))
            else:
                self.backend.copy(after, memory)

    def note_borrowed(self) -> None:
        """Find the parameters that are now in the memory of another net; see `Blob.share_data`."""
        if self._data is None or not any(parameter.blob.borrowed for parameter in self.parameters):
            return
        own = [p for p in self.parameters if address(p.blob.data) == address(self.view(self._data, p))]
        self._borrowed = [parameter for parameter in self.parameters if parameter not in own]
        self._before = {}
        known = {address(parameter.blob.data) for parameter in own}
        for parameter in self._borrowed:
            memory = address(parameter.blob.data)
            if memory in known:
                self._before[parameter.blob] = self.backend.zeros(parameter.blob.shape)
            known.add(memory)
        self._staging = self.backend.zeros((self.size,)) if self._borrowed else None

    @property
    def borrows(self) -> bool:
        """Whether some parameters are in the memory of another net."""
        return bool(self._borrowed)

    @property
    def unflattened(self) -> bool:
        """Whether each parameter has separate memory."""
        return self._data is None

    def offloadable(self, blobs: Iterable[Blob]) -> list[Blob]:
        """Return the parameters, among some that passes do not read, to offload after the next folding.

        The first time all; later only those still offloaded, because a parameter that returned to the device is in use.
        """
        first, self._left = not self._left, True
        return [blob for blob in blobs if self.unflattened and (first or blob.is_offloaded)]

    def _lay_out(self) -> int:
        order = _backward_order(self.parameters)
        self.learned = _assign_offsets([p for p in order if p.lr_mult != 0], 0)
        return _assign_offsets([p for p in order if p.lr_mult == 0], self.learned + self.FLAGS)

    def blocks(self, flat: Array) -> Array:
        """Return the learned part of a flat array as (blocks, ALIGNMENT); each block belongs to one parameter."""
        return flat[: self.learned].reshape(-1, ALIGNMENT)

    @staticmethod
    def block_range(parameter: Parameter) -> slice:
        """Return the blocks of a learned parameter."""
        return slice(parameter.start // ALIGNMENT, -(-parameter.stop // ALIGNMENT))

    def multipliers(self) -> tuple[Array, Array]:
        """lr_mult and decay_mult of each block, float32 (blocks,)."""
        tables = []
        for multiplier in ("lr_mult", "decay_mult"):
            host = np.zeros(self.learned // ALIGNMENT, np.float32)
            for parameter in self.parameters:
                if parameter.lr_mult != 0:
                    host[self.block_range(parameter)] = getattr(parameter, multiplier)
            tables.append(self.backend.zeros(host.shape))
            self.backend.from_host(host, tables[-1])
        return tables[0], tables[1]

    def refresh(self, dtypes: Iterable[str]) -> None:
        """Copy the parameters to their copies in these dtypes, allocated on first use."""
        for dtype in dtypes:
            if dtype not in self.copies:
                self.copies[dtype] = self.backend.zeros(tuple(self.data.shape), dtype)
                for parameter in self.parameters:
                    parameter.blob.copies.setdefault(dtype, self.view(self.copies[dtype], parameter))
            self.backend.copy(self.data, self.copies[dtype])
        for blob, dtype in self._single_copies:
            self.backend.copy(blob.data, blob.copies[dtype])

    def refresh_single(self, wanted: Iterable[tuple[Blob, str]]) -> None:
        """Copy single parameters to their dtypes; the copies are allocated on first use.

        For nets that read few parameters in another dtype. `refresh` keeps these copies, because graphs may contain
        their addresses. Existing copies are reused.
        """
        for blob, dtype in wanted:
            if dtype not in blob.copies:
                blob.copies[dtype] = self.backend.zeros(blob.shape, dtype)
                self._single_copies.append((blob, dtype))
        self.refresh(self.copies)

    @property
    def diff(self) -> Array:
        """Flat gradients and flags; allocated on first use, because testing needs none."""
        if self._diff is None:
            with self._lock:
                if self._diff is None:
                    self.bind_gradients(self.backend.zeros((self.size,)))
        assert self._diff is not None
        return self._diff

    def bind_gradients(self, memory: Array) -> Array:
        """Use `memory` for the flat gradients and the flags; their values are lost.

        Args:
            memory: float32 zeros, (size,), on the backend's device.
        """
        for parameter in self.parameters:
            parameter.blob.bind(diff=self.view(memory, parameter))
        self._diff = memory  # set last: other threads that see it use the blobs' views
        return memory

    @property
    def gradients(self) -> Array:
        """The learned parameters' part of `diff`."""
        return self.diff[: self.learned]

    @property
    def flags(self) -> Array:
        """Flags all-reduced with the gradients: [0] stop requests, [1] snapshot requests."""
        return self.diff[self.learned : self.learned + self.FLAGS]

    @property
    def reduced(self) -> Array:
        """The all-reduced range: gradients and flags."""
        return self.diff[: self.learned + self.FLAGS]

    def slices(self, blobs: Iterable[Blob]) -> list[slice]:
        """Return the ranges of parameters in a flat array; adjacent ones are merged."""
        wanted = {blob.gradient_owner for blob in blobs}
        chosen = [parameter for parameter in self.parameters if parameter.blob in wanted]
        slices: list[slice] = []
        for one in sorted(chosen, key=lambda parameter: parameter.start):
            if slices and one.start == -(-slices[-1].stop // ALIGNMENT) * ALIGNMENT:
                slices[-1] = slice(slices[-1].start, one.stop)
            else:
                slices.append(slice(one.start, one.stop))
        return slices

    def new_history(self) -> Array:
        """Return zeros in the layout of the parameters."""
        return self.backend.zeros((self.size,))

    def view(self, flat: Array, parameter: Parameter) -> Array:
        """Return the part of a flat array that belongs to a parameter, in the parameter's shape."""
        return self.backend.view(flat[parameter.start : parameter.stop], parameter.blob.shape)


def _assign_offsets(parameters: list[Parameter], start: int) -> int:
    """Set each parameter's range from `start` on; return the next free offset."""
    for parameter in parameters:
        parameter.start, parameter.stop = start, start + parameter.blob.count
        start = -(-parameter.stop // ALIGNMENT) * ALIGNMENT
    return start


def _backward_order(parameters: list[Parameter]) -> list[Parameter]:
    """Return the parameters by layer, the last layer first."""
    layers: dict[Layer, list[Parameter]] = {}
    for parameter in parameters:
        layers.setdefault(parameter.layer, []).append(parameter)
    return [parameter for layer in reversed(layers.values()) for parameter in layer]
