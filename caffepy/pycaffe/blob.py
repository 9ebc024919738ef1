"""`caffe.Blob`: the numbers of a blob as NumPy arrays, wherever the net computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy import blob as core
from caffepy.backend import Array
from caffepy.pycaffe.core.device import Device
from caffepy.pycaffe.core.errors import whole_number
from caffepy.pycaffe.mode import mode


def _nothing(*_: object) -> None:
    return None


@dataclass(frozen=True)
class Watch:
    """What a net wants to be told of its blobs; each is a function that does nothing by itself.

    Args:
        before_data: called before the program is given the values.
        before_diff: called before the derivatives are used; lets a net allocate those of its parameters together.
        before_shape: called before the program is told the shape.
        before_all: called before the program is given caffepy's own blob, or changes the shape.
        given: called with each array of values that the program is given.
        reshaped: called after the program gave the blob another shape.
    """

    before_data: Callable[[], object] = _nothing
    before_diff: Callable[[], object] = _nothing
    before_shape: Callable[[], object] = _nothing
    before_all: Callable[[], object] = _nothing
    given: Callable[[NDArray[np.float32]], object] = _nothing
    reshaped: Callable[[], object] = _nothing


_UNWATCHED = Watch()


class Blob(core.FourAxes):
    """A blob of a net.

    `data` and `diff` are C-contiguous float32 arrays. What is written into them reaches the net before it computes, and
    an array that is kept shows the net's new numbers after each call. They stay valid when the net is gone.

    Args:
        blob: caffepy's.
        device: where it lives.
        watch: whom to tell.
    """

    def __init__(self, blob: core.Blob, device: Device, watch: Watch = _UNWATCHED) -> None:
        self._blob = blob
        self._device = device
        self._watch = watch

    @property
    def blob(self) -> core.Blob:
        """caffepy's."""
        self._watch.before_all()
        return self._blob

    @property
    def data(self) -> NDArray[np.float32]:
        """The values."""
        self._watch.before_data()
        with self._device.active():
            array = self._device.arrays.of(self._blob.data)
        self._watch.given(array)
        return array

    @property
    def diff(self) -> NDArray[np.float32]:
        """The derivatives of the loss by the values."""
        self._watch.before_shape()
        with self._device.active():
            self._watch.before_diff()
            return self._device.arrays.of(self._blob.diff)

    @property
    def shape(self) -> tuple[int, ...]:
        self._watch.before_shape()
        return self._blob.shape

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    def reshape(self, *shape: int) -> None:
        """Give the blob another shape; its numbers stay in their order, as far as there is memory for them.

        Raises:
            ArgumentError: a size is no whole number.
            ShapeError: no blob can have that shape.
        """
        sizes = tuple(whole_number("reshape", size) for size in shape)
        if sizes == self.shape:
            return
        self._watch.before_all()
        with self._device.computing():
            before = [(part, self._blob.allocated(part)) for part in ("data", "diff")]
            held = [(part, self._blob.backend.to_host(array)) for part, array in before if array is not None]
            self._blob.reshape(sizes)
            for part, numbers in held:
                self._refill(getattr(self.blob, part), numbers.reshape(-1))
        self._watch.reshaped()

    def _refill(self, array: Array, numbers: NDArray[np.float32]) -> None:
        kept = np.zeros(self.count, np.float32)
        kept[: numbers.size] = numbers[: self.count]
        self._blob.backend.from_host(kept.reshape(self.shape), array)

    def __repr__(self) -> str:
        return f"<caffe.Blob {self._blob.name!r} of shape {self.shape}>"


class BlobVec(list[Blob]):
    """A list of blobs, such as a layer's parameters."""

    def add_blob(self, *shape: int) -> None:
        """Append a blob of zeros on the present device."""
        device = mode.present_device()
        self.append(Blob(core.Blob(device.backend, tuple(int(size) for size in shape)), device))

    def __repr__(self) -> str:
        return f"<caffe.BlobVec {list.__repr__(self)}>"


def unwrap(blobs: Any) -> list[core.Blob]:
    """caffepy's blobs of pycaffe's."""
    return [blob.blob for blob in blobs]
