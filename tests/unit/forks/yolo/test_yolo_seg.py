"""YoloSeg."""

from __future__ import annotations

import numpy as np
import pytest
from layer_harness import BACKENDS, Runner, assert_near, gaussian

from caffepy.errors import ShapeError


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("weighted", [False, True])
def test_loss_and_gradient(backend: str, weighted: bool) -> None:
    x = gaussian((2, 3, 4, 5))
    target = np.random.default_rng(1).choice([0, 0.3, 1], x.shape).astype(np.float32)
    sums = np.random.default_rng(2).uniform(1, 15, (2, 3)).astype(np.float32)
    inputs = [x, target, sums] if weighted else [x, target]
    runner = Runner("type: 'YoloSeg' yolo_seg_param { object_scale: 0.7 }", inputs, backend, loss_weight=3.0)
    difference = 0.7 * (1 / (1 + np.exp(-x.astype(np.float64))) - target)
    if weighted:
        total = sums.sum(0)[:, None, None].astype(np.float64)
        difference *= np.where(target > 0.5, 2 - total / (2 * 4 * 5 - total), 1)
    assert_near(runner.forward()[0], (difference**2).sum() / 2, 1e-5, "loss")
    assert_near(runner.backward([np.array(3, "f")])[0], 3 * difference / 2, 1e-5, "gradient")


def test_mistakes_are_named() -> None:
    with pytest.raises(ShapeError, match="same count"):
        Runner("type: 'YoloSeg'", [gaussian((2, 3, 4)), gaussian((2, 3, 5))])
    with pytest.raises(ShapeError, match="one number for each mask"):
        Runner("type: 'YoloSeg'", [gaussian((2, 3, 4)), gaussian((2, 3, 4)), gaussian((2, 4))])
