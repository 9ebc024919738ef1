"""Formulas that several families of layers use."""

from __future__ import annotations

from caffepy.backend import Channel, Each, Scalar, expression


@expression
def identity(x: Each) -> Each:
    return x


@expression
def scaled(x: Each, factor: Scalar) -> Each:
    return x * factor


@expression
def product(x: Each, y: Each) -> Each:
    return x * y


@expression
def product_plus(x: Each, y: Each, z: Each) -> Each:
    return x * y + z


@expression
def total(x: Each, y: Each) -> Each:
    return x + y


@expression
def total_with_channel(x: Each, y: Channel) -> Each:
    return x + y


@expression
def product_with_channel(x: Each, y: Channel) -> Each:
    return x * y
