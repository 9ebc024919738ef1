"""Which way a convolution is computed on the CPU."""

from __future__ import annotations

from caffepy.backend.cpu.convolution.direct import TileConvolution
from caffepy.backend.cpu.convolution.grouped import GroupedConvolution, is_grouped
from caffepy.backend.cpu.convolution.plain import PlainConvolution
from caffepy.backend.cpu.convolution.product import (
    PixelConvolution,
    ProductConvolution,
    is_pixels,
    is_product,
)
from caffepy.backend.cpu.convolution.winograd.passes import WinogradConvolution, is_winograd
from caffepy.backend.cpu.workspace import Workspace
from caffepy.backend.handles import Convolution
from caffepy.backend.layout import CHANNELS_LAST
from caffepy.backend.types import Geometry


def plan_convolution(
    threads: int, workspace: Workspace, x_shape: tuple[int, ...], weights_shape: tuple[int, ...], geometry: Geometry
) -> Convolution:
    """A planned convolution over any number of spatial axes."""
    kind = TileConvolution
    if is_grouped(weights_shape, geometry):
        kind = GroupedConvolution
    elif is_product(x_shape, weights_shape, geometry):
        kind = ProductConvolution
    elif is_pixels(geometry):
        kind = PixelConvolution
    elif is_winograd(x_shape, weights_shape, geometry):
        kind = WinogradConvolution
    if len(x_shape) in CHANNELS_LAST:
        return kind(threads, workspace, x_shape, weights_shape, geometry)
    return PlainConvolution(threads, workspace, x_shape, weights_shape, geometry, kind)
