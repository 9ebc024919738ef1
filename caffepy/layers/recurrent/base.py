"""What layers over time steps have in common: bottoms, tops, the input's part of the sums, the state between passes.

Caffe unrolls such a layer into an inner net of small layers with shared weights (`recurrent_layer.cpp`). Here one
product makes the input's part of all time steps; what a time step needs of the one before is computed in a loop.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from caffepy.backend import Array
from caffepy.blob import Blob
from caffepy.layers.core.base import Blobs, Layer
from caffepy.layers.core.formulas import identity, product_with_channel, total_with_channel
from caffepy.layers.core.order import LayoutAdapter

log = logging.getLogger(__name__)

Named = Iterator[tuple[str, str, Array]]
"""Layer and blob of Caffe's unrolled net and its values."""


class RecurrentLayer(Layer):
    """A layer over T time steps of N streams with a hidden state of D = num_output numbers.

    Bottoms: x (T, N, ...); cont (T, N), 0 where a sequence begins, 1 elsewhere; then where it is there x_static
    (N, ...), which is added at every time step; then with `expose_hidden` the states before the first time step, each
    (1, N, D). Tops: the output (T, N, D), then with `expose_hidden` the states after the last time step.

    Parameters: input weights (S, K), bias (S,), weights (S, K_static) of x_static if it is there, then the
    subclass's; S is the number of sums that a time step takes. Without `expose_hidden` the states are kept for the next
    pass, 0 at first, and `cont` decides whether it goes on with them. As in Caffe, no gradient passes through the
    exposed states, nor from one pass to another; those bottoms get a gradient of 0.
    """

    bottoms = (2, 5)
    tops = (1, 3)
    no_gradient_bottoms = frozenset({1})
    no_gradient_tops = frozenset({1, 2})
    states: ClassVar[int]
    """How many states are carried from one time step to the next."""
    sums: ClassVar[int]
    """S / D."""

    _x_shape: tuple[int, ...] | None = None
    _static_shape: tuple[int, ...] | None = None

    # -- to be written by layer types ----------------------------------------------------------------

    def add_recurrent_parameters(self, size: int) -> None:
        """Make the parameters behind those of the input."""
        raise NotImplementedError

    def run(self, cont: Array, first: Sequence[Array], top: Array) -> Sequence[Array]:
        """All time steps, given the states before the first, (N, D) each; returns the states after the last.

        The sums lie in `self.sums_of_steps()`, the input's part is in them.
        """
        raise NotImplementedError

    def run_back(self, cont: Array, first: Sequence[Array], top: Blob) -> None:
        """Turn `self.sums_of_steps()` into the gradients by the sums; those of the subclass's parameters."""
        raise NotImplementedError

    def inner_blobs(self) -> Named:
        """What `debug_info` shows after a forward pass."""
        raise NotImplementedError

    # -- shapes --------------------------------------------------------------------------------------

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        param = self.param.recurrent_param
        if param.num_output < 1:
            raise self.error("recurrent_param needs num_output")
        self._size = param.num_output
        exposed = self.states if param.expose_hidden else 0
        if len(top) != 1 + exposed:
            raise self.error(f"takes {1 + exposed} top blobs, has {len(top)} (expose_hidden: {param.expose_hidden})")
        if len(bottom) - 2 - exposed not in (0, 1):
            raise self.error(
                f"takes {2 + exposed} bottom blobs, and one more with a static input, has {len(bottom)} "
                f"(expose_hidden: {param.expose_hidden})"
            )
        self._static = bottom[2] if len(bottom) > 2 + exposed else None
        self._check_shapes(bottom)
        rows = self.sums * self._size
        self.add_parameter((rows, math.prod(bottom[0].shape[2:])), param.weight_filler)
        self.add_parameter((rows,), param.bias_filler)
        if self._static is not None:
            self.add_parameter((rows, math.prod(self._static.shape[1:])), param.weight_filler)
        self.add_recurrent_parameters(self._size)

    def _hidden_bottoms(self, bottom: Blobs) -> Blobs:
        exposed = self.states if self.param.recurrent_param.expose_hidden else 0
        return bottom[len(bottom) - exposed :]

    def _check_shapes(self, bottom: Blobs) -> None:
        x, cont = bottom[:2]
        if len(x.shape) < 2 or x.shape[0] < 1:
            raise self.shape_error("the first bottom needs at least two axes, (time steps, streams, ...)", x)
        if cont.shape != x.shape[:2]:
            raise self.shape_error("the second bottom must have the first one's time steps and streams", x, cont)
        if self._static is not None and self._static.shape[:1] != x.shape[1:2]:
            raise self.shape_error("the static input must have as many streams as the first bottom", x, self._static)
        for blob in self._hidden_bottoms(bottom):
            if blob.shape != (1, x.shape[1], self._size):
                raise self.shape_error(f"a state must have the shape 1 {x.shape[1]} {self._size}", x, blob)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        if self._static is not None:
            self._static = bottom[2]
        self._check_shapes(bottom)
        self._fit(bottom[0], self.blobs[0])
        steps, streams = bottom[0].shape[:2]
        top[0].reshape((steps, streams, self._size))
        for blob in top[1:]:
            blob.reshape((1, streams, self._size))
        if self._x_shape != bottom[0].shape:
            self._reshape_input(bottom[0].shape)
        if self._static is not None and self._static_shape != self._static.shape:
            self._fit(self._static, self.blobs[2])
            self._static_shape = shape = self._static.shape
            matrix = (shape[0], math.prod(shape[1:]))
            self._static_x, self._static_dx = (LayoutAdapter(self.backend, shape, matrix) for _ in range(2))

    def _fit(self, blob: Blob, weights: Blob) -> None:
        leading = 2 if weights is self.blobs[0] else 1
        if math.prod(blob.shape[leading:]) != weights.shape[1]:
            raise self.shape_error(f"the weights need {weights.shape[1]} numbers of each", blob, weights)

    def _reshape_input(self, shape: tuple[int, ...]) -> None:
        matrix = (shape[0] * shape[1], math.prod(shape[2:]))
        self._x, self._dx = (LayoutAdapter(self.backend, shape, matrix) for _ in range(2))
        if self._x_shape is None or self._x_shape[1] != shape[1]:
            self._kept = [self.backend.zeros((shape[1], self._size)) for _ in range(self.states)]
        self._x_shape = shape

    def state(self) -> Sequence[Array]:
        return () if self.param.recurrent_param.expose_hidden else self._kept

    # -- what subclasses use -------------------------------------------------------------------------

    def steps_buffer(self, name: str, width: int = 1) -> Array:
        """A buffer (T, N, width * D) that lasts from the forward to the backward pass."""
        assert self._x_shape is not None
        return self.scratch(name, (*self._x_shape[:2], width * self._size)).array

    def step_buffer(self, name: str) -> Array:
        """A buffer (N, D)."""
        assert self._x_shape is not None
        return self.scratch(name, (self._x_shape[1], self._size)).array

    def sums_of_steps(self) -> Array:
        """(T, N, S): the sums at each time step, and what the subclass makes of them."""
        return self.steps_buffer("sums", self.sums)

    def continued(self, state: Array, cont: Array, out: Array) -> None:
        """out = the state (N, D) where a stream goes on, 0 where a sequence begins."""
        self.backend.apply(product_with_channel, (state, cont), (out,), axis=0)

    def as_rows(self, array: Array) -> Array:
        """(T, N, W) as (T N, W)."""
        return array.reshape(array.shape[0] * array.shape[1], array.shape[2])

    def put_weight_gradient(self, index: int, dy: Array, x: Array) -> None:
        """The gradient dy^T x of a parameter, where it is wanted."""
        if self.propagate_to_params[index]:
            self.backend.gemm(dy, x, self.blobs[index].diff, transpose_a=True, accumulate=self.accumulate(index))

    def put_bias_gradient(self, index: int, dy: Array) -> None:
        """The gradient of a bias: the sum over all rows, where it is wanted."""
        if self.propagate_to_params[index]:
            self.backend.reduce(identity, (dy,), (self.blobs[index].diff,), accumulate=self.accumulate(index))

    # -- running -------------------------------------------------------------------------------------

    def _first_states(self, bottom: Blobs) -> list[Array]:
        hidden = self._hidden_bottoms(bottom)
        return [blob.data.reshape(blob.shape[1:]) for blob in hidden] or self._before()

    def _before(self) -> list[Array]:
        """The kept states as they were before this pass."""
        return [self.step_buffer(f"state {index}") for index in range(self.states)]

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        backend, sums = self.backend, self.sums_of_steps()
        rows = self.as_rows(sums)
        backend.gemm(self._x.load(bottom[0].data), self.blobs[0].data, rows, transpose_b=True)
        backend.apply(total_with_channel, (rows, self.blobs[1].data), (rows,))
        if self._static is not None:
            shared = self.scratch("static sums", sums.shape[1:]).array
            backend.gemm(self._static_x.load(self._static.data), self.blobs[2].data, shared, transpose_b=True)
            backend.apply(total_with_channel, (sums, shared), (sums,))
        exposed = self.param.recurrent_param.expose_hidden
        if not exposed:
            for kept, before in zip(self._kept, self._before(), strict=True):
                backend.copy(kept, before)
        last = self.run(bottom[1].data, self._first_states(bottom), top[0].data)
        targets = [blob.data.reshape(blob.shape[1:]) for blob in top[1:]] if exposed else self._kept
        for value, target in zip(last, targets, strict=True):
            backend.copy(value, target)
        self.save_top(top)
        if self.param.recurrent_param.debug_info and backend.holds_values:
            self._log_blobs()

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        self.run_back(bottom[1].data, self._first_states(bottom), top[0])
        sums = self.sums_of_steps()
        rows = self.as_rows(sums)
        self.put_bias_gradient(1, rows)
        self.put_weight_gradient(0, rows, self._x.target(bottom[0].data))
        if propagate_down[0]:
            self.backend.gemm(rows, self.blobs[0].data, self._dx.target(bottom[0].diff))
            self._dx.store(bottom[0].diff)
        if self._static is not None:
            self._static_backward(sums, self._static, propagate_down[2])
        first = len(bottom) - len(self._hidden_bottoms(bottom))
        for blob, down in zip(bottom[first:], propagate_down[first:], strict=True):
            if down:
                self.backend.fill(blob.diff, 0)

    def _static_backward(self, sums: Array, static: Blob, down: bool) -> None:
        if not down and not self.propagate_to_params[2]:
            return
        shared = self.scratch("static gradient", sums.shape[1:]).array
        self.backend.reduce(identity, (sums,), (shared,))
        self.put_weight_gradient(2, shared, self._static_x.target(static.data))
        if down:
            self.backend.gemm(shared, self.blobs[2].data, self._static_dx.target(static.diff))
            self._static_dx.store(static.diff)

    # -- debug_info ----------------------------------------------------------------------------------

    def capture_blocker(self) -> str | None:
        return "its debug_info reads numbers on the host" if self.param.recurrent_param.debug_info else None

    def _log_blobs(self) -> None:
        for layer, blob, values in self.inner_blobs():
            mean = float(np.abs(self.backend.to_host(values)).mean())
            log.info("    [Forward] Layer %s_%s, top blob %s data: %.6g", self.name, layer, blob, mean)
