"""Arrays that are only shapes, and the record of what becomes of the memory that they stand for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from caffepy.backend.types import element_dtype

SETUP = -1
"""The step before a net's first one."""

Box = tuple[tuple[int, int], ...]
"""Part of an array: where it begins and ends along each axis."""


@dataclass(eq=False)
class Memory:
    """One allocation, and what became of it.

    Args:
        shape: what was asked for.
        dtype: of its elements, as `Backend.zeros` was told.
        made: the step in which it was made.
    """

    shape: tuple[int, ...]
    dtype: str
    made: int
    first: int | None = None
    """The first step that uses it."""
    last: int | None = None
    """The last step that uses it."""
    lasting: bool = False
    """Whether it holds something before the first step, or is read where no step has written yet: its owner relies on
    what was there before, be it zeros."""
    _written: list[Box] = field(default_factory=list)
    _complete: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(element_dtype(self.dtype)).itemsize

    @property
    def whole(self) -> Box:
        return tuple((0, size) for size in self.shape)

    def read(self, step: int, part: Box | None) -> None:
        """Note that `part` is read; None: nobody knows which part."""
        self._use(step)
        if not self._complete and part not in self._written:
            self.lasting = True

    def write(self, step: int, part: Box | None) -> None:
        """Note that `part` is overwritten."""
        self._use(step)
        if self.lasting or self._complete or part is None or any(_overlap(part, other) for other in self._written):
            return
        self._written.append(part)
        self._complete = sum(map(_count, self._written)) >= math.prod(self.shape)

    def _use(self, step: int) -> None:
        if step == SETUP:
            self.lasting = True
        self.first = step if self.first is None else self.first
        self.last = step


def _overlap(a: Box, b: Box) -> bool:
    return all(begin < other_end and other < end for (begin, end), (other, other_end) in zip(a, b, strict=True))


def _count(box: Box) -> int:
    return math.prod(end - begin for begin, end in box)


class MetaArray:
    """A shape over an allocation, with what layers ask of an array.

    Args:
        memory: the allocation.
        shape: the logical shape.
        part: which part of the allocation; None: a part that cannot be told.
    """

    def __init__(self, memory: Memory, shape: tuple[int, ...], part: Box | None) -> None:
        self.memory = memory
        self.shape = tuple(int(size) for size in shape)
        self.part = part

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(element_dtype(self.memory.dtype))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    def reshape(self, *shape: Any) -> MetaArray:
        """As NumPy's; always a view."""
        sizes = list(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else list(shape)
        if -1 in sizes:
            sizes[sizes.index(-1)] = self.size // max(-math.prod(sizes), 1)
        assert math.prod(sizes) == self.size, (self.shape, shape)
        return MetaArray(self.memory, tuple(sizes), self.part)

    def transpose(self, *axes: int) -> MetaArray:
        order = axes or tuple(reversed(range(self.ndim)))
        return MetaArray(self.memory, tuple(self.shape[axis] for axis in order), self.part)

    @property
    def T(self) -> MetaArray:
        return self.transpose()

    def __getitem__(self, key: Any) -> MetaArray:
        shape, box = [], []
        keys = key if isinstance(key, tuple) else (key,)
        keys += (slice(None),) * (self.ndim - len(keys))
        for size, one in zip(self.shape, keys, strict=True):
            if isinstance(one, slice):
                begin, end, _ = one.indices(size)
                box.append((begin, max(begin, end)))
                shape.append(box[-1][1] - begin)
            else:
                box.append((one % size, one % size + 1))
        if self.part == self.memory.whole and self.shape == self.memory.shape:
            return MetaArray(self.memory, tuple(shape), tuple(box))
        return MetaArray(self.memory, tuple(shape), self.part if math.prod(shape) == self.size else None)
