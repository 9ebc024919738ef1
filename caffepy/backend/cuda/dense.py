"""Matrix products on the GPU: by cuBLAS, by a kernel of our own where products are small, in parts where rows are odd.

Owns a handle per backend. CuPy's own wrapper refuses cuBLAS while a stream is captured and resets the handle's
workspace at each call, so these few functions are bound here; their stream, workspace and math mode are set once.

Small products are the fully connected layers of small nets. cuBLAS divides a long depth among blocks and adds their
parts in a second kernel; kernels/small_product.cu has the warps of a block do that in one, where wanted with a formula
of each result.

For half-precision products one of whose lengths is odd cuBLAS has slow kernels alone. Such a product is divided into a
part whose length is a multiple of eight, over copies whose rows begin at multiples of 16 bytes, and the few rows,
columns or terms that are left over. An output layer over a vocabulary is one: 8,801 words are rows of 17,602 bytes.
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
from caffepy.backend.cuda.copy import copy
from caffepy.backend.cuda.device import EXTRA, PURPOSE, cupy, has_tensor_cores
from caffepy.backend.cuda.memory import CudaMemory, Scratch
from caffepy.backend.elementwise import Expression, Kind
from caffepy.backend.interface import DensePrimitives
from caffepy.backend.layout import WIDE_LOAD
from caffepy.backend.types import PRODUCT_WORKSPACE, Array
from caffepy.errors import MissingExtraError, RunError

MAX_RESULTS = 2**17
"""Elements of a product up to which it may be small."""

MIN_DEPTH, MAX_DEPTH = 32, 8192
"""Lengths of the sums of small products: less is no work to divide, more is too much for one block."""

MIN_DEPTH_WITH_FORMULA = 16
"""Length of the sums from which a product with a formula may be small: it saves the formula's launch."""

MAX_MULTIPLICATIONS = 2**26

FEW_WARPS, MANY_WARPS = 8, 16
"""Warps of a block: each takes 32 of the depth at a time."""


class Epilogue(NamedTuple):
    """What is done to the elements of a product.

    Args:
        formula: `formula_(element, channel, result)` in CUDA C.
        channel: float32, an element for each column of the product.
    """

    formula: str
    channel: Array


def suits_small_product(shape: tuple[int, ...], depth: int, min_depth: int = MIN_DEPTH) -> bool:
    """Whether a product of this shape and depth is small, and the GPU able."""
    results = shape[0] * shape[1]
    if not (results <= MAX_RESULTS and min_depth <= depth <= MAX_DEPTH):
        return False
    return results * depth <= MAX_MULTIPLICATIONS and has_tensor_cores()


def small_product(a: Array, b: Array, out: Array, accumulate: bool, epilogue: Epilogue | None = None) -> None:
    """out (+)= a @ b, or out = the epilogue of a @ b; each with a unit stride in one axis."""
    (rows, depth), columns = a.shape, b.shape[1]
    tiles = _tiles(rows, columns)
    a_first, a_pitch = lines(a)
    b_first, b_pitch = lines(b.T)
    warps = FEW_WARPS if depth <= 32 * FEW_WARPS else MANY_WARPS
    text = defines(
        In=c_type(a), Out=c_type(out), TILES=tiles, WARPS=warps, A_DEPTH_FIRST=int(a_first), B_DEPTH_FIRST=int(b_first),
        A_VECTORS=int(a_first and _in_vectors(a, a_pitch, depth)),
        B_VECTORS=int(b_first and _in_vectors(b, b_pitch, depth)),
    )  # fmt: skip
    out_row, out_column = (stride // out.itemsize for stride in out.strides)
    grid = (-(-rows // 16), -(-columns // (8 * tiles)))
    arguments = (a, b, out, rows, columns, depth, a_pitch, b_pitch, out_row, out_column, accumulate)
    if epilogue is None:
        launch_blocks(library_kernel("small_product", "product", text, TF32_PRODUCTS), grid, (32 * warps,), arguments)
        return
    assert not accumulate, "a formula of a product overwrites"
    assert epilogue.channel.dtype == "float32", f"a formula's Channel argument of {epilogue.channel.dtype}"
    launch_blocks(_with_formula(text, epilogue.formula), grid, (32 * warps,), (*arguments, epilogue.channel))


def _with_formula(text: str, formula: str) -> Any:
    """The kernel with a formula, which stands on kernels/common.cu and so comes behind it."""
    before = "".join(map(kernel_text, ("common", *TF32_PRODUCTS)))
    return compiled(text + defines(FORMULA=1) + before + formula + kernel_text("small_product"), "product")


def _tiles(rows: int, columns: int) -> int:
    """Tiles of eight columns for a block: few where there would be fewer blocks than multiprocessors."""
    for tiles in (4, 2):
        if -(-rows // 16) * -(-columns // (8 * tiles)) >= 96:
            return tiles
    return 2 if columns > 8 else 1


def _in_vectors(matrix: Array, pitch: int, depth: int) -> bool:
    """Whether every fourth element along the depth begins where a load of four may."""
    return pitch % 4 == 0 and depth % 4 == 0 and aligned(matrix)


def lines(matrix: Array) -> tuple[bool, int]:
    """Whether the last axis of a matrix is the one that is contiguous, and the distance of its lines in elements."""
    lines, length = matrix.shape
    item = matrix.itemsize
    if matrix.strides[1] == item or length == 1:
        return True, matrix.strides[0] // item if lines > 1 else length
    assert matrix.strides[0] == item or lines == 1, f"gemm: strides {matrix.strides} of shape {matrix.shape}"
    return False, matrix.strides[1] // item


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
