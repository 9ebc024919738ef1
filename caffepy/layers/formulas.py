"""Formulas that several families of layers use."""

from __future__ import annotations

from math import tanh

from caffepy.backend import Channel, Each, expression
from caffepy.backend.formulas import identity, scaled
from caffepy.backend.formulas import plus as total
from caffepy.backend.formulas import times as product_with_channel

__all__ = [
    "hyperbolic_tangent", "identity", "product", "product_plus", "product_with_channel", "scaled", "tanh_gradient",
    "total", "total_with_channel",
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


@expression
def hyperbolic_tangent(x: Each) -> Each:
    return tanh(x)


@expression
def tanh_gradient(y: Each, dy: Each) -> Each:
    return dy * (1 - y * y)
