"""The gates of an LSTM on a GPU: launches kernels/lstm.cu."""

from __future__ import annotations

from caffepy.backend.cuda.compiler import launch, library_kernel
from caffepy.backend.cuda.memory import raw
from caffepy.backend.recurrent_primitives import RecurrentPrimitives
from caffepy.backend.types import Array


class CudaRecurrent(RecurrentPrimitives):
    """These primitives of the CUDA backend."""

    def lstm_unit_forward(self, gates: Array, cell_before: Array, cont: Array, cell: Array, hidden: Array) -> None:
        _launch("lstm_forward", (gates, cell_before, cont, cell, hidden), cell)

    def lstm_unit_backward(
        self, gates: Array, cell_before: Array, cont: Array, cell: Array, d_cell: Array, d_hidden: Array
    ) -> None:
        _launch("lstm_backward", (gates, cell_before, cont, cell, d_cell, d_hidden), cell)


def _launch(name: str, arrays: tuple[Array, ...], cell: Array) -> None:
    assert all(array.dtype == "float32" for array in arrays), "recurrent layers compute in float32"
    launch(library_kernel("lstm", name), cell.size, (*map(raw, arrays), cell.shape[1], cell.size))
