"""Scores of classes along any axis as a matrix with a row for each position."""

from __future__ import annotations

from functools import cached_property

from caffepy.backend import Array, Backend


class ClassRows:
    """Arrays of one shape seen as (positions, classes), positions in logical order.

    Args:
        backend: where they live.
        shape: theirs.
        axis: the one of the classes.
    """

    def __init__(self, backend: Backend, shape: tuple[int, ...], axis: int) -> None:
        self._backend = backend
        self._order = (*(a for a in range(len(shape)) if a != axis), axis)
        self._ordered = tuple(shape[a] for a in self._order)
        self.classes = shape[axis]
        self.positions = 1
        for size in self._ordered[:-1]:
            self.positions *= size

    @cached_property
    def rows(self) -> Array:
        """The matrix that `pull` fills and `push` reads."""
        return self._backend.zeros((self.positions, self.classes))

    def pull(self, array: Array) -> Array:
        """The rows of an array; the next pull overwrites them."""
        self._backend.copy(array.transpose(*self._order), self.rows.reshape(self._ordered))
        return self.rows

    def push(self, array: Array) -> None:
        """Copy the rows to an array."""
        self._backend.copy(self.rows.reshape(self._ordered), array.transpose(*self._order))
