"""LSTM gates on the GPU: launches kernels/lstm.cu."""

from __future__ import annotations

from caffepy.backend.cuda.compiler import c_type, defines, launch, library_kernel
from caffepy.backend.cuda.memory import CudaMemory, raw
from caffepy.backend.interface import RecurrentPrimitives
from caffepy.backend.types import Array


class CudaRecurrent(RecurrentPrimitives, CudaMemory):
    """`RecurrentPrimitives` of the GPU."""

    def lstm_unit_forward(self, gates: Array, cell_before: Array, cont: Array, cell: Array, hidden: Array) -> None:
        _launch("lstm_forward", (gates, cell_before, cont, cell, hidden))

    def lstm_unit_backward(
        self, gates: Array, cell_before: Array, cont: Array, cell: Array, d_cell: Array, d_hidden: Array
    ) -> None:
        _launch("lstm_backward", (gates, cell_before, cont, cell, d_cell, d_hidden))

    def lstm_step_forward(
        self,
        gates: Array,
        cell_before: Array,
        cont: Array,
        cell: Array,
        hidden: Array,
        next_cont: Array | None = None,
        carried: Array | None = None,
    ) -> None:
        has_next = next_cont is not None and carried is not None
        own, next_own = (gates, cell_before, cont, cell), (next_cont, carried) if has_next else (cont, hidden)
        _launch_step("lstm_step_forward", (*own, next_own[0]), (hidden, next_own[1]), has_next)

    def lstm_step_backward(
        self,
        gates: Array,
        cell_before: Array,
        cont: Array,
        cell: Array,
        d_cell: Array,
        dy: Array,
        d_gates: Array,
        next_cont: Array | None = None,
        d_carried: Array | None = None,
    ) -> None:
        has_next = next_cont is not None and d_carried is not None
        own, next_own = (gates, cell_before, cont, cell, d_cell), (next_cont, d_carried) if has_next else (cont, cell)
        _launch_step("lstm_step_backward", (*own, *next_own), (dy, d_gates), has_next)


def _launch(name: str, arrays: tuple[Array, ...]) -> None:
    cell = arrays[3]
    assert all(array.dtype == "float32" for array in arrays), "the gates must be float32"
    kernel = library_kernel("lstm", name, defines(Element="float"))
    launch(kernel, cell.size, (*map(raw, arrays), cell.shape[1], cell.size))


def _launch_step(name: str, arrays: tuple[Array, ...], blobs: tuple[Array, Array], has_next: bool) -> None:
    """Launch one step of the loop. `arrays` are float32, the fourth is the cell; `blobs` have the layer's dtype."""
    cell = arrays[3]
    assert all(array.dtype == "float32" for array in arrays), "the cells must be float32"
    assert blobs[0].dtype == blobs[1].dtype, f"{name}: {blobs[0].dtype} and {blobs[1].dtype}"
    kernel = library_kernel("lstm", name, defines(Element=c_type(blobs[0])))
    launch(kernel, cell.size, (*map(raw, (*arrays, *blobs)), cell.shape[1], cell.size, int(has_next)))
