"""A time step of an LSTM."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backend_arrays import agrees, normal, rounded, to_device

from caffepy.backend import Backend


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize(("streams", "width"), [(5, 7), (1, 1), (33, 64)])
def test_a_step_of_an_lstm(backend: Backend, dtype: str, streams: int, width: int, goes_on: bool) -> None:
    """Forward and back; some streams begin anew, some end; the last step carries nothing to a next one."""
    shape, wide = (streams, width), (streams, 4 * width)
    inputs, before, d_cell, d_carried = (normal(s, d) for s, d in ((1, wide), (2, shape), (3, shape), (4, shape)))
    dy = rounded(normal(5, shape), dtype)
    cont, next_cont = (np.asarray(normal(seed, (streams,)) < 0.3, np.float32) for seed in (6, 7))
    i, f, o, g = (
        function(part)
        for function, part in zip(
            (_sigmoid, _sigmoid, _sigmoid, np.tanh), np.split(inputs.astype(float), 4, axis=1), strict=True
        )
    )
    kept = cont[:, None] * before
    cell = f * kept + i * g
    hidden = o * np.tanh(cell)

    gates, on_before, on_cont = to_device(backend, inputs), to_device(backend, before), to_device(backend, cont)
    on_cell, on_hidden, carried = backend.zeros(shape), backend.zeros(shape, dtype), backend.zeros(shape, dtype)
    more = (to_device(backend, next_cont), carried) if goes_on else ()
    backend.lstm_step_forward(gates, on_before, on_cont, on_cell, on_hidden, *more)
    agrees(backend, gates, np.concatenate([i, f, o, g], axis=1))
    agrees(backend, on_cell, cell)
    agrees(backend, on_hidden, hidden, dtype)
    if goes_on:
        agrees(backend, carried, hidden * next_cont[:, None], dtype)

    d_hidden = dy + (d_carried * next_cont[:, None] if goes_on else 0)
    through = d_cell + d_hidden * o * (1 - np.tanh(cell) ** 2)
    d_inputs = [
        through * g * i * (1 - i),
        through * kept * f * (1 - f),
        d_hidden * np.tanh(cell) * o * (1 - o),
        through * i * (1 - g * g),
    ]
    on_d_cell, d_gates = to_device(backend, d_cell), backend.zeros(wide, dtype)
    back = (more[0], to_device(backend, d_carried)) if goes_on else ()
    backend.lstm_step_backward(
        gates, on_before, on_cont, on_cell, on_d_cell, to_device(backend, dy, dtype), d_gates, *back
    )
    agrees(backend, d_gates, np.concatenate(d_inputs, axis=1), dtype)
    agrees(backend, on_d_cell, through * f * cont[:, None])
