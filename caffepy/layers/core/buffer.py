"""Scratch buffers of layers, which a memory plan may let share memory."""

from __future__ import annotations

from caffepy.backend.interface import Backend
from caffepy.backend.types import Array


class ScratchBuffer:
    """A layer's buffer that every pass overwrites before it reads it: masks, saved bottoms, hidden values.

    Allocated on first use, as a blob's arrays are, unless a memory plan has bound it to a slice of its arena.

    Args:
        backend: where it lives.
        shape: its dimensions.
        dtype: of its elements, as `Backend.zeros` takes it.
    """

    def __init__(self, backend: Backend, shape: tuple[int, ...], dtype: str) -> None:
        self.shape = shape
        self.dtype = dtype
        self.allocated: Array | None = None
        """None before the first use."""
        self._backend = backend

    @property
    def array(self) -> Array:
        """The buffer's array; do not keep it beyond the pass, a plan may bind another one."""
        if self.allocated is None:
            self.allocated = self._backend.zeros(self.shape, self.dtype)
        return self.allocated

    def bind(self, array: Array) -> None:
        """Use `array`, which another owner allocated, instead of memory of its own."""
        assert tuple(array.shape) == self.shape, (array.shape, self.shape)
        self.allocated = array
