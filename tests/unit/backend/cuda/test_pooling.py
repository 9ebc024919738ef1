"""How many channels a thread of a pooling takes."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest

from caffepy.backend.types import Geometry


@pytest.mark.parametrize(
    ("name", "image", "side", "pad", "width"),
    [
        ("average_forward", (1, 256, 20, 20), 13, 6, 2),  # few threads, each with many pixels
        ("average_forward", (64, 256, 20, 20), 13, 6, 8),
        ("average_forward", (1, 256, 20, 20), 3, 1, 8),
        ("average_backward", (1, 256, 20, 20), 13, 6, 8),
        ("average_forward", (1, 256, 20, 20), 20, 0, 8),  # many threads share the only window
    ],
)
def test_large_windows_have_more_threads_with_fewer_channels_each(
    cupy_or_mock: None, monkeypatch: pytest.MonkeyPatch, name: str, image: Any, side: int, pad: int, width: int
) -> None:
    pooling = importlib.import_module("caffepy.backend.cuda.pooling")
    texts: list[str] = []
    monkeypatch.setattr(pooling, "library_kernel", lambda file, kernel, text: texts.append(text))
    out = tuple(size + 2 * pad - side + 1 for size in image[2:])
    geometry = Geometry((side, side), (1, 1), (pad, pad), (1, 1))
    pooling._plan.__wrapped__(pooling.Pooling(name, image, (*image[:2], *out), geometry, "float16", "", 8, 0))
    assert re.findall(r"#define WIDTH (\d+)", texts[0]) == [str(width)]
