"""SegmentationEvaluate."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
from layer_harness import BACKENDS, Runner

from caffepy.errors import ShapeError


@pytest.mark.parametrize("backend", BACKENDS)
def test_masks_of_one_size(backend: str) -> None:
    random = np.random.default_rng(1)
    found, wanted = random.uniform(0, 1, (2, 2, 3, 6, 5)).astype(np.float32)
    wanted[:, 2] = 0
    runner = Runner(
        "type: 'SegmentationEvaluate' segmentation_evaluate_param { threshold: 0.3 }", [found, wanted], backend
    )
    a, b = found[0] > 0.3, wanted[0] > 0.3
    overlaps = [(a[c] & b[c]).sum() / (a[c] | b[c]).sum() for c in range(3)]
    np.testing.assert_allclose(runner.forward()[0][0, 0, 0], overlaps, rtol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_predictions_of_another_size_are_resized(backend: str) -> None:
    random = np.random.default_rng(1)
    found = random.uniform(0, 1, (1, 3, 4, 4)).astype(np.float32)
    wanted = random.uniform(0, 1, (1, 3, 8, 12)).astype(np.float32)
    wanted[:, 1] = 0
    found[:, 2] = 0
    runner = Runner("type: 'SegmentationEvaluate'", [found, wanted], backend)
    resized = cv2.resize((found[0, 0] * 255).astype(np.uint8), (12, 8)) > 127
    mask = wanted[0, 0] > 0.5
    overlap = (resized & mask).sum() / (resized | mask).sum()
    np.testing.assert_allclose(runner.forward()[0][0, 0, 0], [overlap, -1, 0], rtol=1e-6)


def test_mistakes_are_named() -> None:
    with pytest.raises(ShapeError, match="as many channels"):
        Runner("type: 'SegmentationEvaluate'", [np.zeros((1, 2, 3, 3), "f"), np.zeros((1, 3, 3, 3), "f")])
