"""MultiStageMeanfield: the mean field of a conditional random field on an image, as layers of a net (CRF as RNN)."""

from __future__ import annotations

from typing import Any

import numpy as np

from caffepy.backend import Array, Backend
from caffepy.backend.formulas import difference, negated
from caffepy.forks.segmentation.permutohedral import Lattice, make_lattice
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.layer import Blobs, Layer, flatten_pixels, register_layer
from caffepy.layers.spatial_map import SpatialMap

COLORS = 3
"""Channels of the image."""


class GaussianFilter:
    """y = D K x for images (1, C, H, W): Gaussian weights K of all pairs of pixels, D with rows of K that add up to 1.

    Args:
        backend: of the images.
        lattice: of the pixels' features.
    """

    def __init__(self, backend: Backend, lattice: Lattice) -> None:
        self._backend, self._size = backend, lattice.size
        pixels, corners = lattice.vertices.shape
        pixel = np.repeat(np.arange(pixels), corners)
        vertices = lattice.vertices.ravel()
        shape = (lattice.size, pixels)
        self._splat = SpatialMap(backend, shape, vertices, pixel, lattice.weights)
        slices = lattice.weights * lattice.normalisation()[:, None]
        self._slice = SpatialMap(backend, shape[::-1], pixel, vertices, slices)
        own = np.arange(lattice.size)
        self._blurs = [
            SpatialMap(
                backend,
                (lattice.size, lattice.size),
                np.concatenate([own, *(own[pair >= 0] for pair in pairs)]),
                np.concatenate([own, *(pair[pair >= 0] for pair in pairs)]),
                np.concatenate([np.ones(len(own)), np.full(np.count_nonzero(pairs >= 0), 0.5)]),
            )
            for pairs in lattice.neighbours
        ]

    def forward(self, x: Array, y: Array) -> None:
        """y = D K x."""
        values = self._two_buffers(x.shape[1])
        self._splat.forward(x, values[0])
        for blur in self._blurs:
            blur.forward(*values)
            values.reverse()
        self._slice.forward(values[0], y)

    def backward(self, dy: Array, dx: Array) -> None:
        """dx = (D K)^T dy: the steps in reverse; each blur is symmetric."""
        values = self._two_buffers(dy.shape[1])
        self._slice.backward(dy, values[0])
        for blur in reversed(self._blurs):
            blur.forward(*values)
            values.reverse()
        self._splat.backward(values[0], dx)

    def _two_buffers(self, channels: int) -> list[Array]:
        return [self._backend.zeros((1, channels, self._size, 1)) for _ in range(2)]


