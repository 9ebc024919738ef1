"""Embed."""

from __future__ import annotations

from caffepy.layers.core.base import Blobs, Layer, register_layer
from caffepy.layers.core.formulas import identity, total_with_channel
from caffepy.layers.core.index_check import IndexCheck
from caffepy.layers.core.layout_adapter import LayoutAdapter


@register_layer("Embed")
class EmbedLayer(Layer):
    """y = table[x] + bias (Caffe's `embed_layer.cpp`).

    Shapes: x any, table (input_dim, num_output), bias (num_output,) unless `bias_term` is false, y (*x, num_output).
    Indices are rounded towards 0. The gradient of a row of the table is the sum of dy over its indices.

    Raises:
        ConfigError: num_output or input_dim is 0.
        DataError: an index is outside 0 to input_dim - 1.
    """

    recordable = True
    no_gradient_bottoms = frozenset({0})

    _shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        param = self.param.embed_param
        for name in ("num_output", "input_dim"):
            if getattr(param, name) < 1:
                raise self.error(f"embed_param.{name} must be at least 1")
        self.add_parameter((param.input_dim, param.num_output), param.weight_filler)
        if param.bias_term:
            self.add_parameter((param.num_output,), param.bias_filler)
        self._check = IndexCheck(
            self, f"element {{}} of '{bottom[0].title}' is outside 0 to {param.input_dim - 1}; correct it, or give "
            "embed_param a larger input_dim"
        )  # fmt: skip

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        width = self.param.embed_param.num_output
        top[0].reshape((*bottom[0].shape, width))
        shapes = (bottom[0].shape, top[0].shape)
        if shapes != self._shapes:
            self._shapes = shapes
            rows = (bottom[0].count, width)
            self._index = LayoutAdapter(self.backend, bottom[0].shape, rows[:1])
            self._y, self._dy = (LayoutAdapter(self.backend, top[0].shape, rows) for _ in range(2))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        y = self._y.target(top[0].data)
        index = self._index.load(bottom[0].data)
        self.backend.gather_rows(self.blobs[0].data, index, y, self._check.bad_index)
        if self.param.embed_param.bias_term:
            self.backend.apply(total_with_channel, (y, self.blobs[1].data), (y,))
        self._y.store(top[0].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        dy = self._dy.load(top[0].diff)
        if self.propagate_to_params[0]:
            if not self.accumulate(0):
                self.backend.fill(self.blobs[0].diff, 0)
            self.backend.scatter_add_rows(dy, self._index.load(bottom[0].data), self.blobs[0].diff)
        if self.param.embed_param.bias_term and self.propagate_to_params[1]:
            self.backend.reduce(identity, (dy,), (self.blobs[1].diff,), 1, self.accumulate(1))

    def raise_device_errors(self) -> None:
        self._check.raise_device_errors()
