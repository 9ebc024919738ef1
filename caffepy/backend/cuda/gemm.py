"""Matrix products on the GPU: cuBLAS, an own kernel for small products, and split products for odd sizes.

Owns one cuBLAS handle per backend. CuPy's wrapper refuses cuBLAS during stream capture and resets the handle's
workspace at each call. Therefore this module binds the few functions itself and sets stream, workspace and math mode
once.

Small products are the fully connected layers of small nets. For a deep product cuBLAS splits K over blocks and adds the
partial sums in a second kernel. kernels/small_product.cu splits K over the warps of a block in one kernel, with an
optional elementwise epilogue.

For half-precision products with an odd size cuBLAS has only slow kernels. Such a product is split into a part whose
size is a multiple of eight, over copies with rows aligned to 16 bytes, and the remaining rows, columns or terms. An
example is an output layer over a vocabulary: 8,801 words give rows of 17,602 bytes.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from caffepy.backend.cuda.codegen import formula_of
from caffepy.backend.cuda.compiler import (
    TF32_PRODUCTS,
    aligned,
    c_type,
    compiled,
    defines,
    kernel_text,
    launch_blocks,
    library_kernel,
)
from caffepy.backend.cuda.device import PURPOSE, cupy, has_tensor_cores
from caffepy.backend.cuda.memory import CudaMemory, Scratch, copy
from caffepy.backend.expression import Expression, Kind
from caffepy.backend.interface import DensePrimitives
from caffepy.backend.types import PRODUCT_WORKSPACE, WIDE_LOAD, Array
from caffepy.errors import RunError
from caffepy.utils.installation import MissingExtraError, cuda_extra

logger = logging.getLogger(__name__)


MAX_RESULTS = 2**17
"""Maximum elements of a small product."""

MIN_DEPTH, MAX_DEPTH = 32, 8192
"""Range of K of a small product: below it splitting does not pay, above it one block takes too long."""

MIN_DEPTH_WITH_FORMULA = 16
"""Minimum K of a small product with a formula, which also saves the formula's launch."""

MAX_MULTIPLICATIONS = 2**26

FEW_WARPS, MANY_WARPS = 8, 16
"""Warps per block; each takes 32 of K at a time."""


class Epilogue(NamedTuple):
    """An elementwise epilogue of a product.

    Args:
        formula: `formula_(element, channel, result)` in CUDA C.
        channel: float32, one element per column of the product.
    """

    formula: str
    channel: Array


def suits_small_product(shape: tuple[int, ...], depth: int, min_depth: int = MIN_DEPTH) -> bool:
    """Return whether a product of this shape and K is small and the GPU supports the kernel."""
    results = shape[0] * shape[1]
    if not (results <= MAX_RESULTS and min_depth <= depth <= MAX_DEPTH):
        return False
    return results * depth <= MAX_MULTIPLICATIONS and has_tensor_cores()


