"""What a user's Python layer sees of a blob: NumPy arrays on the host, as pycaffe's `Blob` has them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from caffepy.blob import Blob, FourAxes


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
