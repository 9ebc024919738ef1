"""Scratch buffers of layers. A memory plan may alias them."""

from __future__ import annotations

from caffepy.backend.interface import Backend
from caffepy.backend.types import Array


class ScratchBuffer:
    """A layer's buffer that every pass overwrites before it reads it: masks, saved bottoms, hidden values.

    It is allocated on first use, unless a memory plan binds it to a slice of its arena.

    Args:
        backend: allocates the buffer.
        shape: of the array.
        dtype: of the elements, as `Backend.zeros` takes it.
    """

    def __init__(self, backend: Backend, shape: tuple[int, ...], dtype: str) -> None:
        self.shape = shape
        self.dtype = dtype
        self.allocated: Array | None = None
        """None before the first use."""
        self._backend = backend

    @property
    def array(self) -> Array:
        """The buffer's array. Do not keep it beyond the pass: a plan may bind another one."""
        if self.allocated is None:
            self.allocated = self._backend.zeros(self.shape, self.dtype)
        return self.allocated

    def bind(self, array: Array) -> None:
        """Use `array`, memory of another owner, as the buffer."""
        assert tuple(array.shape) == self.shape, (array.shape, self.shape)
        self.allocated = array
