"""Local response normalisation across channels, one pixel's channels next to each other in memory."""

from __future__ import annotations

import math
from typing import Any

from caffepy.backend.cpu.jit.kernel import Float, Floats, Int, device_function, kernel
from caffepy.backend.types import LrnWindow

GRAIN = 4096
"""Elements below which a second thread costs more than it saves."""


@device_function
def _power(scale: Any, beta: Any) -> Any:
    """scale^-beta; 0.75, which nearly all nets use, by two square roots."""
    if beta == 0.75:
        root = math.sqrt(scale)
        return 1 / (root * math.sqrt(root))
    return scale**-beta


@kernel
def forward(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, x: Floats, y: Floats, scale: Floats,
    channels: Int, before: Int, after: Int, factor: Float, beta: Float, k: Float,
) -> None:  # fmt: skip
    """Items are pixels."""
    for item in range(begin, end):
        row = item * channels
        for c in range(channels):
            scale[row + c] = 0
        for offset in range(-before, after + 1):
            for c in range(max(0, -offset), min(channels, channels - offset)):
                value = x[row + c + offset]
                scale[row + c] += value * value
        for c in range(channels):
            total = k + factor * scale[row + c]
            scale[row + c] = total
            y[row + c] = x[row + c] * _power(total, beta)


@kernel
def backward(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, x: Floats, y: Floats, scale: Floats, dy: Floats, dx: Floats,
    channels: Int, before: Int, after: Int, factor: Float, beta: Float,
) -> None:  # fmt: skip
    """Items are pixels. A channel's window seen from its members is the mirrored window."""
    for item in range(begin, end):
        row = item * channels
        for c in range(channels):
            dx[row + c] = 0
        for offset in range(-after, before + 1):
            for c in range(max(0, -offset), min(channels, channels - offset)):
                other = row + c + offset
                dx[row + c] += dy[other] * y[other] / scale[other]
        for c in range(channels):
            at = row + c
            dx[at] = dy[at] * _power(scale[at], beta) - factor * x[at] * dx[at]


def _grain(x: Any) -> int:
    return max(1, GRAIN // max(1, int(x.shape[1])))


def _sides(size: int) -> tuple[int, int]:
    before = (size - 1) // 2
    return before, size - 1 - before


def lrn_forward(threads: int, x: Any, y: Any, scale: Any, window: LrnWindow) -> None:
    """See `Backend.lrn_across_forward`."""
    channels, w = x.shape[1], window
    pixels = x.size // max(1, channels)
    forward.run(threads, pixels, _grain(x), x, y, scale, channels, *_sides(w.size), w.alpha / w.size, w.beta, w.k)


def lrn_backward(threads: int, x: Any, y: Any, scale: Any, dy: Any, dx: Any, window: LrnWindow) -> None:
    """See `Backend.lrn_across_backward`."""
    channels, w = x.shape[1], window
    pixels = x.size // max(1, channels)
    factor = 2 * w.alpha * w.beta / w.size
    backward.run(threads, pixels, _grain(x), x, y, scale, dy, dx, channels, *_sides(w.size), factor, w.beta)
