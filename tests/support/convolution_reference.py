"""Convolutions in float64 NumPy, one product for each element of the window: what `backend_oracle` computes, faster."""

from __future__ import annotations

from typing import Any

import numpy as np

from caffepy.backend import Geometry

Array = Any


def convolution(x: Array, weights: Array, dy: Array, geometry: Geometry) -> tuple[Array, Array, Array]:
    """y, dx and dweights; the size of dy says that of y."""
    g = geometry
    samples, groups, out = x.shape[0], g.group, dy.shape[2:]
    padded = np.pad(x.astype(float), ((0, 0), (0, 0), *((p, p + s) for p, s in zip(g.pad, g.stride, strict=True))))
    y, dpadded, dweights = np.zeros(dy.shape), np.zeros(padded.shape), np.zeros(weights.shape)
    by_group = dy.astype(float).reshape(samples, groups, dy.shape[1] // groups, -1)
    for element in np.ndindex(*g.kernel):
        starts = [d * k for d, k in zip(g.dilation, element, strict=True)]
        steps = zip(starts, g.stride, out, strict=True)
        at = (slice(None), slice(None), *(slice(start, start + s * size, s) for start, s, size in steps))
        part = padded[at].reshape(samples, groups, x.shape[1] // groups, -1)
        own = weights[(..., *element)].astype(float).reshape(groups, weights.shape[0] // groups, weights.shape[1])
        y += np.einsum("ngcp,goc->ngop", part, own).reshape(y.shape)
        dweights[(..., *element)] = np.einsum("ngcp,ngop->goc", part, by_group).reshape(weights.shape[:2])
        dpadded[at] += np.einsum("ngop,goc->ngcp", by_group, own).reshape(samples, x.shape[1], *out)
    inside = (slice(None), slice(None), *(slice(p, p + size) for p, size in zip(g.pad, x.shape[2:], strict=True)))
    return y, dpadded[inside], dweights
