"""CPUs that play other devices: one captures graphs, which run their steps, one has a stream of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from caffepy.backend.cpu.backend import CpuBackend
from caffepy.backend.types import view

NET = """
layer { name: "data" type: "DummyData" top: "data" top: "label" dummy_data_param {
  shape { dim: 6 dim: 5 } shape { dim: 6 } data_filler { type: "constant" value: 0.5 }
  data_filler { type: "constant" value: 1 } } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip"
  inner_product_param { num_output: 8 weight_filler { type: "xavier" } } }
layer { name: "relu" type: "ReLU" bottom: "ip" top: "ip" }
layer { name: "drop" type: "Dropout" bottom: "ip" top: "ip" }
layer { name: "last" type: "InnerProduct" bottom: "ip" top: "last"
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "last" bottom: "label" top: "loss" }
"""
"""A net with dropout whose data are the same numbers in every pass."""


class FakeGraphBackend(CpuBackend):
    """A CPU backend that captures: work runs when its graph is launched."""

    asynchronous = True
    captures = True

    def __init__(self) -> None:
        super().__init__(1)
        self.launches = 0

    def capture(self, *works: Callable[[], None]) -> Any:
        backend = self

        class Graph:
            def launch(self) -> None:
                backend.launches += 1
                backend.capturing = True  # what a real device captures is decided before it is launched
                for work in works:
                    work()
                backend.capturing = False

        return Graph()


class OwnStream(CpuBackend):
    """A CPU that plays a device with a stream of its own, on which `zeros` clears memory.

    Outside of `activate` other work goes to another stream, and is done before the memory is cleared.
    """

    def __init__(self) -> None:
        super().__init__(1)
        self._active = 0
        self._uncleared: list[Any] = []

    @contextmanager
    def activate(self) -> Iterator[None]:
        """What waits on the stream is done before what follows."""
        while self._uncleared:
            self._uncleared.pop()[...] = 0
        self._active += 1
        try:
            with super().activate():
                yield
        finally:
            self._active -= 1

    def zeros(self, shape: tuple[int, ...], dtype: str = "float32") -> Any:
        """An array that is cleared now, or when the stream is used next."""
        array = super().zeros(shape, dtype)
        if not self._active:
            self._uncleared.append(array)
        return array


class Leaving(FakeGraphBackend):
    """One whose arrays are those that CuPy makes: each a view of flat memory of its own; it packs no weights."""

    def zeros(self, shape: tuple[int, ...], dtype: str = "float32") -> Any:
        """A view of memory that only this array has."""
        return view(np.zeros(math.prod(shape), dtype), shape)

    def keep_weights(self, plan: Any, weights: Any, given: Any = None) -> bool:
        """Never, as on a GPU."""
        return False
