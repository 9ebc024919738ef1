"""Matrix products by cuBLAS, called directly, by own kernels where products are tiny, in parts where rows are odd.

Owns a handle per backend. CuPy's own wrapper refuses cuBLAS while a stream is captured and resets the handle's
workspace at each call, so these few functions are bound here; their stream, workspace and math mode are set once.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from typing import Any

from caffepy.backend.cuda.device import EXTRA, PURPOSE, cupy
from caffepy.backend.cuda.gemm.aligned import AlignedProduct, odd_axis
from caffepy.backend.cuda.gemm.small_product import (
    MIN_DEPTH_WITH_FORMULA,
    Epilogue,
    small_product,
    suits_small_product,
)
from caffepy.backend.cuda.memory import Scratch
from caffepy.backend.types import PRODUCT_WORKSPACE, Array
from caffepy.errors import MissingExtraError, RunError

logger = logging.getLogger(__name__)

DEFAULT_MATH = 0
TF32_MATH = 3
WHOLE_SUMS = 16
"""Added to a math mode: sums of half-precision products are never rounded on the way."""

NO_TRANSPOSE, TRANSPOSE = 0, 1
COMPUTE_32F = 68
DEFAULT_ALGORITHM = -1
DATA_TYPES = {"float32": 0, "float16": 2, "uint16": 14}
"""cuBLAS's names of dtypes; uint16 holds bfloat16."""


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
        tf32: whether products of float32 numbers may round them to TF32.
        scratch: where the workspace and aligned copies of factors come from.
    """

    def __init__(self, stream: int, tf32: bool, scratch: Scratch) -> None:
        library = _library()
        self._tf32 = tf32
        self._scratch = scratch
        self._handle = ctypes.c_void_p()
        _check(library.cublasCreate_v2(ctypes.byref(self._handle)), "cublasCreate")
        self._workspace = scratch.get("cuBLAS workspace", PRODUCT_WORKSPACE, "uint8")
        _check(library.cublasSetStream_v2(self._handle, ctypes.c_void_p(stream)), "cublasSetStream")
        pointer = ctypes.c_void_p(self._workspace.data.ptr)
        size = ctypes.c_size_t(PRODUCT_WORKSPACE)
        _check(library.cublasSetWorkspace_v2(self._handle, pointer, size), "cublasSetWorkspace")
        mode = (TF32_MATH if tf32 else DEFAULT_MATH) | WHOLE_SUMS
        _check(library.cublasSetMathMode(self._handle, mode), "cublasSetMathMode")
        self._sgemm = library.cublasSgemm_v2
        self._gemm_ex = library.cublasGemmEx
        self._batch = library.cublasGemmStridedBatchedEx
        self._one = ctypes.byref(ctypes.c_float(1.0))
        self._zero = ctypes.byref(ctypes.c_float(0.0))

    def close(self) -> None:
        if self._handle:
            _library().cublasDestroy_v2(self._handle)
            self._handle = ctypes.c_void_p()

    def gemm(self, a: Array, b: Array, out: Array, transpose_a: bool, transpose_b: bool, accumulate: bool) -> None:
        """out (+)= op(a) @ op(b), see `Backend.gemm`: a and b of one dtype, out of that or float32."""
        assert a.dtype == b.dtype, f"gemm: factors of {a.dtype} and {b.dtype}"
        assert out.dtype in (a.dtype, "float32"), f"gemm: factors of {a.dtype}, result of {out.dtype}"
        if out.size == 0:
            return
        depth = a.shape[0] if transpose_a else a.shape[1]
        if (self._tf32 or a.dtype != "float32") and suits_small_product(out.shape, depth):
            small_product(a.T if transpose_a else a, b.T if transpose_b else b, out, accumulate)
            return
        axis = odd_axis(a.T if transpose_a else a, b.T if transpose_b else b, out)
        if axis is None:
            self.library_gemm(a, b, out, transpose_a, transpose_b, accumulate)
            return
        divided = AlignedProduct(axis, self._plain_gemm, self._scratch)
        divided.run(a.T if transpose_a else a, b.T if transpose_b else b, out, accumulate)

    def _plain_gemm(self, a: Array, b: Array, out: Array, accumulate: bool) -> None:
        self.gemm(a, b, out, False, False, accumulate)

    def gemm_with_epilogue(
        self, a: Array, b: Array, out: Array, transpose_a: bool, transpose_b: bool, epilogue: Epilogue
    ) -> bool:
        """out = the epilogue of op(a) @ op(b) in one launch; False where no kernel does that and nothing was done."""
        depth = a.shape[0] if transpose_a else a.shape[1]
        rounds = self._tf32 or a.dtype != "float32"
        if not (rounds and out.size and suits_small_product(out.shape, depth, MIN_DEPTH_WITH_FORMULA)):
            return False
        assert a.dtype == b.dtype, f"gemm: factors of {a.dtype} and {b.dtype}"
        small_product(a.T if transpose_a else a, b.T if transpose_b else b, out, False, epilogue)
        return True

    def library_gemm(
        self, a: Array, b: Array, out: Array, transpose_a: bool, transpose_b: bool, accumulate: bool
    ) -> None:
        """`gemm` by cuBLAS, whatever the size."""
        depth = a.shape[0] if transpose_a else a.shape[1]
        row_major, leading = _dtype(out)
        rows, columns = out.shape
        if row_major:  # cuBLAS counts in columns: it computes the transposed product
            a, b, transpose_a, transpose_b = b, a, not transpose_b, not transpose_a
            rows, columns = columns, rows
        beta = self._one if accumulate else self._zero
        call = self._single if a.dtype == "float32" else self._half
        status = call(_operand(a, transpose_a), _operand(b, transpose_b), (rows, columns, depth), beta, out, leading)
        _check(status, f"product of {rows} x {depth} and {depth} x {columns}")

    def gemm_of_parts(
        self, a: Array, b: Array, out: Array, transpose_a: bool, transpose_b: bool, accumulate: bool
    ) -> None:
        """out[p] (+)= op(a[p]) @ op(b[p]) for each p of their first axis, one launch; rows of out[p] are contiguous."""
        depth = a.shape[1] if transpose_a else a.shape[2]
        parts, rows, columns = out.shape
        row_major, leading = _dtype(out[0])
        assert row_major and a.dtype == b.dtype, f"products of parts: strides {out.strides}, {a.dtype} and {b.dtype}"
        kind, out_kind = DATA_TYPES[a.dtype.name], DATA_TYPES[out.dtype.name]
        # cuBLAS counts in columns: it computes the transposed products
        first, second = _operand(b[0], not transpose_b), _operand(a[0], not transpose_a)
        steps = [ctypes.c_longlong(array.strides[0] // array.itemsize) for array in (b, a, out)]
        status = self._batch(
            self._handle, first[0], second[0], columns, rows, depth, self._one,
            ctypes.c_void_p(first[1]), kind, first[2], steps[0], ctypes.c_void_p(second[1]), kind, second[2], steps[1],
            self._one if accumulate else self._zero, ctypes.c_void_p(out.data.ptr), out_kind, leading, steps[2],
            parts, COMPUTE_32F, DEFAULT_ALGORITHM,
        )  # fmt: skip
        _check(status, f"{parts} products of {rows} x {depth} and {depth} x {columns}")

    def _single(self, a: Operand, b: Operand, sizes: tuple[int, int, int], beta: Any, out: Array, leading: int) -> Any:
        return self._sgemm(
            self._handle, a[0], b[0], *sizes, self._one, ctypes.c_void_p(a[1]), a[2], ctypes.c_void_p(b[1]), b[2],
            beta, ctypes.c_void_p(out.data.ptr), leading,
        )  # fmt: skip

    def _half(self, a: Operand, b: Operand, sizes: tuple[int, int, int], beta: Any, out: Array, leading: int) -> Any:
        kind, out_kind = DATA_TYPES[a[3]], DATA_TYPES[out.dtype.name]
        return self._gemm_ex(
            self._handle, a[0], b[0], *sizes, self._one, ctypes.c_void_p(a[1]), kind, a[2], ctypes.c_void_p(b[1]),
            kind, b[2], beta, ctypes.c_void_p(out.data.ptr), out_kind, leading, COMPUTE_32F, DEFAULT_ALGORITHM,
        )  # fmt: skip


Operand = tuple[int, int, int, str]
"""cuBLAS's operation on a matrix, its address, leading dimension and dtype."""


def _dtype(matrix: Array) -> tuple[bool, int]:
    """Whether a matrix is stored row after row, and the distance of its rows (or columns) in elements."""
    rows, columns = matrix.shape
    item = matrix.itemsize
    if matrix.strides[1] == item or columns == 1:
        return True, max(matrix.strides[0] // item if rows > 1 else columns, columns, 1)
    assert matrix.strides[0] == item or rows == 1, f"gemm: strides {matrix.strides} of shape {matrix.shape}"
    return False, max(matrix.strides[1] // item, rows, 1)


def _operand(matrix: Array, transpose: bool) -> Operand:
    row_major, leading = _dtype(matrix)
    operation = TRANSPOSE if row_major != transpose else NO_TRANSPOSE
    return operation, matrix.data.ptr, leading, matrix.dtype.name
