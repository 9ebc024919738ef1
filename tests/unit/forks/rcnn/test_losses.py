"""Losses of online hard example mining (the loss of each position, the divisor PRE_FIXED), and FocalLoss."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from layer_harness import BACKENDS, Runner, assert_near, check_layer, gaussian

from caffepy.errors import ConfigError, ShapeError


def log_softmax(x):
    x = x - x.max(1, keepdims=True)
    return x - np.log(np.exp(x).sum(1, keepdims=True))


@pytest.mark.parametrize("kind", ["type: 'SoftmaxWithLossOHEM'", "type: 'SoftmaxWithLoss'"])
@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 1, 1), (3, 4, 2, 3)])
def test_softmax_loss_of_each_position(kind, shape):
    labels = np.random.default_rng(1).integers(-1, shape[1], (shape[0], *shape[2:])).astype(np.float32)
    labels = labels.reshape(shape[0], 1, *shape[2:]) if len(shape) > 2 else labels

    def reference(x, labels):
        named = labels.reshape(shape[0], 1, *shape[2:]).astype(int)
        each = -np.take_along_axis(log_softmax(x), named % shape[1], 1).reshape(labels.shape)
        each = np.where(labels == -1, 0, each)
        return each.sum() / 32, np.exp(log_softmax(x)), each

    loss = "loss_param { ignore_label: -1 normalization: PRE_FIXED pre_fixed_normalizer: 32 }"
    inputs = [gaussian(shape) * 2, labels]
    check_layer(f"{kind} {loss}", inputs, reference, tops=3, gradients=False)
    check_layer(f"{kind} {loss}", inputs, lambda x, labels: reference(x, labels)[0])


def smooth(d, sigma=1.0):
    return np.where(abs(d) < 1 / sigma**2, 0.5 * (sigma * d) ** 2, abs(d) - 0.5 / sigma**2)


@pytest.mark.parametrize(
    ("settings", "divisor"),
    [
        ("", "positions"),
        ("normalization: FULL", "positions"),
        ("normalization: BATCH_SIZE", "batch"),
        ("normalize: false", "batch"),
        ("normalization: NONE", 1),
        ("normalization: PRE_FIXED", 1),
        ("normalization: PRE_FIXED pre_fixed_normalizer: 128", 128),
        ("normalization: PRE_FIXED pre_fixed_normalizer: 0.5", 1),
    ],
)
@pytest.mark.parametrize("shape", [(4, 8), (3, 4, 2, 3)])
def test_smooth_l1_loss_ohem(settings, divisor, shape):
    positions = shape[0] * int(np.prod(shape[2:]))
    divisor = {"positions": positions, "batch": shape[0]}.get(divisor, divisor)

    def reference(a, b, w):
        each = smooth(w * (a - b)).sum(1).reshape(shape[0], 1, *(shape[2:] or (1, 1)))
        return each.sum() / divisor, each

    inputs = [gaussian(shape, i) for i in range(3)]
    text = f"type: 'SmoothL1LossOHEM' loss_param {{ {settings} }}"
    check_layer(text, inputs, reference, tops=2, gradients=False)
    check_layer(text, inputs, lambda *values: reference(*values)[0])


@pytest.mark.parametrize("weights", [0, 1, 2])
def test_smooth_l1_loss_of_r_fcn(weights):
    """The fork's SmoothL1Loss: PRE_FIXED and a second top; the default divides by N as before."""
    inputs = [gaussian((4, 6), i) for i in range(2 + weights)]

    def reference(a, b, *w):
        each = smooth((w[0] if w else 1) * (a - b), 2) * (w[1] if len(w) > 1 else 1)
        return each.sum() / 9, each.sum(1).reshape(4, 1, 1, 1)

    text = "type: 'SmoothL1Loss' smooth_l1_loss_param { sigma: 2 }"
    fixed = "loss_param { normalization: PRE_FIXED pre_fixed_normalizer: 9 }"
    check_layer(f"{text} {fixed}", inputs, reference, tops=2, gradients=False)
    check_layer(f"{text} {fixed}", inputs, lambda *values: reference(*values)[0])
    check_layer(text, inputs, lambda *values: reference(*values)[0] * 9 / 4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sigmoid_loss_with_a_fixed_divisor(backend):
    x, targets = gaussian((3, 4)), (gaussian((3, 4), 1) > 0).astype(np.float32)
    text = "type: 'SigmoidCrossEntropyLoss' loss_param {{ normalization: {} }}"
    one, fixed = (
        Runner(text.format(mode), [x, targets], backend).forward()[0]
        for mode in ("NONE", "PRE_FIXED pre_fixed_normalizer: 8")
    )
    assert_near(fixed, one / 8, 1e-6, "loss")


@pytest.mark.parametrize("tail", [(2, 3), (6,)])
def test_weighted_sigmoid_loss(tail):
    x, targets = gaussian((3, 4, 2, 3)), (gaussian((3, 4, *tail), 1) > 0).astype(np.float32)
    weights = (gaussian((3, 4, *tail), 2) > 0.5) * 0.25

    def reference(x, t, w):
        p = 1 / (1 + np.exp(-x))
        t, w = t.reshape(x.shape), w.reshape(x.shape)
        return -(w * (t * np.log(p) + (1 - t) * np.log(1 - p))).sum() / (w.sum() or 1)

    text = "type: 'SigmoidCrossEntropyLoss'"
    check_layer(text, [x, targets, weights.astype(np.float32)], reference, loss_weight=2)
    runner = Runner(text, [x, targets, np.zeros_like(targets)])
    loss = runner.forward()[0]
    diffs = runner.backward([np.ones((), np.float32)], [True, False, True])
    assert loss == 0 and not diffs[0].any() and not diffs[2].any()
    with pytest.raises(ConfigError, match="divided by their sum"):
        Runner(f"{text} loss_param {{ ignore_label: 1 }}", [x, targets, targets])
    with pytest.raises(ShapeError, match="weights must have"):
        Runner(text, [x, targets, targets[:2]])


def test_refused():
    with pytest.raises(ConfigError, match="third top has no definition with label_smoothing"):
        Runner("type: 'SoftmaxWithLoss' loss_param { label_smoothing: 0.1 }", [gaussian((2, 3)), np.zeros(2)], tops=3)
    with pytest.raises(ShapeError, match="at most four axes"):
        Runner("type: 'SmoothL1Loss'", [gaussian((2, 3, 1, 1, 1))] * 2, tops=2)


# -- FocalLoss -------------------------------------------------------------------------------------------


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
