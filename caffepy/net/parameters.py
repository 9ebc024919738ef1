"""Learnable parameters: who owns them, who shares them, and the flat buffers that hold them all.

Owns the memory of parameters, gradients and solver history. Sharing rules: Caffe's `net.cpp` (AppendParam).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from caffepy.backend.elementwise import Each, expression
from caffepy.backend.interface import Backend
from caffepy.backend.layout import address, is_plain
from caffepy.backend.types import Array
from caffepy.blob import Blob, format_shape
from caffepy.errors import ConfigError, OutOfMemoryError
from caffepy.layers.core.base import Layer
from caffepy.proto import caffe_pb2

ALIGNMENT = 64
"""Each parameter starts at a multiple of so many elements: 256 bytes, what vector and tensor units like."""

DEFAULT_BUCKETS = 3
"""Where a net does not say how many (NVIDIA Caffe: 6). An exchange takes processors from the convolutions beside it.

Milliseconds of an iteration on two H200 with 6, 3 and 1 of them, and of one GPU alone: ResNet-50 in FLOAT16, 256
images, 27.1, 26.8, 26.8, and 26.3; in FLOAT 60.1, 60.0, 59.7, and 58.7; CaffeNet in FLOAT16, 256 images, 4.66, 4.67,
5.07, and 4.24; GoogLeNet in FLOAT16, 64 images, 5.28, 5.10, 5.17, and 4.84.
"""


def bucket_count(param: caffe_pb2.NetParameter) -> int:
    """Into how many buckets a net's gradients are cut where several devices exchange them.

    0, as in NVIDIA Caffe's `Net::ReduceAndUpdate`: one for each parameter.

    Raises:
        ConfigError: the number is negative, which NVIDIA Caffe takes for a huge one.
    """
    if param.reduce_buckets < 0:
        raise ConfigError(
            f"the net's reduce_buckets is {param.reduce_buckets}; give the number of parts in which gradients are "
            "exchanged, or 0 for one part for each parameter"
        )
    return param.reduce_buckets if param.HasField("reduce_buckets") else DEFAULT_BUCKETS


@dataclass
class Parameter:
    """One parameter, under its owner; layers that share it do not appear again.

    Args:
        layer: the owner.
        index: which of the owner's blobs it is.
        blob: values and gradient, views of the flat buffers.
        lr_mult: factor of the learning rate.
        decay_mult: factor of the weight decay.
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

    Its values are the owner's, in its own shape, until another net shares its values with this layer. Its gradient
    is always the owner's.

    Args:
        owner: the earlier layer's blob.
        shape: as many elements as the owner has.
        name: for messages.
    """

    def __init__(self, owner: Blob, shape: tuple[int, ...], name: str) -> None:
        self._owner = owner
        super().__init__(owner.backend, shape, name)
        self.follow(owner)

    @property
    def diff(self) -> Array:
        """The owner's derivatives, in this blob's shape."""
        return self.in_own_shape(self._owner.diff)

    @property
    def gradient_owner(self) -> Blob:
        return self._owner

    @property
    def gradient_started(self) -> bool:
        """The owner's: the two have one gradient."""
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
        """Enter a layer's parameters; those that it shares with an earlier layer are replaced by `SharedBlob`s.

        Raises:
            ConfigError: more ParamSpecs than parameters, or sharing between what does not fit.
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
        """Where both say it they must agree; where one says it, it holds for both."""
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
    """The memory of a net's parameters and gradients; where the parameters are is decided here and does not change.

    The parameters of a net that trains are in one flat array, so that an update, a broadcast and a snapshot are one
    call each. Those of a net that only predicts have memory of their own (`unflattened`), so that each can leave the
    device. Gradients are in one flat array in both cases.

    Flat arrays are laid out in the order in which the backward pass finishes the gradients: the last layer's first.
    What the blobs hold when the buffer is made is kept. Parameters that are not learned (lr_mult 0) come behind all
    others: they too are broadcast and saved, but no update touches them. Between the two, the gradients' buffer has
    `FLAGS` elements for flags.

    Args:
        backend: where the memory is.
        parameters: in Caffe's order, the first layer's first.
        unflattened: each parameter keeps memory of its own; `data` cannot be used then.
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
        """`data` in other dtypes, for layers that want them so; see `refresh`."""
        self._single_copies: list[tuple[Blob, str]] = []
        """Parameters with copies of their own; see `refresh_single`."""
        self._left = False
        """Whether parameters have left the device once."""
        self._filled = False
        self._data: Array | None = None
        self._borrowed: list[Parameter] = []
        """Those in the memory of another net."""
        self._before: dict[Blob, Array] = {}
        """Their values before a change, of those whose memory an earlier parameter has too: changes add up."""
        self._staging: Array | None = None
        """All parameters, flat, where some are in the memory of another net."""
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
        """All parameters, flat, with their first values; not where they are unflattened.

        Where some are in the memory of another net it is a copy: call `written` after changes. The memory that these
        had before may be another net's by now, so that it is left alone.
        """
        assert self._data is not None, "each parameter has memory of its own"
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
        """Copy `data` to where the parameters are, if it is a copy of them."""
        if self._staging is None:
            return
        for parameter in sorted(self.parameters, key=lambda parameter: parameter.blob in self._before):
            after, memory = self.view(self._staging, parameter), parameter.blob.data
            if parameter.blob in self._before:
                self.backend.apply(add_change, (memory, after, self._before[parameter.blob]), (memory,))
            else:
                self.backend.copy(after, memory)

    def note_borrowed(self) -> None:
        """Note which parameters are in the memory of another net by now; see `Blob.share_data`."""
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
        """Whether each parameter has memory of its own."""
        return self._data is None

    def offloadable(self, blobs: Iterable[Blob]) -> list[Blob]:
        """Which of some parameters, which passes do not read, may leave the device after the next folding.

        The first time all; later those that are still offloaded: a parameter that came back to the device is in use.
        """
        first, self._left = not self._left, True
        return [blob for blob in blobs if self.unflattened and (first or blob.is_offloaded)]

    def _lay_out(self) -> int:
        order = _backward_order(self.parameters)
        self.learned = _assign_offsets([p for p in order if p.lr_mult != 0], 0)
        return _assign_offsets([p for p in order if p.lr_mult == 0], self.learned + self.FLAGS)

    def blocks(self, flat: Array) -> Array:
        """The learned part of a flat array as (blocks, ALIGNMENT): a block belongs to one parameter."""
        return flat[: self.learned].reshape(-1, ALIGNMENT)

    @staticmethod
    def block_range(parameter: Parameter) -> slice:
        """The blocks of a learned parameter."""
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
        """Copy some parameters, each with its dtype, to copies of their own, allocated on first use.

        For nets that read few of their parameters in another dtype. Graphs may have these copies' addresses, so that
        `refresh` keeps them. Parameters that have copies by then keep those.
        """
        for blob, dtype in wanted:
            if dtype not in blob.copies:
                blob.copies[dtype] = self.backend.zeros(blob.shape, dtype)
                self._single_copies.append((blob, dtype))
        self.refresh(self.copies)

    @property
    def diff(self) -> Array:
        """Flat gradients and the flags; allocated on first use, since testing needs none."""
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
        self._diff = memory  # last: another thread that sees it uses the blobs' views
        return memory

    @property
    def gradients(self) -> Array:
        """The learned parameters' part of `diff`."""
        return self.diff[: self.learned]

    @property
    def flags(self) -> Array:
        """All-reduced behind the gradients: [0] stop requests, [1] snapshot requests."""
        return self.diff[self.learned : self.learned + self.FLAGS]

    @property
    def reduced(self) -> Array:
        """The range that devices all-reduce: gradients and flags."""
        return self.diff[: self.learned + self.FLAGS]

    def slices(self, blobs: Iterable[Blob]) -> list[slice]:
        """The ranges of parameters in a flat array; adjacent ones are merged."""
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
        """Zeros laid out as the parameters are."""
        return self.backend.zeros((self.size,))

    def view(self, flat: Array, parameter: Parameter) -> Array:
        """The part of a flat array that belongs to a parameter, in the parameter's shape."""
        return self.backend.view(flat[parameter.start : parameter.stop], parameter.blob.shape)


def _assign_offsets(parameters: list[Parameter], start: int) -> int:
    """Set each parameter's range from `start` on; returns the next free offset."""
    for parameter in parameters:
        parameter.start, parameter.stop = start, start + parameter.blob.count
        start = -(-parameter.stop // ALIGNMENT) * ALIGNMENT
    return start


def _backward_order(parameters: list[Parameter]) -> list[Parameter]:
    """The last layer's parameters first, those of one layer in their own order."""
    layers: dict[Layer, list[Parameter]] = {}
    for parameter in parameters:
        layers.setdefault(parameter.layer, []).append(parameter)
    return [parameter for layer in reversed(layers.values()) for parameter in layer]
