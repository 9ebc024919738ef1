"""LabelSpecificAdd, LabelSpecificRescale and GlobalLSEMargin."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from layer_harness import BACKENDS, TEST, TRAIN, Floats, Runner, check_layer, gaussian

from caffepy.errors import DataError, ShapeError
from caffepy.forks.faces.margin import mean_shift, next_margin

LABELS = np.array([0, 2, 1, 2], np.float32)
HOT = np.eye(3)[LABELS.astype(int)]
X = np.array([[0.9, 0.1, -0.2], [0.3, 0.5, 0.2], [-0.7, 0.6, 0.4], [0.1, 0.2, -0.4]], np.float32)


def add(more: str) -> str:
    return f"type: 'LabelSpecificAdd' label_specific_add_param {{ {more} }}"


@pytest.mark.parametrize("bias", [-0.35, 0.5])
def test_the_labels_score_changes_in_training(bias: float) -> None:
    def reference(x: Floats, _: Floats) -> Floats:
        return x + np.where(x > -bias, bias, 0) * HOT

    check_layer(add(f"bias: {bias}"), [X, LABELS], reference, in_place=True)
    check_layer(add(f"bias: {bias}"), [X, LABELS], lambda x, _: x, phase=TEST)


def test_images() -> None:
    x = gaussian((4, 3, 1, 1))
    found = Runner(add("bias: 9"), [x, LABELS]).forward()[0]
    np.testing.assert_allclose(found[..., 0, 0], x[..., 0, 0] + 9 * HOT, rtol=1e-6)


@pytest.mark.parametrize("number, start", [(0, 0), (3000, 0), (7, 3000), (20000, 0)])
def test_the_bias_follows_the_pass(number: int, start: int) -> None:
    settings = f"bias_base: 0.1 bias_gamma: -5e-05 bias_power: 1 bias_min: -0.4 bias_max: 0.05 iteration: {start}"
    bias = Runner(add(settings), [X, LABELS], tops=2, pass_number=number).forward()[1]
    assert bias == pytest.approx([np.clip(0.1 - 5e-5 * (start + number), -0.4, 0.05)], rel=1e-4)
    assert Runner(add(settings), [X, LABELS], tops=2, phase=TEST).forward()[1] == [0]


def test_other_powers() -> None:
    settings = "bias_base: 0 bias_gamma: 0.5 bias_power: 2 bias_min: -9 bias_max: 99"
    bias = Runner(add(settings), [X, LABELS], tops=2, pass_number=3).forward()[1]
    assert bias == pytest.approx([2.5**2 - 1], rel=1e-5)


def test_bad_input() -> None:
    with pytest.raises(ShapeError, match="one label for each sample"):
        Runner(add(""), [X, LABELS[:3]])
    runner = Runner(add("bias: 1"), [X, LABELS + 1])
    runner.forward()
    with pytest.raises(DataError, match="is outside 0 to 2"):
        runner.layer.raise_device_errors()


# -- LabelSpecificRescale --------------------------------------------------------------------------------


def rescale(more: str) -> str:
    return f"type: 'LabelSpecificRescale' label_specific_rescale_param {{ {more} }}"


@pytest.mark.parametrize(
    ("more", "label", "only_above"),
    [
        ("positive_weight: 0.7", lambda x: 0.7 * x, False),
        ("positive_weight: 0.7 for_ip: true", lambda x: 0.7 * x, True),
        ("positive_weight: 0.7 bias_fix: true", lambda x: 0.7 * x + 0.3, False),
        ("positive_weight: 1.5 power_on_positive: true", lambda x: np.sign(x) * np.abs(x) ** 1.5, False),
        ("positive_weight: 0.5 power_on_positive: true for_ip: true", lambda x: np.abs(x) ** 0.5, True),
    ],
)
def test_factors_of_the_label_and_the_others(more: str, label: Callable[[Floats], Floats], only_above: bool) -> None:
    def reference(x: Floats, _: Floats) -> Floats:
        own = np.where(x > 0, label(x), x) if only_above else label(x)
        return np.where(HOT > 0, own, 2 * x)

    text = f"{more} negative_weight: 2"
    check_layer(rescale(text), [X, LABELS], reference, in_place=True)
    check_layer(rescale(text), [X, LABELS], lambda x, _: x, phase=TEST, in_place=True)
    check_layer(rescale(f"{text} rescale_test: true"), [X, LABELS], reference, phase=TEST)


def test_the_factor_follows_the_pass() -> None:
    settings = "positive_weight: 5 positive_weight_base: 4 gamma: 0.5 power: 2 iteration: 3"

    def factor(more: str = "", phase: int = TRAIN) -> Floats:
        return Runner(rescale(settings + more), [X, LABELS], tops=2, pass_number=2, phase=phase).forward()[1]

    assert factor() == pytest.approx([4 / 16], rel=1e-5)
    assert factor(" positive_weight_min: 0.3") == pytest.approx([0.3])
    assert factor(" positive_weight_max: 0.2") == pytest.approx([0.2])
    assert factor(phase=TEST) == [5]
    with pytest.raises(ShapeError, match="one label for each sample"):
        Runner(rescale(""), [X, LABELS[:3]])


# -- GlobalLSEMargin -------------------------------------------------------------------------------------


def margins(x: Floats, scale: Floats) -> Floats:
    others = np.log((np.exp(scale[:, None] * x) * (1 - HOT)).sum(1)) / scale
    return (x * HOT).sum(1) - others


def lse(more: str = "") -> str:
    return f"type: 'GlobalLSEMargin' scale_param {{ {more} }}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_global_margin_of_the_first_and_later_passes(backend: str) -> None:
    runner = Runner(lse("filler { value: 4 }"), [X, LABELS], backend, tops=2)
    x = X.astype(np.float64)
    found = margins(x, np.full(4, 4.0))
    expected = mean_shift(found, found.mean(), 20)
    y, statistics = runner.forward()
    margin = max(expected, 0)
    np.testing.assert_allclose(y, 4 * (x - margin * HOT), rtol=1e-4, atol=1e-5)
    others = np.where(HOT > 0, -1, x)
    soft = (x * HOT).sum(1) - found
    wanted = [4, (x * HOT).sum(1).mean(), soft.mean(), others.max(1).mean(), expected]
    np.testing.assert_allclose(statistics, wanted, rtol=1e-4)
    later = 0.9 * expected + 0.1 * mean_shift(found, expected, 1)
    assert runner.forward()[1][4] == pytest.approx(later, rel=1e-4)


def test_global_margin_is_fixed_in_tests() -> None:
    params = [np.array([5.0]), np.array([0.2])]
    check_layer(lse(), [X, LABELS], lambda x, _, s, m: s * (x - m * HOT), params=params, phase=TEST, learned=[0])
    norms = np.array([3, 4, 5, 6], np.float32)
    check_layer(
        lse(),
        [X, LABELS, norms],
        lambda x, _, n, s, m: n[:, None] * (x - m * HOT),
        params=params,
        phase=TEST,
        learned=[],
    )


def test_the_scale_has_limits() -> None:
    for more, wanted in (("max_value: 9", 9), ("min_value: 40", 40), ("", 30)):
        assert Runner(lse(more), [X, LABELS], tops=2).forward()[1][0] == wanted


def test_mean_shift() -> None:
    values = np.array([0.1, 0.12, 0.14, 0.9, 0.95])
    assert mean_shift(values, 0.15, 20) == pytest.approx(0.12)
    assert next_margin(0.3, np.array([np.nan])) == 0.3
    assert next_margin(0.5, np.full(3, 0.55)) == pytest.approx(0.9 * 0.5 + 0.1 * 0.55)
