"""Products of small matrices by one kernel of our own: the fully connected layers of small nets.

Owns when a product is small. cuBLAS divides a long depth among blocks and adds their parts in a second kernel; here the
warps of a block do that in one, where wanted with a formula of each result.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
from caffepy.backend.cuda.device import has_tensor_cores
from caffepy.backend.types import Array

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
