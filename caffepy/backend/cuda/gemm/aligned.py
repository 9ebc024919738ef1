"""Half-precision products one of whose lengths is odd, for which cuBLAS has slow kernels alone.

Owns when such a product is divided and into what: a part whose length is a multiple of eight, over copies whose rows
begin at multiples of 16 bytes, and the few rows, columns or terms that are left over. An output layer over a vocabulary
is one: 8,801 words are rows of 17,602 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from caffepy.backend.cuda.compiler import aligned
from caffepy.backend.cuda.copy import copy
from caffepy.backend.cuda.gemm.small_product import lines
from caffepy.backend.cuda.memory import Scratch
from caffepy.backend.layout import WIDE_LOAD
from caffepy.backend.types import Array

MULTIPLE = 8
"""Numbers of 16 bits that a row must hold a multiple of."""

MIN_LENGTH = 256
"""Rows, columns and terms from which a copy of a factor takes less time than the product gains."""

MIN_MULTIPLICATIONS = 2**31
"""Those of a product worth dividing: a thirtieth of a millisecond in the slow kernels of an H200."""

ROWS, DEPTH, COLUMNS = "rows", "depth", "columns"

Gemm = Callable[[Array, Array, Array, bool], None]
"""out (+)= a @ b, given a, b, out and whether it is added."""


class AlignedProduct(NamedTuple):
    """A product that is divided.

    Args:
        axis: the one whose length is odd.
        gemm: computes the parts.
        scratch: where the copies lie.
    """

    axis: str
    gemm: Gemm
    scratch: Scratch

    def run(self, a: Array, b: Array, out: Array, accumulate: bool) -> None:
        """out (+)= a @ b."""
        if self.axis == COLUMNS:
            self._columns(a, b, out, accumulate)
        elif self.axis == ROWS:
            self._columns(b.T, a.T, out.T, accumulate)
        else:
            self._terms(a, b, out, accumulate)

    def _columns(self, a: Array, b: Array, out: Array, accumulate: bool) -> None:
        whole = _whole(out.shape[1])
        part = out[:, :whole]
        target = self._like(part, "aligned result")
        if accumulate and target is not part:
            copy(part, target)
        self.gemm(a, self._copied(b[:, :whole], "aligned factor"), target, accumulate)
        if target is not part:
            copy(target, part)
        self.gemm(a, b[:, whole:], out[:, whole:], accumulate)

    def _terms(self, a: Array, b: Array, out: Array, accumulate: bool) -> None:
        """The last terms are added in float32, so that a result of 16 bits is rounded once."""
        whole, total = _whole(a.shape[1]), out
        if out.dtype != "float32":
            total = self.scratch.get("sums of two parts", out.size).reshape(out.shape)
            if accumulate:
                copy(out, total)
        first, second = self._copied(a[:, :whole], "aligned factor"), self._copied(b[:whole], "second aligned factor")
        self.gemm(first, second, total, accumulate)
        self.gemm(a[:, whole:], b[whole:], total, True)
        if total is not out:
            copy(total, out)

    def _copied(self, matrix: Array, purpose: str) -> Array:
        """The matrix, or a copy of it whose rows are aligned."""
        result = self._like(matrix, purpose)
        if result is not matrix:
            copy(matrix, result)
        return result

    def _like(self, matrix: Array, purpose: str) -> Array:
        """The matrix if its rows are aligned, else memory for one of its shape and order whose rows are."""
        along_rows, pitch = lines(matrix)
        if aligned(matrix, WIDE_LOAD) and pitch * matrix.itemsize % WIDE_LOAD == 0:
            return matrix
        rows, columns = matrix.shape
        flat = self.scratch.get(purpose, matrix.size, matrix.dtype.name)
        return flat.reshape(rows, columns) if along_rows else flat.reshape(columns, rows).T


def _whole(length: int) -> int:
    return length // MULTIPLE * MULTIPLE


def odd_axis(a: Array, b: Array, out: Array) -> str | None:
    """The axis along which rows of a large product a @ b are not multiples of 16 bytes; None if none or two are."""
    lengths = {ROWS: out.shape[0], DEPTH: a.shape[1], COLUMNS: out.shape[1]}
    if a.itemsize != 2 or min(lengths.values()) < MIN_LENGTH:
        return None
    if lengths[ROWS] * lengths[DEPTH] * lengths[COLUMNS] < MIN_MULTIPLICATIONS:
        return None
    pairs = ((a, ROWS, DEPTH), (b, DEPTH, COLUMNS), (out, ROWS, COLUMNS))
    contiguous = {last if lines(matrix)[0] else first for matrix, first, last in pairs}
    odd = [axis for axis in contiguous if lengths[axis] % MULTIPLE]
    return odd[0] if len(odd) == 1 else None
