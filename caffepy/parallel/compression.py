"""Gradients as float16 on their way between devices: half the bytes, ten bits of mantissa.

Owns the small copies, for communicators whose averages go over a wire.
"""

from __future__ import annotations

from typing import Any

from caffepy.backend.arguments import Array


class Halves:
    """Makes float16 copies that can be added up to a mean, and reads the mean back.

    Numbers above 65,504 in absolute value become infinite, those below 6e-8 zero; NaN and infinity stay what they are.

    Args:
        module: numpy or cupy, whose arrays these are; the work goes on cupy's current stream.
        size: how many arrays the mean is of.
    """

    def __init__(self, module: Any, size: int) -> None:
        self._module = module
        self._factor = 1.0 / size
        self._copies: dict[tuple[int, int], Array] = {}

    def shrink(self, array: Array) -> Array:
        """array / size as float16: (P,). Each array keeps its copy, so that nothing is allocated a second time."""
        place = (_address(array), array.size)
        if place not in self._copies:
            self._copies[place] = self._module.empty(array.shape, "float16")
        copy = self._copies[place]
        self._module.multiply(array, self._factor, out=copy, casting="unsafe")
        return copy

    def widen(self, copy: Array, array: Array) -> None:
        """array = what `shrink` gave, after all devices' were added up."""
        self._module.copyto(array, copy)


def _address(array: Array) -> int:
    return int(array.data.ptr if hasattr(array.data, "ptr") else array.ctypes.data)
