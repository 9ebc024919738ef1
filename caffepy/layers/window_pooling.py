"""The maximum or the average of windows over any number of axes, from the backend's poolings over two axes.

A window's maximum or average is that of its slices' maxima or averages. The windows over the last two axes are pooled
first, then those over each earlier axis. An axis whose windows have dilation is pooled for itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from caffepy.backend import Array, Backend, Geometry
from caffepy.backend.types import CHANNELS_LAST
from caffepy.formats.blobs import MAX_ELEMENTS, format_shape
from caffepy.layers.layer import Layer, ScratchBuffer
from caffepy.layers.spatial_map import SpatialMap

Shape = tuple[int, ...]

SMALL_WINDOW = 255
"""Largest window whose positions fit in one byte of the mask."""
LARGEST_TABLE = 2**26
"""Most elements of all windows with dilation over an axis: the table of their positions is made on the host."""


@dataclass
class PlaneWindows:
    """Windows over two axes.

    Args:
        image: (N, C, H, W) of the array that it reads, in the memory of the blob.
        pooled: the same of the array that it writes.
        geometry: of the windows.
        mask: of MAX, where each maximum lies; None: the average.
    """

    image: Shape
    pooled: Shape
    geometry: Geometry
    mask: ScratchBuffer | None

    def forward(self, backend: Backend, x: Array, y: Array) -> None:
        if self.mask is None:
            backend.pool_average_forward(x, y, self.geometry)
        else:
            backend.pool_max_forward(x, y, self.mask.array, self.geometry)

    def backward(self, backend: Backend, dy: Array, dx: Array) -> None:
        if self.mask is None:
            backend.pool_average_backward(dy, dx, self.geometry)
        else:
            backend.pool_max_backward(dy, self.mask.array, dx, self.geometry)


@dataclass
class DilatedWindows:
    """Windows with dilation over the last axis. MAX copies the elements of each window to be neighbours.

    Args:
        image: (N, C, 1, W) of the array that it reads, in the memory of the blob.
        pooled: the same of the array that it writes.
        map: to the elements of the windows, (element, window), or for the average to the windows.
        elements: of MAX, the elements of the windows, (N, C, element, window).
        maxima: of MAX, the windows over the elements.
    """

    image: Shape
    pooled: Shape
    map: SpatialMap
    elements: ScratchBuffer | None = None
    maxima: PlaneWindows | None = None

    def forward(self, backend: Backend, x: Array, y: Array) -> None:
        if self.elements is None or self.maxima is None:
            self.map.forward(x, y)
        else:
            self.map.forward(x, self.elements.array)
            self.maxima.forward(backend, self.elements.array, y)

    def backward(self, backend: Backend, dy: Array, dx: Array) -> None:
        if self.elements is None or self.maxima is None:
            self.map.backward(dy, dx)
        else:
            self.maxima.backward(backend, dy, self.elements.array)
            self.map.backward(self.elements.array, dx)


class WindowPooling:
    """Pools arrays (N, C, spatial…), with at least one spatial axis, by their maxima or averages.

    AVE divides by the elements of the window that lie before size + pad, as Caffe does. Of equal maxima the first one
    wins.

    Args:
        layer: holds masks and intermediate arrays, and raises errors.
        image: shape of the bottom.
        pooled: shape of the top.
        geometry: of the windows; each holds an element of the image.
        is_max: whether the maximum is taken, not the average.
        numbers_pixels: whether the mask of the last two axes holds h * W + w.

    Raises:
        ShapeError: a window with dilation holds no element, or the windows' elements are more than an array may have.
    """

    def __init__(
        self, layer: Layer, image: Shape, pooled: Shape, geometry: Geometry, is_max: bool, numbers_pixels: bool = False
    ) -> None:
        self._layer, self._is_max, self._numbers_pixels = layer, is_max, numbers_pixels
        # Arrays with other numbers of axes are stored as (N, C, spatial…): each channel is an image of one channel.
        self._outer = image[:2] if len(image) in CHANNELS_LAST else (image[0] * image[1], 1)
        g = geometry
        dilation = tuple(by if size > 1 else 1 for size, by in zip(g.kernel, g.dilation, strict=True))
        axes = list(zip(image[2:], pooled[2:], g.kernel, g.stride, g.pad, dilation, strict=True))
        if len(axes) == 1:
            axes.insert(0, (1, 1, 1, 1, 0, 1))
        self._steps: list[PlaneWindows | DilatedWindows] = []
        last = len(axes) - 1
        if axes[last][5] == axes[last - 1][5] == 1:
            self._add_plane(axes, last - 1)
            last -= 2
        for at in range(last, -1, -1):
            if axes[at][5] > 1:
                self._add_dilated(axes, at)
            elif axes[at][2:5] != (1, 1, 0):
                self._add_axis(axes, at)
        self._between = [
            layer.scratch(f"pooled {number}", step.pooled, layer.dtype) for number, step in enumerate(self._steps[:-1])
        ]

    def _mask(self, pooled: Shape, kernel: Shape) -> ScratchBuffer | None:
        if not self._is_max:
            return None
        small = math.prod(kernel) <= SMALL_WINDOW and not self._numbers_pixels
        dtype = self._layer.backend.mask_dtype if small else "int32"
        return self._layer.scratch(f"mask {len(self._steps)}", pooled, dtype)

    def _add_plane(self, axes: list[Shape], at: int) -> None:
        """Add the windows over the last two axes, `at` and the next."""
        before, channels = self._before(axes, at), self._outer[1]
        sizes, out, kernel, stride, pad, dilation = zip(*axes[at:], strict=True)
        pooled = (before, channels, *out)
        geometry = Geometry(kernel, stride, pad, dilation)
        self._steps.append(PlaneWindows((before, channels, *sizes), pooled, geometry, self._mask(pooled, kernel)))

    def _add_axis(self, axes: list[Shape], at: int) -> None:
        """Add the windows over an axis; those behind it, which are pooled, are columns."""
        size, out, kernel, stride, pad, _ = axes[at]
        before, channels, columns = self._before(axes, at), self._outer[1], math.prod(a[1] for a in axes[at + 1 :])
        pooled = (before, channels, out, columns)
        geometry = Geometry((kernel, 1), (stride, 1), (pad, 0), (1, 1))
        mask = self._mask(pooled, geometry.kernel)
        self._steps.append(PlaneWindows((before, channels, size, columns), pooled, geometry, mask))

    def _add_dilated(self, axes: list[Shape], at: int) -> None:
        """Add the windows over an axis; those behind it, which are pooled, are channels."""
        size, out, kernel, stride, pad, dilation = axes[at]
        before, channels = self._before(axes, at), self._outer[1] * math.prod(a[1] for a in axes[at + 1 :])
        image, pooled, shape = (before, channels, 1, size), (before, channels, 1, out), (before, channels, kernel, out)
        if kernel * out > LARGEST_TABLE or (self._is_max and math.prod(shape) > MAX_ELEMENTS):
            raise self._layer.shape_error(
                f"kernel {kernel} with dilation {dilation} makes the elements of all windows {format_shape(shape)}; at "
                f"most {MAX_ELEMENTS}, and {LARGEST_TABLE} of a channel, are possible"
            )
        # Position of each element, (element, window).
        position = np.arange(kernel)[:, None] * dilation + np.arange(out) * stride - pad
        inside = (position >= 0) & (position < size)
        if not inside.any(0).all():
            raise self._layer.shape_error(
                f"kernel {kernel} with dilation {dilation} has a window without an element of the {size} of its axis; "
                "use a smaller dilation or pad"
            )
        if not self._is_max:
            windows = np.broadcast_to(np.arange(out), position.shape)
            share = 1 / (position < size + pad).sum(0)
            shares = np.broadcast_to(share.astype(np.float32), position.shape)[inside]
            average = SpatialMap(self._layer.backend, (out, size), windows[inside], position[inside], shares)
            self._steps.append(DilatedWindows(image, pooled, average))
            return
        # An element outside is replaced by one inside, the window's nearest, which leaves its maximum as it is.
        first, end = inside.argmax(0), kernel - inside[::-1].argmax(0)
        element = np.clip(np.arange(kernel)[:, None], first, end - 1)
        nearest = np.take_along_axis(position, element, 0)
        copies = SpatialMap(self._layer.backend, (kernel * out, size), np.arange(kernel * out), nearest)
        elements = self._layer.scratch(f"elements {len(self._steps)}", shape, self._layer.dtype)
        geometry = Geometry((kernel, 1), (1, 1), (0, 0), (1, 1))
        maxima = PlaneWindows(shape, pooled, geometry, self._mask(pooled, geometry.kernel))
        self._steps.append(DilatedWindows(image, pooled, copies, elements, maxima))

    def _before(self, axes: list[Shape], at: int) -> int:
        """Return the images of a step: those of the axes before it, which are not pooled yet."""
        return self._outer[0] * math.prod(a[0] for a in axes[:at])

    def _shaped(self, array: Array, shape: Shape) -> Array:
        backend = self._layer.backend
        return array if tuple(array.shape) == shape else backend.view(backend.flat(array), shape)

    @property
    def mask(self) -> Array:
        """Of MAX over two axes with `numbers_pixels`: h * W + w of each maximum."""
        step = self._steps[0]
        assert isinstance(step, PlaneWindows) and step.mask is not None
        return step.mask.array

    def forward(self, x: Array, y: Array) -> None:
        """Compute y, and keep where the maxima lie for `backward`."""
        arrays = [x, *(buffer.array for buffer in self._between), y]
        for number, step in enumerate(self._steps):
            source, target = self._shaped(arrays[number], step.image), self._shaped(arrays[number + 1], step.pooled)
            step.forward(self._layer.backend, source, target)

    def backward(self, dy: Array, dx: Array) -> None:
        """Pass the gradient to each window's first maximum, or evenly to the window's elements."""
        arrays = [dx, *(buffer.array for buffer in self._between), dy]
        for number, step in reversed(list(enumerate(self._steps))):
            target, source = self._shaped(arrays[number], step.image), self._shaped(arrays[number + 1], step.pooled)
            step.backward(self._layer.backend, source, target)
