"""FocalLoss."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from layer_harness import BACKENDS, Runner, check_layer, gaussian

from caffepy.errors import ConfigError

Floats = Any


def focal_loss(x: Floats, labels: Floats, alpha: float, gamma: float, ignored: int | None, divisor: str) -> float:
    """Classes along axis 1, the positions behind it."""
    rows = np.moveaxis(x.reshape(*x.shape[:2], -1), 1, 2).reshape(-1, x.shape[1])
    powers = np.exp(rows - rows.max(1, keepdims=True))
    labels = labels.reshape(-1).astype(int)
    kept = np.ones(len(labels), bool) if ignored is None else labels != ignored
    p = (powers / powers.sum(1, keepdims=True))[kept, labels[kept]]
    counts = {"VALID": kept.sum(), "FULL": len(labels), "BATCH_SIZE": len(x), "NONE": 1}
    return float((-alpha * (1 - p) ** gamma * np.log(p)).sum() / max(counts[divisor], 1))


@pytest.mark.parametrize("shape", [(4, 5), (2, 5, 3, 2)])
@pytest.mark.parametrize(
    "alpha, gamma, ignored, divisor",
    [(0.25, 2.0, None, "VALID"), (1.0, 0.0, 1, "VALID"), (0.5, 1.5, 2, "FULL"), (2.0, 3.0, None, "BATCH_SIZE")],
)
def test_formula_and_gradient(
    shape: tuple[int, ...], alpha: float, gamma: float, ignored: int | None, divisor: str
) -> None:
    labels = np.random.default_rng(2).integers(0, 5, (shape[0], *shape[2:])).astype(np.float32)
    text = f"focal_loss_param {{ alpha: {alpha} gamma: {gamma} }} loss_param {{ normalization: {divisor} "
    text += "}" if ignored is None else f"ignore_label: {ignored} }}"

    def reference(x: Floats, labels: Floats) -> Floats:
        return np.array(focal_loss(x, labels, alpha, gamma, ignored, divisor))

    check_layer(f"type: 'FocalLoss' {text}", [gaussian(shape), labels], reference)


@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 3, 4, 5)])
def test_classes_along_another_axis_and_the_probabilities(shape: tuple[int, ...]) -> None:
    x = gaussian(shape)
    labels = np.random.default_rng(1).integers(0, 4, (*shape[:2], *shape[3:])).astype(np.float32)
    powers = np.exp(x.astype(np.float64))
    wanted = powers / powers.sum(2, keepdims=True)
    p = np.take_along_axis(wanted, np.expand_dims(labels, 2).astype(int), 2)
    for backend in BACKENDS:
        runner = Runner("type: 'FocalLoss' softmax_param { axis: 2 }", [x, labels], backend, tops=2)
        loss, probabilities = runner.forward()
        np.testing.assert_allclose(probabilities, wanted, rtol=1e-5)
        assert float(loss) == pytest.approx((-0.25 * (1 - p) ** 2 * np.log(p)).mean(), rel=1e-5)
        slope = 0.25 * (1 - p) ** 2 * (1 - 2 * p * np.log(p) / (1 - p)) / p.size
        diff = runner.backward([np.ones((), "f"), np.zeros(shape, "f")])[0]
        one_hot = np.arange(4).reshape(4, *(1,) * (len(shape) - 3)) == np.expand_dims(labels, 2)
        np.testing.assert_allclose(diff, slope * (wanted - one_hot), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sure_predictions_have_a_finite_loss_and_gradient(backend: str) -> None:
    x = np.array([[100, 0], [100, 0]], np.float32)
    runner = Runner("type: 'FocalLoss' focal_loss_param { alpha: 1 }", [x, np.array([0, 1], "f")], backend)
    assert float(runner.forward()[0]) == pytest.approx(87.336 / 2, rel=1e-3)
    np.testing.assert_allclose(runner.backward([np.ones((), "f")])[0], [[0, 0], [0.5, -0.5]], atol=1e-6)


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match="alpha is 0"):
        Runner("type: 'FocalLoss' focal_loss_param { alpha: 0 }", [np.zeros((1, 2), "f"), np.zeros(1, "f")])
