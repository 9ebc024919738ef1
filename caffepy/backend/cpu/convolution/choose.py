"""Convolutions on the CPU: algorithm selection."""

from __future__ import annotations

from caffepy.backend.cpu.convolution.channels_first import PlainConvolution
from caffepy.backend.cpu.convolution.direct import TileConvolution
from caffepy.backend.cpu.convolution.grouped import GroupedConvolution, is_grouped
from caffepy.backend.cpu.convolution.pointwise import PixelConvolution, ProductConvolution, is_pixels, is_product
from caffepy.backend.cpu.convolution.winograd import WinogradConvolution, is_winograd
from caffepy.backend.cpu.memory import CpuMemory
from caffepy.backend.interface import ConvolutionPrimitives
from caffepy.backend.types import CHANNELS_LAST, Array, Convolution, Geometry


class CpuConvolution(ConvolutionPrimitives, CpuMemory):
    """`ConvolutionPrimitives` of the CPU."""

    def plan_convolution(
        self, x_shape: tuple[int, ...], weights_shape: tuple[int, ...], geometry: Geometry, dtype: str = "float32"
    ) -> Convolution:
        assert dtype == "float32", f"the CPU computes in float32, not {dtype}"
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
            return kind(self.threads, self._workspace, x_shape, weights_shape, geometry)
        return PlainConvolution(self.threads, self._workspace, x_shape, weights_shape, geometry, kind)

    def convolve_and_add(
        self, plan: Convolution, x: Array, weights: Array, bias: Array | None, residual: Array, y: Array, relu: bool
    ) -> None:
        if isinstance(plan, TileConvolution):
            plan.forward(x, weights, bias, y, relu, residual=residual)
        else:
            super().convolve_and_add(plan, x, weights, bias, residual, y, relu)

    def keep_weights(self, plan: Convolution, weights: Array, given: Array | None = None) -> bool:
        if not isinstance(plan, TileConvolution):
            return False
        plan.keep(weights)
        if given is not None:
            plan.use_kept_for(given)
        return True
