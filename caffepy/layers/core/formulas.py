"""Formulas that several families of layers use."""

from __future__ import annotations

from caffepy.backend import Channel, Each, expression
from caffepy.backend.formulas import identity, scaled
from caffepy.backend.formulas import plus as total
from caffepy.backend.formulas import times as product_with_channel

__all__ = [
    "identity", "product", "product_plus", "product_with_channel", "scaled", "total", "total_with_channel",
]  # fmt: skip


@expression
def product(x: Each, y: Each) -> Each:
    return x * y


@expression
def product_plus(x: Each, y: Each, z: Each) -> Each:
    return x * y + z


@expression
def total_with_channel(x: Each, y: Channel) -> Each:
    return x + y
