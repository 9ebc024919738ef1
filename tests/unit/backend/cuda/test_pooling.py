"""How many images a launch of a pooling takes."""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeArray
from numpy.lib.stride_tricks import as_strided

from caffepy.backend.types import Geometry, view


@pytest.mark.parametrize("name", ["max_forward", "max_backward", "average_forward", "average_backward"])
def test_what_has_too_many_threads_for_32_bits_is_done_in_parts(
    cupy_or_mock: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Gradients have a thread for each tile of the padded plane, of which there are more than pixels."""
    pooling = importlib.import_module("caffepy.backend.cuda.pooling")
    cases: list[Any] = []
    monkeypatch.setattr(pooling, "_plan", cases.append)
    monkeypatch.setattr(pooling, "device_number", lambda: 0)
    shape = (3011, 7, 319, 319)
    assert 2**31 - 2**22 < math.prod(shape) < 2**31

    def array(dtype: str) -> Any:
        """An array without memory: one element, seen as often as the shape has elements."""
        one = np.zeros(1, dtype)
        flat = as_strided(one, (math.prod(shape),), (one.itemsize,)).view(FakeArray)
        return view(flat, shape)

    x, y, mask = array("float32"), array("float32"), array("uint8")
    arrays = {"max_forward": (x, y, mask), "max_backward": (y, mask, x)}.get(name, (x, y))
    getattr(pooling.CudaPooling, f"pool_{name}")(None, *arrays, Geometry((3, 3), (1, 1), (1, 1), (1, 1)))
    assert [case.image[0] for case in cases] == [1505, 1506]
    assert all(math.prod(case.image[:2]) * 321 * 321 < 2**31 for case in cases)
