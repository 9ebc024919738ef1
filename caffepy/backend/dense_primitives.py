"""The primitives of fully connected layers and of the activations behind them, a part of `Backend`."""

from __future__ import annotations

from abc import ABC, abstractmethod

from caffepy.backend.elementwise import Expression
from caffepy.backend.types import Array


class DensePrimitives(ABC):
    """Products and gradients together with what is done to each of their elements."""

    @abstractmethod
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
        """out = expression(op(a) @ op(b), channel), 2-D arrays as `gemm` takes them.

        `channel` is float32, with an element for each column of out. The formula has an Each argument, then a Channel
        argument, and one result. Whether the product is rounded to out's dtype before the formula takes it is the
        backend's choice.
        """

    @abstractmethod
    def relu_backward(self, y: Array, dy: Array, dx: Array, dbias: Array | None, accumulate: bool) -> None:
        """dx = dy where y > 0, else 0; dbias (+)= the sum of dx for each channel (axis 1). dx may be dy."""

    @abstractmethod
    def activation_backward(
        self, expression: Expression, y: Array, dy: Array, dx: Array, dbias: Array | None, accumulate: bool
    ) -> None:
        """dx = expression(y, dy), a formula of two Each arguments; dbias (+)= the sum of dx for each channel (axis 1).

        Whether dx is rounded to its dtype before it is added up is the backend's choice. dx may be dy.
        """
