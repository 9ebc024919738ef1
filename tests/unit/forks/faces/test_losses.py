"""GeneralContrastiveLoss, GeneralTripletLoss and TripletLoss, against formulas written element by element."""

from __future__ import annotations

import math

import numpy as np
import pytest
from layer_harness import Floats, Runner, check_layer, gaussian, spread

from caffepy.errors import DataError, ShapeError

LABELS = np.array([0, 2, 1, 2], np.float32)
D = np.array([[0.3, 1.1, 0.7], [0.2, 0.9, 1.4], [0.8, 0.05, 2.0], [0.6, 0.4, 5.5]], np.float32)


def contrastive(more: str = "") -> str:
    return f"type: 'GeneralContrastiveLoss' general_contrastive_loss_param {{ {more} }}"


def triplet(more: str = "") -> str:
    return f"type: 'GeneralTripletLoss' general_triplet_loss_param {{ {more} }}"


def contrastive_reference(d: Floats, margin: float = 1.0, **settings: float) -> tuple[float, Floats]:
    """Loss and gradient for weights 2 and 3 and a positive margin of 0.1."""
    loss, slopes = 0.0, np.zeros_like(d)
    for i, label in enumerate(LABELS.astype(int)):
        part = min(max(d[i, label] - 0.1, 0), 4)
        loss += 2 * part
        slopes[i, label] = 2 if 0 < part < 4 else 0
        far = d[i, label] > settings.get("bound", math.inf)
        if far:
            slopes[i, label] = 2
        others = {j: d[i, j] for j in range(3) if j != label and d[i, j] < margin and not far}
        if "only" in settings and others:
            nearest = min(others, key=others.__getitem__)
            others = {nearest: others[nearest]}
        for j, distance in others.items():
            loss += 3 * math.exp(-distance) if "exp" in settings else 3 * (margin - distance)
            slopes[i, j] = -3 * math.exp(-distance) if "exp" in settings else -3
    return loss / 4, slopes / 4


COMMON = "positive_margin: 0.1 positive_weight: 2 negative_weight: 3"


@pytest.mark.parametrize(
    "more, settings",
    [
        ("", {}),
        ("negative_margin: 2", {"margin": 2}),
        ("exp_negative_weight: true", {"exp": 1}),
        ("max_negative_only: true", {"only": 1}),
        ("positive_first: true positive_upper_bound: 1.2", {"bound": 1.2}),
    ],
)
def test_general_contrastive(more: str, settings: dict[str, float]) -> None:
    result = Runner(contrastive(f"{COMMON} {more}"), [D, LABELS]).run([np.float32(1)])
    loss, slopes = contrastive_reference(D.astype(np.float64), **settings)
    assert result.tops[0] == pytest.approx(loss, rel=1e-5)
    np.testing.assert_allclose(result.bottom_diffs[0], slopes, rtol=1e-5, atol=1e-7)


def test_general_contrastive_is_a_derivative() -> None:
    check_layer(contrastive(COMMON), [D, LABELS], lambda d, _: np.array(contrastive_reference(d)[0]))


def test_outliers_and_only_one_positive() -> None:
    settings = "positive_weight: 2 negative_weight: 0 positive_outlier_thresh: 1"
    result = Runner(contrastive(settings), [D, LABELS]).run([np.float32(1)])
    assert result.tops[0] == pytest.approx(2 * (0.3 + 1 + 0.05 + 1) / 4)
    np.testing.assert_allclose(result.bottom_diffs[0].sum(1) * 4, [2, 0, 2, 0])  # type: ignore[union-attr]
    result = Runner(contrastive(f"{settings} max_positive_only: true"), [D, LABELS]).run([np.float32(1)])
    assert result.tops[0] == pytest.approx(2 * 0.05 / 4)
    np.testing.assert_allclose(result.bottom_diffs[0].sum(1) * 4, [0, 0, 2, 0])  # type: ignore[union-attr]


def test_normalized_negatives() -> None:
    result = Runner(contrastive("normalize_negative: 0.2"), [D, LABELS]).run([np.float32(1)])
    near = [(0, 2), (1, 0), (1, 1), (2, 0), (3, 0), (3, 1)]
    ratio = len(near) / 0.2 / 4
    for i, j in near:
        assert result.bottom_diffs[0][i, j] == pytest.approx(-1 / ratio / 4)  # type: ignore[index]


