"""Arguments of operations: checks, and copies between a script's arrays and the communicator's."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from caffepy.backend.types import Array
from caffepy.errors import UserError
from caffepy.parallel.communicators.collectives import Operator, rows

DTYPES = ("float16", "float32", "float64", "int32", "int64", "uint8")
"""What every communicator can add up."""

Parts = Array | Sequence[Array]
"""One array for each rank: a list of them, or one array that holds them one after the other."""

Empty = Callable[[tuple[int, ...], Any], Array]
"""Makes a contiguous array where the communicator has its arrays."""


def whole_number(value: Any) -> int | None:
    """A whole number, NumPy's among them, as Python's own; None for anything else."""
    try:
        return operator.index(value)
    except TypeError:
        return None


def on_gpu(array: Any) -> bool:
    """Whether an array lies on a GPU; asked without CuPy."""
    return hasattr(array, "__cuda_array_interface__")


def check_array(array: Any, name: str, memory: str, written: bool) -> None:
    """Refuse an array that cannot be sent or received without a copy.

    Args:
        array: the argument.
        name: what to call it.
        memory: where the communicator's arrays lie, ``host`` or ``gpu``.
        written: it receives something.

    Raises:
        UserError: no array, another dtype, not contiguous, read-only, or host memory where NCCL needs a GPU's.
    """
    if not (isinstance(array, np.ndarray) or on_gpu(array)):
        raise UserError(f"{name} is a {type(array).__name__}: NumPy and CuPy arrays are taken")
    if str(array.dtype) not in DTYPES:
        raise UserError(f"{name} has dtype {array.dtype}; known: {', '.join(DTYPES)}")
    if not array.flags.c_contiguous:
        raise UserError(f"{name} is not contiguous: pass a copy made by ascontiguousarray")
    if written and isinstance(array, np.ndarray) and not array.flags.writeable:
        raise UserError(f"{name} is read-only and is to be written")
    if memory == "gpu" and not on_gpu(array):
        raise UserError(f"{name} lies in host memory: backend 'nccl' takes CuPy arrays, 'mpi' and 'tcp' take both")


def check_operator(operator: Any, array: Array) -> Operator:
    """The operator, if it can be applied to an array of that dtype.

    Raises:
        UserError: no operator, or the mean of integers.
    """
    if not isinstance(operator, Operator):
        known = ", ".join(known.name for known in Operator)
        raise UserError(f"operator is {operator!r}; known: {known}, as in caffepy.distributed.SUM")
    if operator is Operator.AVG and array.dtype.kind != "f":
        raise UserError(f"AVG of {array.dtype} would have to be rounded: use SUM and divide")
    return operator


class Buffer:
    """An argument as a communicator takes it: one contiguous array in its memory.

    Args:
        data: the communicator's array.
        arrays: the script's arrays, which lie in `data` one after the other; empty if they are `data` itself.
    """

    def __init__(self, data: Array, arrays: Sequence[Array] = ()) -> None:
        self.data = data
        self._arrays = arrays

    def unpack(self) -> None:
        """Copy received data to the script's arrays."""
        if not self._arrays:
            return
        for array, piece in zip(self._arrays, rows(self.data, len(self._arrays)), strict=True):
            if on_gpu(array) and not on_gpu(piece):
                array.set(piece.reshape(array.shape))
            else:
                array[...] = piece.reshape(array.shape)


class Arguments:
    """Makes of a script's arrays what a communicator takes.

    All methods raise UserError as `check_array`, and for another number, shape or dtype.

    Args:
        memory: where the communicator's arrays lie, ``host`` or ``gpu``; those of GPUs travel through host memory where
            it knows no other.
        empty: makes one there.
        size: the number of ranks.
    """

    def __init__(self, memory: str, empty: Empty, size: int) -> None:
        self._memory = memory
        self._empty = empty
        self._size = size

    def array(self, array: Any, name: str, written: bool = False) -> Buffer:
        """A single array."""
        check_array(array, name, self._memory, written)
        if self._memory == "host" and on_gpu(array):
            return Buffer(np.ascontiguousarray(array.get()), [array])
        return Buffer(array)

    def parts(self, parts: Parts, name: str, like: Array, written: bool = False) -> Buffer:
        """One array for each rank, each with the shape and dtype of `like`.

        Args:
            parts: arrays in a list, or one array (size, *shape) or (size * shape[0], *shape[1:]).
            name: what to call the argument.
            like: an array as each of them should be.
            written: they receive something; else they are sent.
        """
        if not isinstance(parts, (list, tuple)):
            buffer = self.array(parts, name, written)
            _check_whole(parts, name, like, self._size)
            return buffer
        self._check_count(parts, name)
        for i, part in enumerate(parts):
            check_array(part, f"{name}[{i}]", self._memory, written)
            if part.shape != like.shape or part.dtype != like.dtype:
                raise UserError(f"{name}[{i}] is {_form(part)}; it should be {_form(like)}")
        data = self._empty((self._size, *like.shape), like.dtype)
        if written:
            return Buffer(data, parts)
        for row, part in zip(rows(data, self._size), parts, strict=True):
            row[:] = (part.get() if self._memory == "host" and on_gpu(part) else part).reshape(-1)
        return Buffer(data)

    def first(self, parts: Parts, name: str) -> Array:
        """An array as each of `parts` has to be."""
        if isinstance(parts, (list, tuple)):
            self._check_count(parts, name)
            check_array(parts[0], f"{name}[0]", self._memory, written=False)
            return parts[0]
        whole: Array = parts
        check_array(whole, name, self._memory, written=False)
        if not whole.ndim or whole.shape[0] % self._size:
            raise UserError(f"{name} of shape {whole.shape} cannot be cut into {self._size} equal parts")
        return whole[: whole.shape[0] // self._size]

    def _check_count(self, parts: Sequence[Array], name: str) -> None:
        if len(parts) != self._size:
            raise UserError(f"{name} has {len(parts)} arrays; it takes one for each of {self._size} ranks")


def _check_whole(array: Array, name: str, like: Array, count: int) -> None:
    fitting = [(count, *like.shape)]
    if like.ndim:
        fitting.append((count * like.shape[0], *like.shape[1:]))
    if array.shape not in fitting or array.dtype != like.dtype:
        wanted = " or ".join(map(str, dict.fromkeys(fitting)))
        raise UserError(f"{name} is {_form(array)}; it should be {like.dtype} {wanted}, or a list of {count} arrays")


def _form(array: Array) -> str:
    return f"{array.dtype} {array.shape}"
