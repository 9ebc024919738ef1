"""Arguments of operations: checks, and copies between a script's arrays and the communicator's."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from caffepy.backend.types import Array
from caffepy.distributed.communicators.collectives import ReduceOp, rows
from caffepy.errors import UserError

DTYPES = ("float16", "float32", "float64", "int32", "int64", "uint8")
"""The dtypes that every communicator can reduce."""

Parts = Array | Sequence[Array]
"""One array per rank: a list, or one array that contains them in rank order."""

Empty = Callable[[tuple[int, ...], Any], Array]
"""Allocates a contiguous array in the communicator's memory."""


def whole_number(value: Any) -> int | None:
    """Return an integer, NumPy's included, as an int; None for any other value."""
    try:
        return operator.index(value)
    except TypeError:
        return None


def on_gpu(array: Any) -> bool:
    """Return whether an array is on a GPU, without importing CuPy."""
    return hasattr(array, "__cuda_array_interface__")


def check_array(array: Any, name: str, memory: str, written: bool) -> None:
    """Reject an array that cannot be sent or received without a copy.

    Args:
        array: the argument.
        name: its name in messages.
        memory: the communicator's memory, ``host`` or ``gpu``.
        written: whether the array receives data.

    Raises:
        UserError: not an array, an unsupported dtype, not contiguous, read-only, or host memory for NCCL.
    """
    if not (isinstance(array, np.ndarray) or on_gpu(array)):
        raise UserError(f"{name} is a {type(array).__name__}: pass a NumPy or CuPy array")
    if str(array.dtype) not in DTYPES:
        raise UserError(f"{name} has dtype {array.dtype}; known: {', '.join(DTYPES)}")
    if not array.flags.c_contiguous:
        raise UserError(f"{name} is not contiguous: pass a copy made by ascontiguousarray")
    if written and isinstance(array, np.ndarray) and not array.flags.writeable:
        raise UserError(f"{name} is read-only; pass a writable array")
    if memory == "gpu" and not on_gpu(array):
        raise UserError(f"{name} is in host memory: backend 'nccl' takes CuPy arrays, 'mpi' and 'tcp' take both")


def check_operator(op: Any, array: Array) -> ReduceOp:
    """Return the operator, checked against the array's dtype.

    Raises:
        UserError: not an operator, or AVG of integers.
    """
    if not isinstance(op, ReduceOp):
        known = ", ".join(known.name for known in ReduceOp)
        raise UserError(f"op is {op!r}; known: {known}, as in caffepy.distributed.ReduceOp.SUM")
    if op is ReduceOp.AVG and array.dtype.kind != "f":
        raise UserError(f"AVG of {array.dtype} would have to be rounded: use SUM and divide")
    return op


class Buffer:
    """An argument for a communicator: one contiguous array in its memory.

    Args:
        data: the communicator's array.
        arrays: the script's arrays, concatenated in `data`; empty if the argument is `data` itself.
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
    """Converts a script's arrays to communicator buffers.

    All methods raise UserError as `check_array` does, and for a wrong number, shape or dtype.

    Args:
        memory: the communicator's memory, ``host`` or ``gpu``; GPU arrays are copied to the host if needed.
        empty: allocates an array in that memory.
        size: the number of ranks.
    """

    def __init__(self, memory: str, empty: Empty, size: int) -> None:
        self._memory = memory
        self._empty = empty
        self._size = size

    def array(self, array: Any, name: str, written: bool = False) -> Buffer:
        """Return the buffer of one array."""
        check_array(array, name, self._memory, written)
        if self._memory == "host" and on_gpu(array):
            return Buffer(np.ascontiguousarray(array.get()), [array])
        return Buffer(array)

    def parts(self, parts: Parts, name: str, like: Array, written: bool = False) -> Buffer:
        """Return the buffer of one array per rank, each with the shape and dtype of `like`.

        Args:
            parts: arrays in a list, or one array (size, *shape) or (size * shape[0], *shape[1:]).
            name: the argument's name in messages.
            like: an array of the required shape and dtype.
            written: whether the arrays receive data; else they are sent.
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
        """Return an array with the shape and dtype of each of `parts`."""
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
            raise UserError(f"{name} has {len(parts)} arrays; give one for each of {self._size} ranks")


def _check_whole(array: Array, name: str, like: Array, count: int) -> None:
    fitting = [(count, *like.shape)]
    if like.ndim:
        fitting.append((count * like.shape[0], *like.shape[1:]))
    if array.shape not in fitting or array.dtype != like.dtype:
        wanted = " or ".join(map(str, dict.fromkeys(fitting)))
        raise UserError(f"{name} is {_form(array)}; it should be {like.dtype} {wanted}, or a list of {count} arrays")


def _form(array: Array) -> str:
    return f"{array.dtype} {array.shape}"
