"""`caffe.Blob`: the numbers of a blob as NumPy arrays, wherever the net computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy import blob as core
from caffepy.backend import Array
from caffepy.pycaffe.core.device import Device
from caffepy.pycaffe.mode import mode


def _nothing() -> None:
    return None


class Blob(core.FourAxes):
    """A blob of a net.

    `data` and `diff` are C-contiguous float32 arrays. What is written into them reaches the net before it computes, and
    an array that is kept shows the net's new numbers after each call. They stay valid when the net is gone.

    Args:
        blob: caffepy's.
        device: where it lives.
        before_diff: called before the derivatives are used; lets a net allocate those of its parameters together.
        reshaped: called after the program gave the blob another shape.
    """

    def __init__(
        self,
        blob: core.Blob,
        device: Device,
        before_diff: Callable[[], object] = _nothing,
        reshaped: Callable[[], None] = _nothing,
    ) -> None:
        self.blob = blob
        self._device = device
        self._before_diff = before_diff
        self._reshaped = reshaped

    @property
    def data(self) -> NDArray[np.float32]:
        """The values."""
        with self._device.active():
            return self._device.arrays.of(self.blob.data)

    @property
    def diff(self) -> NDArray[np.float32]:
        """The derivatives of the loss by the values."""
        with self._device.active():
            self._before_diff()
            return self._device.arrays.of(self.blob.diff)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.blob.shape

    @property
    def count(self) -> int:
        return self.blob.count

    def reshape(self, *shape: int) -> None:
        """Give the blob another shape; its numbers stay in their order, as far as there is memory for them.

        Raises:
            ShapeError: no blob can have that shape.
        """
        if tuple(shape) == self.shape:
            return
        with self._device.computing():
            before = [(part, self.blob.allocated(part)) for part in ("data", "diff")]
            held = [(part, self.blob.backend.to_host(array)) for part, array in before if array is not None]
            self.blob.reshape(tuple(int(size) for size in shape))
            for part, numbers in held:
                self._refill(getattr(self.blob, part), numbers.reshape(-1))
        self._reshaped()

    def _refill(self, array: Array, numbers: NDArray[np.float32]) -> None:
        kept = np.zeros(self.count, np.float32)
        kept[: numbers.size] = numbers[: self.count]
        self.blob.backend.from_host(kept.reshape(self.shape), array)

    def __repr__(self) -> str:
        return f"<caffe.Blob {self.blob.name!r} of shape {self.shape}>"


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