def test_a_moving_margin() -> None:
    runner = Runner(contrastive("add_intra_mae: true max_negative_margin: 0.02"), [D, LABELS], tops=2)
    first = runner.forward()[1]
    mean = (0.3 + 1.4 + 0.05 + 4) / 4
    near = [0.7, 0.2, 0.9, 0.8, 0.6, 0.4]
    np.testing.assert_allclose(first, [mean, sum(1 - d for d in near) / 8, min(0.01 * mean, 0.02)], rtol=1e-5)
    second = runner.forward()[1]
    margin = 1 + min(0.01 * mean, 0.02)
    np.testing.assert_allclose(second[1], sum(margin - d for d in near) / 8, rtol=1e-5)
    assert second[2] == pytest.approx(0.02)


def test_values_of_a_third_bottom() -> None:
    given = Runner(contrastive(), [np.zeros_like(D), LABELS, D]).run([np.float32(1)])
    plain = Runner(contrastive(), [D, LABELS]).run([np.float32(1)])
    assert given.tops[0] == plain.tops[0]
    np.testing.assert_array_equal(given.bottom_diffs[0], plain.bottom_diffs[0])


@pytest.mark.parametrize("hardest", [False, True])
@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("bound", [math.inf, 1.2])
def test_general_triplet(hardest: bool, center: bool, bound: float) -> None:
    more = f"margin: 0.43 hardest_only: {hardest} add_center_loss: {center} negative_weight: 3 positive_weight: 2"
    if bound < math.inf:
        more += f" positive_first: true positive_upper_bound: {bound}"
    weights = np.array([1, 2, 3, 4], np.float32)
    runner = Runner(triplet(more.replace("False", "false").replace("True", "true")), [D, LABELS, weights], tops=2)
    result = runner.run([np.float32(1), np.zeros(2, np.float32)])
    loss, slopes = 0.0, np.zeros((4, 3))
    for i, label in enumerate(LABELS.astype(int)):
        own = D[i, label]
        terms = {j: own + 0.43 - D[i, j] for j in range(3) if j != label and own + 0.43 > D[i, j]}
        if hardest and terms:
            best = max(terms, key=terms.__getitem__)
            terms = {best: terms[best]}
        if own > bound:
            terms = {}
        loss += 3 * sum(terms.values())
        for j in terms:
            slopes[i, j] = -3 * weights[i]
        slopes[i, label] = 2 * weights[i] if terms or center or own > bound else 0
    assert result.tops[0] == pytest.approx(loss / 4, rel=1e-5)
    np.testing.assert_allclose(result.bottom_diffs[0], slopes / 4, rtol=1e-5)
    label = (np.arange(4), LABELS.astype(int))
    np.testing.assert_allclose(result.tops[1], [D[label].mean(), (D.sum() - D[label].sum()) / 8], rtol=1e-5)


def test_triplets() -> None:
    a, p, n = (spread((5, 4), step=0.1, seed=i) for i in range(3))

    def reference(a: Floats, p: Floats, n: Floats) -> Floats:
        return np.maximum(1.5 + ((a - p) ** 2).sum(1) - ((a - n) ** 2).sum(1), 0).sum() / 10

    text = "type: 'TripletLoss' triplet_loss_param { margin: 1.5 }"
    check_layer(text, [a, p, n], reference)
    check_layer(text, [a, p, n], reference, loss_weight=0.3)
    with pytest.raises(ShapeError, match="one shape"):
        Runner(text, [a, p, n[:, :3]])


@pytest.mark.parametrize("text", [contrastive(), triplet()])
def test_bad_input(text: str) -> None:
    with pytest.raises(DataError, match="label of 'b' is outside 0 to 2"):
        Runner(text, [D, LABELS + 1]).forward()
    with pytest.raises(ShapeError, match="two classes"):
        Runner(text, [D[:, :1], LABELS])
    with pytest.raises(ShapeError):
        Runner(text, [gaussian((4, 3)), LABELS[:3]])
