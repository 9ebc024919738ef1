"""Slow, plain float64 versions of the backends' primitives: what they are tested against."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from caffepy.backend import Geometry

Array = Any


def convolution(x: Array, weights: Array, bias: Array | None, geometry: Geometry, out: tuple[int, ...]) -> Array:
    """y for logical (N, C, spatial...) arrays; `out` is y's spatial shape."""
    y = np.zeros((x.shape[0], weights.shape[0], *out))
    for n, o, position, value in _products(x, weights, geometry, out):
        y[(n, o) + position] += value(x, weights)
    if bias is not None:
        y += bias.reshape((-1,) + (1,) * len(out))
    return y


def _products(x: Array, weights: Array, geometry: Geometry, out: tuple[int, ...]) -> Iterator[Any]:
    outputs, inputs = weights.shape[0] // geometry.group, weights.shape[1]
    for n in range(x.shape[0]):
        for o in range(weights.shape[0]):
            first = (o // outputs) * inputs
            for position in np.ndindex(*out):
                for k in np.ndindex(*geometry.kernel):
                    at = tuple(
                        p * s - pad + d * j
                        for p, s, pad, d, j in zip(
                            position, geometry.stride, geometry.pad, geometry.dilation, k, strict=True
                        )
                    )
                    if all(0 <= a < size for a, size in zip(at, x.shape[2:], strict=True)):
                        image = (n, slice(first, first + inputs)) + at
                        filter_ = (o, slice(None)) + k
                        yield n, o, position, _Product(image, filter_)


class _Product:
    """One channel vector of the image times one of a filter."""

    def __init__(self, image: Any, filter_: Any) -> None:
        self.image = image
        self.filter = filter_

    def __call__(self, x: Array, weights: Array) -> float:
        return float(x[self.image] @ weights[self.filter])


def convolution_gradients(x: Array, weights: Array, dy: Array, geometry: Geometry) -> tuple[Array, Array]:
    """(dx, dweights) given dy."""
    dx, dweights = np.zeros(x.shape), np.zeros(weights.shape)
    for n, o, position, product in _products(x, weights, geometry, dy.shape[2:]):
        g = dy[(n, o) + position]
        dx[product.image] += g * weights[product.filter]
        dweights[product.filter] += g * x[product.image]
    return dx, dweights


def _windows(x_shape: tuple[int, ...], y_shape: tuple[int, ...], g: Geometry) -> Iterator[Any]:
    """(index of y, slices of the window clipped to the image, area clipped at H + pad, W + pad)."""
    for n, c, oh, ow in np.ndindex(*y_shape):
        spans, area = [], 1
        for o, size, k, s, p in zip((oh, ow), x_shape[2:], g.kernel, g.stride, g.pad, strict=True):
            start = o * s - p
            stop = min(start + k, size + p)
            area *= stop - start
            spans.append(slice(max(start, 0), min(stop, size)))
        yield (n, c, oh, ow), (n, c, *spans), area


def pool_max(x: Array, y_shape: tuple[int, ...], geometry: Geometry) -> tuple[Array, Array]:
    """(y, mask)."""
    y, mask = np.zeros(y_shape), np.zeros(y_shape, np.int32)
    for at, window, _ in _windows(x.shape, y_shape, geometry):
        part = x[window]
        h, w = np.unravel_index(np.argmax(part), part.shape)
        y[at] = part[h, w]
        mask[at] = (window[2].start + h) * x.shape[3] + window[3].start + w
    return y, mask


def pool_max_gradient(dy: Array, mask: Array, x_shape: tuple[int, ...]) -> Array:
    """dx."""
    dx = np.zeros((x_shape[0], x_shape[1], x_shape[2] * x_shape[3]))
    for n, c, oh, ow in np.ndindex(*dy.shape):
        dx[n, c, mask[n, c, oh, ow]] += dy[n, c, oh, ow]
    return dx.reshape(x_shape)


def pool_average(x: Array, y_shape: tuple[int, ...], geometry: Geometry) -> Array:
    """y."""
    y = np.zeros(y_shape)
    for at, window, area in _windows(x.shape, y_shape, geometry):
        y[at] = x[window].sum() / area
    return y


def pool_average_gradient(dy: Array, x_shape: tuple[int, ...], geometry: Geometry) -> Array:
    """dx."""
    dx = np.zeros(x_shape)
    for at, window, area in _windows(x_shape, dy.shape, geometry):
        dx[window] += dy[at] / area
    return dx


def _around(c: int, size: int, channels: int) -> slice:
    before = (size - 1) // 2
    return slice(max(0, c - before), min(channels, c - before + size))


def lrn(x: Array, size: int, alpha: float, beta: float, k: float) -> tuple[Array, Array]:
    """(y, scale)."""
    scale = np.zeros(x.shape)
    for c in range(x.shape[1]):
        scale[:, c] = k + alpha / size * (x[:, _around(c, size, x.shape[1])] ** 2).sum(axis=1)
    return x * scale**-beta, scale


def lrn_gradient(x: Array, dy: Array, size: int, alpha: float, beta: float, k: float) -> Array:
    """dx, by adding up what each output says about its own window."""
    y, scale = lrn(x, size, alpha, beta, k)
    dx = dy * scale**-beta
    for c in range(x.shape[1]):
        window = _around(c, size, x.shape[1])
        dx[:, window] -= 2 * alpha * beta / size * x[:, window] * (dy[:, c] * y[:, c] / scale[:, c])[:, None]
    return dx


def softmax(x: Array, axis: int) -> Array:
    """y."""
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def softmax_gradient(y: Array, dy: Array, axis: int) -> Array:
    """dx."""
    return y * (dy - (y * dy).sum(axis=axis, keepdims=True))


def softmax_loss(x: Array, labels: Array, axis: int, ignore_label: int | None) -> tuple[float, int, set[int]]:
    """(sum of losses, labels counted, indices of labels that are no class)."""
    probabilities = np.moveaxis(softmax(x, axis), axis, -1).reshape(-1, x.shape[axis])
    total, counted, bad = 0.0, 0, set()
    for i, label in enumerate(labels.reshape(-1).astype(int)):
        if ignore_label is not None and label == ignore_label:
            continue
        if not 0 <= label < x.shape[axis]:
            bad.add(i)
            continue
        total -= math.log(max(probabilities[i, label], 1.1754943508222875e-38))
        counted += 1
    return total, counted, bad


def softmax_loss_gradient(
    probabilities: Array, labels: Array, axis: int, ignore_label: int | None, scale: float
) -> Array:
    """dx for labels that are all classes or ignored."""
    dx = np.moveaxis(probabilities, axis, -1).reshape(-1, probabilities.shape[axis]).copy()
    for i, label in enumerate(labels.reshape(-1).astype(int)):
        if ignore_label is not None and label == ignore_label:
            dx[i] = 0
        else:
            dx[i, label] -= 1
    moved = np.moveaxis(probabilities, axis, -1).shape
    return np.moveaxis(dx.reshape(moved) * scale, -1, axis)


def label_ranks(x: Array, labels: Array, axis: int, higher_wins: bool = False) -> Array:
    """Ranks in the labels' shape; -1 for labels that are no class."""
    scores = np.moveaxis(x, axis, -1).reshape(-1, x.shape[axis])
    ranks = [
        _rank(score, label, higher_wins) if 0 <= label < len(score) else -1
        for score, label in zip(scores, labels.reshape(-1).astype(int), strict=True)
    ]
    return np.array(ranks, np.float32).reshape(labels.shape)


def _rank(score: Array, label: int, higher_wins: bool) -> int:
    if higher_wins:
        return int((score > score[label]).sum() + (score[label + 1 :] == score[label]).sum())
    return int((score >= score[label]).sum() - 1)


def philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Philox 4x32-10 in Python's integers."""
    c, k, word = list(counter), list(key), 0xFFFFFFFF
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & word, (p0 >> 32) ^ c[3] ^ k[1], p0 & word]
        k = [(k[0] + 0x9E3779B9) & word, (k[1] + 0xBB67AE85) & word]
    return tuple(c)


def random_uniform(shape: tuple[int, ...], seed: int, stream: int, pass_number: int, first_sample: int) -> Array:
    """Numbers in [0, 1) as `Backend.random_uniform` documents them."""
    count = math.prod(shape[1:])
    key = ((seed ^ stream) & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
    out = np.zeros((shape[0], count), np.float32)
    for s in range(shape[0]):
        sample = first_sample + s
        for i in range(count):
            words = philox((i // 4, sample & 0xFFFFFFFF, (sample >> 32) & 0xFFFFFFFF, pass_number), key)
            out[s, i] = (words[i % 4] >> 8) * 2.0**-24
    return out.reshape(shape)