def small_product(a: Array, b: Array, out: Array, accumulate: bool, epilogue: Epilogue | None = None) -> None:
    """out (+)= a @ b, or out = epilogue(a @ b), for matrices with a unit stride in one axis."""
    (rows, depth), columns = a.shape, b.shape[1]
    tiles = _tiles(rows, columns)
    a_first, a_pitch = lines(a)
    b_first, b_pitch = lines(b.T)
    # No more warps than there are pieces of 32 along K: the others would add zeros.
    warps = FEW_WARPS if depth <= 32 * FEW_WARPS else MANY_WARPS
    text = defines(
        In=c_type(a),
        Out=c_type(out),
        TILES=tiles,
        WARPS=warps,
        A_DEPTH_FIRST=int(a_first),
        B_DEPTH_FIRST=int(b_first),
        A_VECTORS=int(a_first and _has_aligned_vectors(a, a_pitch, depth)),
        B_VECTORS=int(b_first and _has_aligned_vectors(b, b_pitch, depth)),
    )
    out_row, out_column = (stride // out.itemsize for stride in out.strides)
    grid = (-(-rows // 16), -(-columns // (8 * tiles)))
    arguments = (a, b, out, rows, columns, depth, a_pitch, b_pitch, out_row, out_column, accumulate)
    if epilogue is None:
        launch_blocks(library_kernel("small_product", "product", text, TF32_PRODUCTS), grid, (32 * warps,), arguments)
        return
    assert not accumulate, "a product with an epilogue cannot accumulate"
    assert epilogue.channel.dtype == "float32", f"epilogue's Channel argument: {epilogue.channel.dtype}"
    launch_blocks(_kernel_with_epilogue(text, epilogue.formula), grid, (32 * warps,), (*arguments, epilogue.channel))


def _kernel_with_epilogue(text: str, formula: str) -> Any:
    """Return the kernel with a formula inserted after kernels/common.cu, which it requires."""
    before = "".join(map(kernel_text, ("common", *TF32_PRODUCTS)))
    return compiled(text + defines(FORMULA=1) + before + formula + kernel_text("small_product"), "product")


def _tiles(rows: int, columns: int) -> int:
    """Return the tiles of eight columns per block: few if there would be fewer blocks than multiprocessors."""
    # Wide blocks read a less often; but a product with too few blocks leaves multiprocessors idle.
    for tiles in (4, 2):
        if -(-rows // 16) * -(-columns // (8 * tiles)) >= 96:
            return tiles
    return 2 if columns > 8 else 1


def _has_aligned_vectors(matrix: Array, pitch: int, depth: int) -> bool:
    """Return whether loads of four elements along K are aligned."""
    return pitch % 4 == 0 and depth % 4 == 0 and aligned(matrix)


def lines(matrix: Array) -> tuple[bool, int]:
    """Return whether the last axis of a matrix is contiguous, and its leading dimension in elements."""
    lines, length = matrix.shape
    item = matrix.itemsize
    if matrix.strides[1] == item or length == 1:
        return True, matrix.strides[0] // item if lines > 1 else length
    assert matrix.strides[0] == item or lines == 1, f"gemm: strides {matrix.strides} of shape {matrix.shape}"
    return False, matrix.strides[1] // item


MULTIPLE = 8
"""Required multiple of a row's 16-bit elements."""

MIN_LENGTH = 256
"""Minimum rows, columns and terms for which a copy of a factor costs less than it saves."""

MIN_MULTIPLICATIONS = 2**31
"""Minimum multiplications of a split product: 1/30 ms in the slow kernels of an H200."""

ROWS, DEPTH, COLUMNS = "rows", "depth", "columns"

Gemm = Callable[[Array, Array, Array, bool], None]
"""out (+)= a @ b, with arguments a, b, out, accumulate."""


class AlignedProduct(NamedTuple):
    """A product split because of an odd size.

    Args:
        axis: the axis of odd size.
        gemm: computes the parts.
        scratch: memory of the aligned copies.
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
        whole = _aligned_length(out.shape[1])
        part = out[:, :whole]
        target = self._aligned_buffer(part, "aligned result")
        if accumulate and target is not part:
            copy(part, target)
        self.gemm(a, self._aligned_copy(b[:, :whole], "aligned factor"), target, accumulate)
        if target is not part:
            copy(target, part)
        self.gemm(a, b[:, whole:], out[:, whole:], accumulate)

    def _terms(self, a: Array, b: Array, out: Array, accumulate: bool) -> None:
        """Add the remaining terms in float32, so that a 16-bit result is rounded once."""
        whole, total = _aligned_length(a.shape[1]), out
        if out.dtype != "float32":
            # Halves would be rounded after the first part and again after the rest.
            total = self.scratch.get("sums of two parts", out.size).reshape(out.shape)
            if accumulate:
                copy(out, total)
        first, second = (
            self._aligned_copy(a[:, :whole], "aligned factor"),
            self._aligned_copy(b[:whole], "second aligned factor"),
        )
        self.gemm(first, second, total, accumulate)
        self.gemm(a[:, whole:], b[whole:], total, True)
        if total is not out:
            copy(total, out)

    def _aligned_copy(self, matrix: Array, purpose: str) -> Array:
        """Return the matrix, or a copy with aligned rows."""
        result = self._aligned_buffer(matrix, purpose)
        if result is not matrix:
            copy(matrix, result)
        return result

    def _aligned_buffer(self, matrix: Array, purpose: str) -> Array:
        """Return the matrix if its rows are aligned, else memory of its shape and order with aligned rows."""
        along_rows, pitch = lines(matrix)
        if aligned(matrix, WIDE_LOAD) and pitch * matrix.itemsize % WIDE_LOAD == 0:
            return matrix
        rows, columns = matrix.shape
        flat = self.scratch.get(purpose, matrix.size, matrix.dtype.name)
        return flat.reshape(rows, columns) if along_rows else flat.reshape(columns, rows).T


def _aligned_length(length: int) -> int:
    return length // MULTIPLE * MULTIPLE


def odd_axis(a: Array, b: Array, out: Array) -> str | None:
    """Return the axis of a large product a @ b whose rows are not multiples of 16 bytes; None if none or two are."""
    lengths = {ROWS: out.shape[0], DEPTH: a.shape[1], COLUMNS: out.shape[1]}
    if a.itemsize != 2 or min(lengths.values()) < MIN_LENGTH:
        return None
    if lengths[ROWS] * lengths[DEPTH] * lengths[COLUMNS] < MIN_MULTIPLICATIONS:
        return None
    pairs = ((a, ROWS, DEPTH), (b, DEPTH, COLUMNS), (out, ROWS, COLUMNS))
    contiguous = {last if lines(matrix)[0] else first for matrix, first, last in pairs}
    odd = [axis for axis in contiguous if lengths[axis] % MULTIPLE]
    return odd[0] if len(odd) == 1 else None


DEFAULT_MATH = 0
TF32_MATH = 3
WHOLE_SUMS = 16
"""Math mode flag: do not round half-precision partial sums."""

NO_TRANSPOSE, TRANSPOSE = 0, 1
COMPUTE_32F = 68
DEFAULT_ALGORITHM = -1
DATA_TYPES = {"float32": 0, "float16": 2, "uint16": 14}
"""cuBLAS's type enumeration by dtype; uint16 holds bfloat16."""


@cache
def _library() -> ctypes.CDLL:
    """Load the cuBLAS library that CuPy uses."""
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib  # type: ignore[import-not-found,unused-ignore]

        return ctypes.CDLL(load_nvidia_dynamic_lib("cublas").abs_path)
    except ImportError:
        name = f"libcublas.so.{cupy.cuda.runtime.runtimeGetVersion() // 1000}"
    except RuntimeError as error:
        raise MissingExtraError("the cuBLAS library", cuda_extra(), PURPOSE) from error
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise MissingExtraError(f"the cuBLAS library {name}", cuda_extra(), PURPOSE) from error


def _check(status: int, what: str) -> None:
    if status != 0:
        raise RunError(f"cuBLAS: {what} failed with status {status} on GPU {cupy.cuda.runtime.getDevice()}")


class Blas:
    """cuBLAS on one device and stream.

    Args:
        stream: address of the CUDA stream.
        tf32: whether products of float32 numbers may use TF32.
        scratch: memory of the workspace and of aligned copies of factors.
    """

    def __init__(self, stream: int, tf32: bool, scratch: Scratch) -> None:
        library = _library()
        self._tf32 = tf32
        self._scratch = scratch
        self._handle = ctypes.c_void_p()
        _check(library.cublasCreate_v2(ctypes.byref(self._handle)), "cublasCreate")
        # Given once: cuBLAS's own workspace would be allocated at the first product, perhaps within a capture.
        self._workspace = scratch.get("cuBLAS workspace", PRODUCT_WORKSPACE, "uint8")
        _check(library.cublasSetStream_v2(self._handle, ctypes.c_void_p(stream)), "cublasSetStream")
        pointer = ctypes.c_void_p(self._workspace.data.ptr)
        size = ctypes.c_size_t(PRODUCT_WORKSPACE)
        _check(library.cublasSetWorkspace_v2(self._handle, pointer, size), "cublasSetWorkspace")
        # Without the flag cuBLAS may round partial sums of halves to halves, which loses small gradients.
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
        """out (+)= op(a) @ op(b), see `Backend.gemm`. a and b share a dtype; out has it or is float32."""
        assert a.dtype == b.dtype, f"gemm: factors of {a.dtype} and {b.dtype}"
        assert out.dtype in (a.dtype, "float32"), f"gemm: factors of {a.dtype}, result of {out.dtype}"
        if out.size == 0:
            return
        depth = a.shape[0] if transpose_a else a.shape[1]
        # The kernel rounds factors to TF32, which holds every half exactly; float32 factors only where that is allowed.
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
        """out = epilogue(op(a) @ op(b)) in one launch. Return False, without any work, if no kernel supports it."""
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
        """Compute `gemm` with cuBLAS for any size."""
        depth = a.shape[0] if transpose_a else a.shape[1]
        row_major, leading = _order_and_leading(out)
        rows, columns = out.shape
        if row_major:  # cuBLAS is column-major: compute the transposed product
            a, b, transpose_a, transpose_b = b, a, not transpose_b, not transpose_a
            rows, columns = columns, rows
        beta = self._one if accumulate else self._zero
        call = self._single if a.dtype == "float32" else self._half
        status = call(_operand(a, transpose_a), _operand(b, transpose_b), (rows, columns, depth), beta, out, leading)
        _check(status, f"product of {rows} x {depth} and {depth} x {columns}")

    def gemm_of_parts(
        self, a: Array, b: Array, out: Array, transpose_a: bool, transpose_b: bool, accumulate: bool
    ) -> None:
        """out[p] (+)= op(a[p]) @ op(b[p]) for each p of axis 0, in one launch; rows of out[p] are contiguous."""
        depth = a.shape[1] if transpose_a else a.shape[2]
        parts, rows, columns = out.shape
        row_major, leading = _order_and_leading(out[0])
        assert row_major and a.dtype == b.dtype, f"products of parts: strides {out.strides}, {a.dtype} and {b.dtype}"
        kind, out_kind = DATA_TYPES[a.dtype.name], DATA_TYPES[out.dtype.name]
        # cuBLAS is column-major: compute the transposed products.
        first, second = _operand(b[0], not transpose_b), _operand(a[0], not transpose_a)
        steps = [ctypes.c_longlong(array.strides[0] // array.itemsize) for array in (b, a, out)]
        status = self._batch(
            self._handle,
            first[0],
            second[0],
            columns,
            rows,
            depth,
            self._one,
            ctypes.c_void_p(first[1]),
            kind,
            first[2],
            steps[0],
            ctypes.c_void_p(second[1]),
            kind,
            second[2],
            steps[1],
            self._one if accumulate else self._zero,
            ctypes.c_void_p(out.data.ptr),
            out_kind,
            leading,
            steps[2],
            parts,
            COMPUTE_32F,
            DEFAULT_ALGORITHM,
        )
        _check(status, f"{parts} products of {rows} x {depth} and {depth} x {columns}")

    def _single(self, a: Operand, b: Operand, sizes: tuple[int, int, int], beta: Any, out: Array, leading: int) -> Any:
        return self._sgemm(
            self._handle,
            a[0],
            b[0],
            *sizes,
            self._one,
            ctypes.c_void_p(a[1]),
            a[2],
            ctypes.c_void_p(b[1]),
            b[2],
            beta,
            ctypes.c_void_p(out.data.ptr),
            leading,
        )

    def _half(self, a: Operand, b: Operand, sizes: tuple[int, int, int], beta: Any, out: Array, leading: int) -> Any:
        kind, out_kind = DATA_TYPES[a[3]], DATA_TYPES[out.dtype.name]
        return self._gemm_ex(
            self._handle,
            a[0],
            b[0],
            *sizes,
            self._one,
            ctypes.c_void_p(a[1]),
            kind,
            a[2],
            ctypes.c_void_p(b[1]),
            kind,
            b[2],
            beta,
            ctypes.c_void_p(out.data.ptr),
            out_kind,
            leading,
            COMPUTE_32F,
            DEFAULT_ALGORITHM,
        )


Operand = tuple[int, int, int, str]
"""cuBLAS's operation on a matrix, its address, leading dimension and dtype."""


def _order_and_leading(matrix: Array) -> tuple[bool, int]:
    """Return whether a matrix is row-major, and its leading dimension in elements."""
    rows, columns = matrix.shape
    item = matrix.itemsize
    if matrix.strides[1] == item or columns == 1:
        return True, max(matrix.strides[0] // item if rows > 1 else columns, columns, 1)
    assert matrix.strides[0] == item or rows == 1, f"gemm: strides {matrix.strides} of shape {matrix.shape}"
    return False, max(matrix.strides[1] // item, rows, 1)


def _operand(matrix: Array, transpose: bool) -> Operand:
    row_major, leading = _order_and_leading(matrix)
    operation = TRANSPOSE if row_major != transpose else NO_TRANSPOSE
    return operation, matrix.data.ptr, leading, matrix.dtype.name


class CudaDense(DensePrimitives, CudaMemory):
    """`DensePrimitives` of the GPU."""

    _blas: Blas

    def gemm(
        self,
        a: Array,
        b: Array,
        out: Array,
        transpose_a: bool = False,
        transpose_b: bool = False,
        accumulate: bool = False,
    ) -> None:
        self._blas.gemm(a, b, out, transpose_a, transpose_b, accumulate)

    def gemm_and_apply(
        self,
        expression: Expression,
        a: Array,
        b: Array,
        channel: Array,
        out: Array,
        transpose_a: bool = False,
        transpose_b: bool = False,
    ) -> None:
        epilogue = Epilogue(formula_of(expression, Kind.EACH, Kind.CHANNEL), channel)
        if not self._blas.gemm_with_epilogue(a, b, out, transpose_a, transpose_b, epilogue):
            super().gemm_and_apply(expression, a, b, channel, out, transpose_a, transpose_b)
