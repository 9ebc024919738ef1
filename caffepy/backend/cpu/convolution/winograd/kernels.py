"""The kernels of Winograd's convolution: transforms of all tiles, and 16 matrix products between them."""

from __future__ import annotations

from caffepy.backend.cpu.convolution.winograd.tiles import (
    filter_gradient_tile,
    filter_tile,
    gradient_tile,
    image_tile,
    output_tile,
)
from caffepy.backend.cpu.gemm.microkernel import tile
from caffepy.backend.cpu.jit.kernel import Floats, Int, Words, kernel
from caffepy.backend.cpu.jit.vector import ahead, table_at, turn_square


@kernel
def transform_filters(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, weights: Floats, channels: Int, backward: Int, packed: Floats, plane: Int,
    table: Words, panels: Int, width: Int, depth: Int, squares: Floats, square_size: Int, total: Int, items: Int,
) -> None:  # fmt: skip
    """G g G^T of all filters, packed into panels. Items are parts of (panel, `width` of the elements of the sum).

    The columns of the panels are output channels, or with `backward` channels, of filters that are turned round.
    """
    blocks = depth // width
    for item in range(begin, end):
        square = ahead(squares, item * square_size)
        for number in range(item * total // items, (item + 1) * total // items):
            panel, first = 4 * (number // blocks), number % blocks * width
            vectors, column = table[panel], table[panel + 1]
            wide = vectors * width
            for v in range(0, wide, width):
                target = ahead(packed, table[panel + 2] + first * wide + v)
                source, row, tap = ahead(weights, (first * 9 + 8) * channels + column + v), 9 * channels, -channels
                if backward == 0:
                    for i in range(9):
                        here = ahead(weights, ((column + v) * 9 + i) * channels + first)
                        turn_square(here, 9 * channels, ahead(square, i * width * width), width)
                    source, row, tap = square, width, width * width
                for k in range(width):
                    filter_tile(ahead(source, k * row), tap, ahead(target, k * wide), plane)


@kernel
def correlate_tiles(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, x: Floats, height: Int, width: Int, channels: Int, pad_h: Int, pad_w: Int, zeros: Floats,
    packed: Floats, packed_plane: Int, table: Words, panels: Int, parts: Int, lanes: Int, no_offset: Words,
    scratch: Floats, scratch_size: Int, x_plane: Int, x_rows: Words, y_plane: Int, y_row: Int, y_rows: Words,
    start: Floats, y: Floats, out_height: Int, out_width: Int, outputs: Int, addend: Floats, adds: Int, relu: Int,
    image_tiles: Int, line_tiles: Int, tiles: Int, block: Int, total: Int, items: Int,
) -> None:  # fmt: skip
    """y = start + the correlation of x with filters (+ addend), perhaps rectified.

    Items are parts of the (block of tiles, part of the panels).
    """
    for item in range(begin, end):
        images = ahead(scratch, item * scratch_size)
        products = ahead(images, 16 * x_plane)
        rest = ahead(products, 16 * y_plane)
        transformed = -1
        for number in range(item * total // items, (item + 1) * total // items):
            first, part = number // parts * block, number % parts
            count = min(block, tiles - first)
            if first != transformed:
                transformed = first
                for t in range(count):
                    n, at = (first + t) // image_tiles, (first + t) % image_tiles
                    image_tile(
                        ahead(x, n * height * width * channels), zeros, 2 * (at // line_tiles) - pad_h,
                        2 * (at % line_tiles) - pad_w, height, width, channels, ahead(images, t * channels), x_plane,
                        1, 0, channels // lanes,
                    )  # fmt: skip
            panel0, panel1 = part * panels // parts, (part + 1) * panels // parts
            column0, vectors_done = table[4 * panel0 + 1], 0
            for panel in range(panel0, panel1):
                vectors_done += table[4 * panel]
            for i in range(16):
                for panel in range(panel0, panel1):
                    vectors, column = table[4 * panel], table[4 * panel + 1] - column0
                    rows = 6 if vectors == 2 else (4 if vectors == 3 else 8)
                    weights = ahead(packed, i * packed_plane + table[4 * panel + 2])
                    target = ahead(products, i * y_plane + column)
                    for r in range(0, count, rows):
                        tile(
                            vectors, ahead(images, i * x_plane), table_at(x_rows, r), no_offset, 1, weights, no_offset,
                            vectors * lanes, 1, channels, zeros, 0, target, table_at(y_rows, r), count - r, lanes,
                            zeros, 0, 0,
                        )  # fmt: skip
            for t in range(count):
                n, at = (first + t) // image_tiles, (first + t) % image_tiles
                offset = n * out_height * out_width * outputs + column0
                output_tile(
                    ahead(products, t * y_row), y_plane, ahead(start, column0), ahead(y, offset), rest,
                    2 * (at // line_tiles), 2 * (at % line_tiles), out_height, out_width, outputs, vectors_done,
                    ahead(addend, offset), adds, relu,
                )  # fmt: skip


@kernel
def transform_images(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, first: Int, x: Floats, height: Int, width: Int, channels: Int, pad_h: Int, pad_w: Int,
    x_tiles: Floats, x_plane: Int, x_vectors: Int, dy: Floats, out_height: Int, out_width: Int, outputs: Int,
    dy_tiles: Floats, dy_plane: Int, dy_vectors: Int, zeros: Floats, image_tiles: Int, line_tiles: Int, tiles: Int,
    lanes: Int,
) -> None:  # fmt: skip
    """B^T d B of the images and A dy A^T of the gradient, in panels of some vectors. Items are tiles behind `first`."""
    x_wide, dy_wide = x_vectors * lanes, dy_vectors * lanes
    for item in range(begin, end):
        n, at = (first + item) // image_tiles, (first + item) % image_tiles
        h, w = 2 * (at // line_tiles), 2 * (at % line_tiles)
        image_tile(
            ahead(x, n * height * width * channels), zeros, h - pad_h, w - pad_w, height, width, channels,
            ahead(x_tiles, item * x_wide), x_plane, channels // x_wide, tiles * x_wide, x_vectors,
        )  # fmt: skip
        gradient_tile(
            ahead(dy, n * out_height * out_width * outputs), zeros, h, w, out_height, out_width, outputs,
            ahead(dy_tiles, item * dy_wide), dy_plane, outputs // dy_wide, tiles * dy_wide, dy_vectors,
        )  # fmt: skip


@kernel
def multiply_tiles(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, x_tiles: Floats, x_plane: Int, vectors: Int, channels: Int, dy_tiles: Floats, dy_plane: Int,
    dy_wide: Int, dy_rows: Words, outputs: Int, tiles: Int, block: Int, products: Floats, plane: Int, c_rows: Words,
    accumulate: Int, zeros: Floats, no_offset: Words, lanes: Int, total: Int, items: Int,
) -> None:  # fmt: skip
    """products[i, k, c] (+)= sum over tiles of dy[i, k] * x[i, c]. Items are parts of the (i, panel of c)."""
    wide = vectors * lanes
    panels = channels // wide
    rows = 6 if vectors == 2 else (4 if vectors == 3 else 8)
    for item in range(begin, end):
        for number in range(item * total // items, (item + 1) * total // items):
            i, panel = number // panels, number % panels
            for first in range(0, tiles, block):
                height = min(block, tiles - first)
                keep = 1 if accumulate == 1 or first > 0 else 0
                factors = ahead(x_tiles, i * x_plane + (panel * tiles + first) * wide)
                for k in range(0, outputs, rows):
                    target = ahead(products, i * plane + k * channels + panel * wide)
                    tile(
                        vectors, ahead(dy_tiles, i * dy_plane + first * dy_wide), table_at(dy_rows, k), no_offset,
                        dy_wide, factors, no_offset, wide, 1, height, target if keep == 1 else zeros, keep, target,
                        c_rows, outputs - k, lanes, zeros, 0, 0,
                    )  # fmt: skip


@kernel
def transform_gradients(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, products: Floats, plane: Int, channels: Int, lanes: Int, dweights: Floats, accumulate: Int
) -> None:
    """dweights (+)= G^T m G of all filters. Items are output channels."""
    for k in range(begin, end):
        for c in range(0, channels, lanes):
            filter_gradient_tile(
                ahead(products, k * channels + c), plane, ahead(dweights, k * 9 * channels + c), channels, accumulate
            )
