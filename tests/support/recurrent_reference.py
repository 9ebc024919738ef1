"""RNN and LSTM in NumPy, step by step as Caffe's unrolled nets compute them; whatever dtype is given."""

from __future__ import annotations

from typing import Any

import numpy as np

Floats = Any


def sigmoid(x: Floats) -> Floats:
    return 1 / (1 + np.exp(-x))


def lstm(
    x: Floats, cont: Floats, weights: list[Floats], h: Floats, c: Floats, static: Floats | None = None
) -> tuple[Floats, Floats, Floats]:
    """(all h, last h, last c); weights as the layer's blobs, h and c (N, D)."""
    w_x, b, *middle, w_h = weights
    outputs = []
    for t in range(len(x)):
        gates = x[t].reshape(len(x[t]), -1) @ w_x.T + b + (cont[t][:, None] * h) @ w_h.T
        if static is not None:
            gates = gates + static.reshape(len(static), -1) @ middle[0].T
        i, f, o, g = np.split(gates, 4, axis=1)
        c = cont[t][:, None] * sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        outputs.append(h)
    return np.stack(outputs), h, c


def rnn(
    x: Floats, cont: Floats, weights: list[Floats], h: Floats, static: Floats | None = None
) -> tuple[Floats, Floats]:
    """(all o, last h)."""
    w_x, b, *middle, w_hh, w_ho, b_o = weights
    outputs = []
    for t in range(len(x)):
        total = x[t].reshape(len(x[t]), -1) @ w_x.T + b + (cont[t][:, None] * h) @ w_hh.T
        if static is not None:
            total = total + static.reshape(len(static), -1) @ middle[0].T
        h = np.tanh(total)
        outputs.append(np.tanh(h @ w_ho.T + b_o))
    return np.stack(outputs), h
