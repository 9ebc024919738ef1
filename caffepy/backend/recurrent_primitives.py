"""The primitives of recurrent layers, a part of `Backend`."""

from __future__ import annotations

from abc import ABC, abstractmethod

from caffepy.backend.types import Array


class RecurrentPrimitives(ABC):
    """The gates of an LSTM at one time step, for N streams. All arrays are float32 unless said otherwise."""

    @abstractmethod
    def lstm_unit_forward(self, gates: Array, cell_before: Array, cont: Array, cell: Array, hidden: Array) -> None:
        """One time step (Caffe's `lstm_unit_layer.cpp`), given the gates' inputs of shape (N, 4 D).

        gates become (i, f, o, g) = (sigmoid, sigmoid, sigmoid, tanh) of their four parts;
        cell = f * cell_before + i * g, without the first term where cont is 0 and with it times cont elsewhere;
        hidden = o * tanh(cell). cell_before, cell and hidden: (N, D); cont: (N,).
        """

    @abstractmethod
    def lstm_unit_backward(
        self, gates: Array, cell_before: Array, cont: Array, cell: Array, d_cell: Array, d_hidden: Array
    ) -> None:
        """The gradients by the gates' inputs and by cell_before, given those by cell and hidden.

        gates hold (i, f, o, g) and become the gradient by their inputs; d_cell becomes that by cell_before.
        """

    @abstractmethod
    def lstm_step_forward(
        self, gates: Array, cell_before: Array, cont: Array, cell: Array, hidden: Array,
        next_cont: Array | None = None, carried: Array | None = None,
    ) -> None:  # fmt: skip
        """`lstm_unit_forward` within a loop over time: carried = next_cont hidden as well, for the next step's product.

        At the last step there is neither. hidden and carried, both (N, D), are of any dtype of blobs.
        """

    @abstractmethod
    def lstm_step_backward(  # noqa: PLR0913 -- what a step reads and writes
        self, gates: Array, cell_before: Array, cont: Array, cell: Array, d_cell: Array, dy: Array, d_gates: Array,
        next_cont: Array | None = None, d_carried: Array | None = None,
    ) -> None:  # fmt: skip
        """`lstm_unit_backward` within a loop over time, given d_hidden = dy + next_cont d_carried.

        dy is the top's gradient, d_carried that by the next step's `carried`; the last step has none. The gradient by
        the gates' inputs goes to d_gates, which may be gates. dy and d_gates, of one dtype of blobs: (N, D), (N, 4 D);
        d_carried, (N, D), is overwritten.
        """
