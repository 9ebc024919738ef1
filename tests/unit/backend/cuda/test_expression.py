"""Which kernels formulas get: how many elements a thread loads at once, and whether one launch is enough."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from caffepy.backend.types import memory_axes
from caffepy.layers.normalization import scale_gradient, scaled_unit

IMAGE, PIXELS, IMAGES, CHANNELS = (32, 512, 38, 38), (32, 1, 38, 38), (32, 1, 1, 1), (1, 512, 1, 1)


def signature(module: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """An array of that shape and dtype in memory order."""
    order = memory_axes(len(shape))
    array = np.broadcast_to(np.zeros((), dtype), [shape[a] for a in order])
    steps = np.cumprod([array.itemsize, *array.shape[:0:-1]])[::-1].tolist()
    return module.Signature(shape, tuple(steps[order.index(a)] for a in range(len(shape))), 16, array.dtype.char)


@pytest.mark.parametrize("norms", [PIXELS, IMAGES])
def test_values_of_pixels_and_channels_take_one_launch_with_wide_loads(
    cupy_or_mock: None, monkeypatch: pytest.MonkeyPatch, norms: tuple[int, ...]
) -> None:
    module, texts = importlib.import_module("caffepy.backend.cuda.expression"), []
    monkeypatch.setattr(module, "compiled", lambda text, _: texts.append(text))
    x, norm, scale = (
        signature(module, *given) for given in ((IMAGE, "float16"), (norms, "float32"), (CHANNELS, "float32"))
    )
    call = module.Call(scaled_unit, (x, norm, scale), (x,), 0, 0)
    assert module._plan_apply.__wrapped__(call) is not None
    call = module.Call(scale_gradient, (x, x, norm), (scale,), 0, 0)
    assert module._reduction_launch.__wrapped__(call, IMAGE) is not None
    assert len(texts) == 2 and all("load_raw<8>(x_p_, i_)" in text for text in texts)
