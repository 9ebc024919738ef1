"""MarginInnerProduct and LargeMarginInnerProduct."""

from __future__ import annotations

import numpy as np
import pytest
from layer_harness import BACKENDS, TEST, Floats, Runner, check_layer, gaussian

from caffepy.errors import ConfigError, DataError, ShapeError

TIMES = {"SINGLE": 1, "DOUBLE": 2, "TRIPLE": 3, "QUADRUPLE": 4}
LABELS = np.array([0, 2, 1, 2, 0], np.float32)
ROWS = np.arange(5)
X = gaussian((5, 6), 1)
W = gaussian((3, 6), 2)
BASE, GAMMA, POWER = 5.0, 0.1, 2.0
SHARE = BASE * (1 + GAMMA) ** -POWER
"""lambda of the first pass."""
SETTINGS = f"weight_filler {{ type: 'xavier' }} base: {BASE} gamma: {GAMMA} power: {POWER}"


def margin_text(kind: str, more: str = "") -> str:
    return f"type: 'MarginInnerProduct' margin_inner_product_param {{ num_output: 3 type: {kind} {SETTINGS} {more} }}"


def large_text(kind: str, more: str = "") -> str:
    return (
        "type: 'LargeMarginInnerProduct' largemargin_inner_product_param "
        f"{{ num_output: 3 type: {kind} {SETTINGS} {more} }}"
    )


def psi(angle: Floats, times: int) -> Floats:
    """(-1)^k cos(m t) - 2 k in [k pi / m, (k + 1) pi / m]."""
    k = np.floor(angle * times / np.pi)
    return (-1.0) ** k * np.cos(times * angle) - 2 * k


def scores(x: Floats, w: Floats, times: int, share: float, unit: bool) -> Floats:
    w = w / np.linalg.norm(w, axis=1, keepdims=True) if unit else w
    y = x @ w.T
    if times == 1:
        return y
    lengths = np.linalg.norm(x, axis=1) * np.linalg.norm(w, axis=1)[LABELS.astype(int)]
    plain = y[ROWS, LABELS.astype(int)]
    angle = np.arccos(plain / lengths)
    y[ROWS, LABELS.astype(int)] = (lengths * psi(angle, times) + share * plain) / (1 + share)
    return y


def slope(function: object, at: Floats) -> Floats:
    return (function(at + 1e-6) - function(at - 1e-6)) / 2e-6  # type: ignore[operator]


@pytest.mark.parametrize("kind", TIMES)
def test_large_margin_has_the_formulas_derivatives(kind: str) -> None:
    def reference(x: Floats, _: Floats, w: Floats) -> tuple[Floats, Floats]:
        return scores(x, w, TIMES[kind], SHARE, unit=False), np.array([SHARE])

    check_layer(large_text(kind), [X, LABELS], reference, tops=2, params=[W])


@pytest.mark.parametrize("kind", TIMES)
def test_margin_has_the_formula(kind: str) -> None:
    def reference(x: Floats, _: Floats, w: Floats) -> tuple[Floats, Floats]:
        return scores(x, w, TIMES[kind], SHARE, unit=True), np.array([SHARE])

    check_layer(margin_text(kind), [X, LABELS], reference, tops=2, params=[W], phase=TEST, gradients=False)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", TIMES)
def test_margin_has_the_gradients_of_sphereface(kind: str, backend: str) -> None:
    """For each sample and class alone, as SphereFace's program computes them."""
    runner = Runner(margin_text(kind), [X, LABELS], backend, params=[W])
    dy = gaussian((5, 3), 3)
    result = runner.run([dy])
    w = W.astype(np.float64) / np.linalg.norm(W, axis=1, keepdims=True)
    x = X.astype(np.float64)
    np.testing.assert_allclose(result.params[0], w, rtol=1e-5)
    np.testing.assert_allclose(result.param_diffs[0], dy.T @ x, rtol=1e-4, atol=1e-5)
    times, wanted = TIMES[kind], np.zeros_like(x)
    for i, label in enumerate(LABELS.astype(int)):
        for j in range(3):
            if j != label or times == 1:
                wanted[i] += dy[i, j] * w[j]
                continue
            length = np.linalg.norm(x[i])
            cosine = x[i] @ w[j] / length
            of_w = slope(lambda c: psi(np.arccos(c), times), cosine)
            of_x = (psi(np.arccos(cosine), times) - cosine * of_w) / length
            size = np.hypot(of_w, of_x)
            part = (of_w * w[j] + of_x * x[i]) / size
            wanted[i] += dy[i, j] * (part + SHARE * w[j]) / (1 + SHARE)
    np.testing.assert_allclose(result.bottom_diffs[0], wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("text", [margin_text, large_text])
def test_lambda_follows_the_pass(text: object) -> None:
    for number, more in ((0, ""), (7, ""), (0, "iteration: 7"), (40, "lambda_min: 3"), (3, "lambda_min: 0.001")):
        runner = Runner(text("DOUBLE", more), [X, LABELS], tops=2, pass_number=number)  # type: ignore[operator]
        start = 7 if "iteration" in more else 0
        least = float(more.split()[1]) if "lambda_min" in more else 0.0
        wanted = max(BASE * (1 + GAMMA * (start + number + 1)) ** -POWER, least)
        assert runner.forward()[1] == pytest.approx([wanted], rel=1e-5)


@pytest.mark.parametrize("text", [margin_text, large_text])
def test_axis_and_images(text: object) -> None:
    x = gaussian((2, 3, 4, 5))
    labels = np.array([0, 1, 2, 0, 1, 2], np.float32).reshape(2, 3)
    flat = Runner(text("DOUBLE", "axis: 2"), [x, labels])  # type: ignore[operator]
    assert flat.layer.blobs[0].shape == (3, 20) and flat.top[0].shape == (2, 3, 3)
    whole = Runner(text("DOUBLE"), [x, labels[:, 0]])  # type: ignore[operator]
    assert whole.layer.blobs[0].shape == (3, 60)
    rows = Runner(text("DOUBLE"), [x.reshape(2, 60), labels[:, 0]])  # type: ignore[operator]
    np.testing.assert_allclose(whole.forward()[0], rows.forward()[0], rtol=1e-5)


@pytest.mark.parametrize("text", [margin_text, large_text])
def test_bad_input(text: object) -> None:
    with pytest.raises(ConfigError, match="num_output"):
        Runner(text("DOUBLE").replace("num_output: 3", ""), [X, LABELS])  # type: ignore[operator]
    with pytest.raises(ShapeError, match="one label for each of 5"):
        Runner(text("DOUBLE"), [X, LABELS[:4]])  # type: ignore[operator]
    runner = Runner(text("DOUBLE"), [X, np.array([0, 1, 2, 3, 0], np.float32)])  # type: ignore[operator]
    runner.forward()
    with pytest.raises(DataError, match="label . of 'b' is outside 0 to 2"):
        runner.layer.raise_device_errors()
