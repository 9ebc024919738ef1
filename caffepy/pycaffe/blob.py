"""`caffe.Blob`: a blob's data and diff as NumPy arrays, on any device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.backend import Array
from caffepy.layers import blob as core
from caffepy.pycaffe.device import Device, mode
from caffepy.pycaffe.errors import whole_number


def _nothing(*_: object) -> None:
    return None


def _same(array: Array) -> Array:
    return array


@dataclass(frozen=True)
class BlobHooks:
    """Hooks with which a net observes its blobs. The defaults do nothing.

    Args:
        before_data: called before the program gets the data.
        before_diff: called before the diff is used; lets a net allocate its parameters' diffs in one buffer.
        before_shape: called before the program gets the shape.
        before_all: called before the program gets caffepy's own blob or changes the shape.
        given: called with each data array that the program gets.
        reshaped: called after the program has changed the shape.
        original: returns the array whose numbers the program gets in place of an array of data.
        given_original: called in place of `given` with an array of such numbers.
    """

    before_data: Callable[[], object] = _nothing
    before_diff: Callable[[], object] = _nothing
    before_shape: Callable[[], object] = _nothing
    before_all: Callable[[], object] = _nothing
    given: Callable[[NDArray[np.float32]], object] = _nothing
    reshaped: Callable[[], object] = _nothing
    original: Callable[[Array], Array] = _same
    given_original: Callable[[NDArray[np.float32]], object] = _nothing


_NO_HOOKS = BlobHooks()


class Blob(core.FourAxes):
    """A blob of a net.

    `data` and `diff` are C-contiguous float32 arrays. Writes to them reach the net before it computes, and a kept array
    shows the net's new values after each call. They stay valid after the net is deleted.

    Args:
        blob: caffepy's blob.
        device: the blob's device.
        hooks: the net's hooks.
    """

    def __init__(self, blob: core.Blob, device: Device, hooks: BlobHooks = _NO_HOOKS) -> None:
        self._blob = blob
        self._device = device
        self._hooks = hooks

    @property
    def blob(self) -> core.Blob:
        """caffepy's blob."""
        self._hooks.before_all()
        return self._blob

    @property
    def data(self) -> NDArray[np.float32]:
        """The data."""
        self._hooks.before_data()
        with self._device.active():
            own = self._blob.data
            shown = self._hooks.original(own)
            array = self._device.arrays.of(shown).reshape(self._blob.shape)
        (self._hooks.given if shown is own else self._hooks.given_original)(array)
        return array

    @property
    def diff(self) -> NDArray[np.float32]:
        """The gradient of the loss with respect to the data."""
        self._hooks.before_shape()
        with self._device.active():
            self._hooks.before_diff()
            return self._device.arrays.of(self._blob.diff)

    @property
    def shape(self) -> tuple[int, ...]:
        self._hooks.before_shape()
        return self._blob.shape

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    def reshape(self, *shape: int) -> None:
        """Change the shape. Elements keep their order as far as the memory reaches.

        Raises:
            ArgumentError: a size is not an integer.
            ShapeError: the shape is invalid for a blob.
        """
        sizes = tuple(whole_number("reshape", size) for size in shape)
        if sizes == self.shape:
            return
        self._hooks.before_all()
        with self._device.computing():
            before = [(part, self._blob.allocated(part)) for part in ("data", "diff")]
            held = [(part, self._blob.backend.to_host(array)) for part, array in before if array is not None]
            self._blob.reshape(sizes)
            for part, numbers in held:
                self._refill(getattr(self.blob, part), numbers.reshape(-1))
        self._hooks.reshaped()

    def _refill(self, array: Array, numbers: NDArray[np.float32]) -> None:
        kept = np.zeros(self.count, np.float32)
        kept[: numbers.size] = numbers[: self.count]
        self._blob.backend.from_host(kept.reshape(self.shape), array)

    def __repr__(self) -> str:
        return f"<caffe.Blob {self._blob.name!r} of shape {self.shape}>"


class BlobVec(list[Blob]):
    """A list of blobs, such as a layer's parameters."""

    def add_blob(self, *shape: int) -> None:
        """Append a blob of zeros on the current device."""
        device = mode.present_device()
        self.append(Blob(core.Blob(device.backend, tuple(int(size) for size in shape)), device))

    def __repr__(self) -> str:
        return f"<caffe.BlobVec {list.__repr__(self)}>"


def unwrap(blobs: Any) -> list[core.Blob]:
    """Return caffepy's blobs of pycaffe's blobs."""
    return [blob.blob for blob in blobs]
