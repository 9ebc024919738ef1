"""Boxes in pixels, from the rows of a detector."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from caffepy.infer.detect import detect


def test_edges_are_clipped_to_the_image_however_large_they_are() -> None:
    rows = np.array([[0, 1, 0.9, -0.5, 0.25, 3e38, 0.5], [0, 2, 0.1, 0, 0, 1, 1], [0, -1, 0.9, 0, 0, 1, 1]], np.float32)
    layers = [SimpleNamespace(type="DetectionOutput")]
    model: Any = SimpleNamespace(model=SimpleNamespace(net=SimpleNamespace(layers=layers)), run=lambda values: rows)
    steps: Any = SimpleNamespace(values=lambda pixels: pixels)
    [box] = detect(model, "street.png", np.zeros((20, 40, 3), np.float32), steps, 0.5, {1: "bicycle"})
    assert (box.xmin, box.ymin, box.xmax, box.ymax, box.name) == (0, 5, 40, 10, "bicycle")