@register_layer("MultiStageMeanfield")
class MultiStageMeanfieldLayer(Layer):
    """Mean field of a conditional random field (CRF as RNN; Zheng et al. 2015; `multi_stage_meanfield.cpp`).

    Bottoms: unary terms U and scores Q, (N, C, H, W) each, and images (N, 3, H, W). The top has U's shape. The layer
    repeats Q = U - blob 2 (blob 0 S(p) + blob 1 B(p)) with p = softmax(Q) over the channels, `num_iterations` times,
    and its top is the last Q. S and B replace each pixel by a weighted mean of all pixels of its image. The weights
    are exp(-d^2 / 2). In S, d is the distance of positions divided by `theta_gamma`. In B, d is the distance of
    positions divided by `theta_alpha` together with that of colors divided by `theta_beta`. A permutohedral lattice
    approximates both (`permutohedral.py`).

    Blobs 0, 1 and 2, (1, 1, C, C) each, weigh the classes of S, of B and of their sum. Initially they are diagonal,
    with `spatial_filter_weight`, `bilateral_filter_weight` and -1. (The forks read blobs 0 and 1 from the files
    spatial.par and bilateral.par.) The image has no gradient.

    Raises:
        ConfigError: there is no iteration, or a theta is not positive.
        ShapeError: the shapes differ, the image does not have 3 channels, or C is not that of the parameters.
        DataError: the image has values that are not finite, or too many for the lattice's keys.
    """

    bottoms = (3, 3)
    exact_bottoms = frozenset({2})

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        self._check_shapes(bottom)
        param = self.param.multi_stage_meanfield_param
        if param.num_iterations < 1:
            raise self.error("num_iterations is 0; give at least 1")
        for name in ("theta_alpha", "theta_beta", "theta_gamma"):
            if not getattr(param, name) > 0:
                raise self.error(f"{name} is {getattr(param, name):g}; it must be more than 0")
        self._channels = bottom[0].shape[1]
        self._shape: tuple[int, ...] = ()
        for value in (param.spatial_filter_weight, param.bilateral_filter_weight, -1.0):
            self._add_diagonal(value)

    def _add_diagonal(self, value: float) -> None:
        """Make the next parameter, with `value` on its diagonal."""
        shape = (1, 1, self._channels, self._channels)
        blob = self.add_parameter(shape, caffe_pb2.FillerParameter())
        if self.backend.holds_values and self.context.run_fillers:
            blob.fill_with(lambda: (value * np.eye(self._channels, dtype=np.float32)).reshape(shape))

    def _check_shapes(self, bottom: Blobs) -> None:
        shape = bottom[0].shape
        fits = len(shape) == 4 and shape == bottom[1].shape and bottom[2].shape == (shape[0], COLORS, *shape[2:])
        if not fits or min(shape) < 1:
            raise self.shape_error("needs two bottoms (N, C, H, W) and images (N, 3, H, W)", *bottom)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        self._check_shapes(bottom)
        shape = bottom[0].shape
        if shape[1] != self._channels:
            raise self.shape_error(f"has parameters for {self._channels} channels", bottom[0])
        top[0].reshape(shape)
        if shape != self._shape:
            self._shape = shape
            y, x = np.indices(shape[2:], np.float64)
            self._positions = np.stack([x.ravel(), y.ravel()], axis=1)
            self._spatial = self._filter(self._positions / self.param.multi_stage_meanfield_param.theta_gamma)
        self.check_memory(16 * top[0].count * self._iterations, "the results of its iterations")

    @property
    def _iterations(self) -> int:
        return self.param.multi_stage_meanfield_param.num_iterations

    def capture_blocker(self) -> str | None:
        return "it builds a lattice of the image's colors on the host"

    def _filter(self, features: Any) -> GaussianFilter:
        try:
            return GaussianFilter(self.backend, make_lattice(features))
        except ValueError as error:
            raise self.data_error(f"the image's pixels and colors {error}") from None

    def _bilateral_filters(self, images: Array) -> list[GaussianFilter]:
        """One filter for each image."""
        param = self.param.multi_stage_meanfield_param
        colors = self.backend.to_host(images).reshape(*images.shape[:2], -1).transpose(0, 2, 1)
        places = self._positions / param.theta_alpha
        return [self._filter(np.concatenate([places, each / param.theta_beta], axis=1)) for each in colors]

    def _saved(self, iteration: int) -> dict[str, Array]:
        """The arrays of an iteration that its backward pass reads; without one, those of all are the same."""
        number = 0 if self.context.forward_only else iteration
        names = ("probability", "spatial", "bilateral", "message")
        return {name: self.scratch(f"{name} {number}", self._shape).array for name in names}

    def _matrix(self, index: int) -> Array:
        return self.backend.flat(self.blobs[index].data).reshape(self._channels, self._channels)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        backend, pixels = self.backend, self._pixels
        self._bilateral = self._bilateral_filters(bottom[2].data)
        pairwise = self.scratch("pairwise", self._shape).array
        scores = bottom[1].data
        for iteration in range(self._iterations):
            saved = self._saved(iteration)
            backend.softmax_forward(scores, saved["probability"], 1)
            for index, bilateral in enumerate(self._bilateral):
                image = slice(index, index + 1)
                self._spatial.forward(saved["probability"][image], saved["spatial"][image])
                bilateral.forward(saved["probability"][image], saved["bilateral"][image])
            message = pixels(saved["message"])
            backend.gemm(pixels(saved["spatial"]), self._matrix(0), message, transpose_b=True)
            backend.gemm(pixels(saved["bilateral"]), self._matrix(1), message, transpose_b=True, accumulate=True)
            backend.gemm(message, self._matrix(2), pixels(pairwise), transpose_b=True)
            backend.apply(difference, (bottom[0].data, pairwise), (top[0].data,))
            scores = top[0].data

    def _pixels(self, array: Array) -> Array:
        return flatten_pixels(self.backend, array)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        backend, pixels = self.backend, self._pixels
        names = ("scores", "pairwise", "message", "part", "probability", "unary")
        scores, pairwise, message, part, probability, unary = (
            self.scratch(f"gradient of {name}", self._shape).array for name in names
        )
        backend.copy(top[0].diff, scores)
        backend.fill(unary, 0)
        for iteration in reversed(range(self._iterations)):
            saved = self._saved(iteration)
            backend.add(scores, unary)
            backend.apply(negated, (scores,), (pairwise,))
            self._add_gradient(2, pairwise, saved["message"])
            backend.gemm(pixels(pairwise), self._matrix(2), pixels(message))
            backend.fill(probability, 0)
            for index, name in enumerate(("spatial", "bilateral")):
                self._add_gradient(index, message, saved[name])
                backend.gemm(pixels(message), self._matrix(index), pixels(part))
                self._add_filtered(name, part, scores, probability)
            backend.softmax_backward(saved["probability"], probability, scores, 1)
        for index, gradient in enumerate((unary, scores)):
            if propagate_down[index]:
                backend.copy(gradient, bottom[index].diff)
        if propagate_down[2]:
            backend.fill(bottom[2].diff, 0)

    def _add_filtered(self, name: str, dy: Array, space: Array, dx: Array) -> None:
        """Add the gradient through a filter to dx; `space` is overwritten."""
        for index, bilateral in enumerate(self._bilateral):
            image = slice(index, index + 1)
            chosen = self._spatial if name == "spatial" else bilateral
            chosen.backward(dy[image], space[image])
        self.backend.add(space, dx)

    def _add_gradient(self, index: int, dy: Array, x: Array) -> None:
        """Add dy x^T to the gradient of a matrix that multiplies x."""
        if not self.propagate_to_params[index]:
            return
        diff = self.backend.flat(self.blobs[index].diff).reshape(self._channels, self._channels)
        self.backend.gemm(self._pixels(dy), self._pixels(x), diff, transpose_a=True, accumulate=self.accumulate(index))
