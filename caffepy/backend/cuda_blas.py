"""Matrix products by cuBLAS, called directly.

Owns a handle per backend. CuPy's own wrapper refuses cuBLAS while a stream is captured and resets the handle's
workspace at each call, so these few functions are bound here; their stream, workspace and math mode are set once.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from caffepy.backend.base import Array
from caffepy.backend.cuda_device import EXTRA, PURPOSE, cupy
from caffepy.backend.cuda_memory import Scratch
from caffepy.errors import MissingExtraError, RunError

WORKSPACE = 32 * 2**20
"""Bytes of workspace: what NVIDIA recommends for Hopper and newer."""

DEFAULT_MATH = 0
TF32_MATH = 3
NO_TRANSPOSE, TRANSPOSE = 0, 1


@cache
def _library() -> ctypes.CDLL:
    """The cuBLAS library that CuPy itself uses."""
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib  # type: ignore[import-not-found,unused-ignore]

        return ctypes.CDLL(load_nvidia_dynamic_lib("cublas").abs_path)
    except ImportError:
        name = f"libcublas.so.{cupy.cuda.runtime.runtimeGetVersion() // 1000}"
    except RuntimeError as error:
        raise MissingExtraError("the cuBLAS library", EXTRA, PURPOSE) from error
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise MissingExtraError(f"the cuBLAS library {name}", EXTRA, PURPOSE) from error


def _check(status: int, what: str) -> None:
    if status != 0:
        raise RunError(f"cuBLAS: {what} failed with status {status} on GPU {cupy.cuda.runtime.getDevice()}")


class Blas:
    """cuBLAS on one device and stream.

    Args:
        stream: address of the CUDA stream.
        tf32: whether products may round their factors to TF32.
        scratch: where the workspace comes from.
    """

    def __init__(self, stream: int, tf32: bool, scratch: Scratch) -> None:
        library = _library()
        self._handle = ctypes.c_void_p()
        _check(library.cublasCreate_v2(ctypes.byref(self._handle)), "cublasCreate")
        self._workspace = scratch.get("cuBLAS workspace", WORKSPACE, "uint8")
        _check(library.cublasSetStream_v2(self._handle, ctypes.c_void_p(stream)), "cublasSetStream")
        pointer = ctypes.c_void_p(self._workspace.data.ptr)
        size = ctypes.c_size_t(WORKSPACE)
        _check(library.cublasSetWorkspace_v2(self._handle, pointer, size), "cublasSetWorkspace")
        mode = TF32_MATH if tf32 else DEFAULT_MATH
        _check(library.cublasSetMathMode(self._handle, mode), "cublasSetMathMode")
        self._sgemm = library.cublasSgemm_v2
        self._one = ctypes.byref(ctypes.c_float(1.0))
        self._zero = ctypes.byref(ctypes.c_float(0.0))

    def close(self) -> None:
        """Give the handle back."""
        if self._handle:
            _library().cublasDestroy_v2(self._handle)
            self._handle = ctypes.c_void_p()

    def gemm(self, a: Array, b: Array, out: Array, transpose_a: bool, transpose_b: bool, accumulate: bool) -> None:
        """out (+)= op(a) @ op(b), see `Backend.gemm`."""
        if out.size == 0:
            return
        depth = a.shape[0] if transpose_a else a.shape[1]
        row_major, leading = _storage(out)
        rows, columns = out.shape
        if row_major:  # cuBLAS counts in columns: it computes the transposed product
            a, b, transpose_a, transpose_b = b, a, not transpose_b, not transpose_a
            rows, columns = columns, rows
        operands = [*_operand(a, transpose_a), *_operand(b, transpose_b)]
        beta = self._one if accumulate else self._zero
        self._call(operands, rows, columns, depth, beta, out.data.ptr, leading)

    def _call(
        self, operands: list[int], rows: int, columns: int, depth: int, beta: Any, out: int, leading: int
    ) -> None:
        op_a, a, leading_a, op_b, b, leading_b = operands
        status = self._sgemm(
            self._handle, op_a, op_b, rows, columns, depth, self._one, ctypes.c_void_p(a), leading_a,
            ctypes.c_void_p(b), leading_b, beta, ctypes.c_void_p(out), leading,
        )  # fmt: skip
        _check(status, f"product of {rows} x {depth} and {depth} x {columns}")


def _storage(matrix: Array) -> tuple[bool, int]:
    """Whether a matrix is stored row after row, and the distance of its rows (or columns) in elements."""
    rows, columns = matrix.shape
    item = matrix.itemsize
    if matrix.strides[1] == item or columns == 1:
        return True, max(matrix.strides[0] // item if rows > 1 else columns, columns, 1)
    assert matrix.strides[0] == item or rows == 1, f"gemm: strides {matrix.strides} of shape {matrix.shape}"
    return False, max(matrix.strides[1] // item, rows, 1)


def _operand(matrix: Array, transpose: bool) -> list[int]:
    """cuBLAS's operation, address and leading dimension of op(matrix)."""
    row_major, leading = _storage(matrix)
    operation = TRANSPOSE if row_major != transpose else NO_TRANSPOSE
    return [operation, matrix.data.ptr, leading]
