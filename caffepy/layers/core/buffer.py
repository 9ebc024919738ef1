"""Arrays that a layer needs within one pass and that may share memory with others afterwards."""

from __future__ import annotations

from caffepy.backend.interface import Backend
from caffepy.backend.types import Array


class Temporary:
    """An array of a layer's own that every pass writes whole before it reads it: masks, kept bottoms, hidden values.

    Allocated on first use, as a blob's arrays are; a memory plan may `bind` it before that to memory that others use
    at other times.

    Args:
        backend: where it lives.
        shape: its dimensions.
        dtype: of its elements, as `Backend.zeros` takes it.
    """

    def __init__(self, backend: Backend, shape: tuple[int, ...], dtype: str) -> None:
        self.shape = shape
        self.dtype = dtype
        self.allocated: Array | None = None
        """The array, None where nobody has asked for it yet."""
        self._backend = backend

    @property
    def array(self) -> Array:
        """The elements; ask anew in each pass."""
        if self.allocated is None:
            self.allocated = self._backend.zeros(self.shape, self.dtype)
        return self.allocated

    def bind(self, array: Array) -> None:
        """Let it be memory that somebody else owns."""
        assert tuple(array.shape) == self.shape, (array.shape, self.shape)
        self.allocated = array
