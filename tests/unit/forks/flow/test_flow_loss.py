"""Losses of FlowNet 2: L1Loss with l1_loss_param, and LpqLoss."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from layer_harness import Runner, check_layer, spread

from caffepy.errors import ConfigError, ShapeError

A, B = spread((2, 3, 3, 4), 1, step=0.05), spread((2, 3, 3, 4), 2, step=0.05) + np.float32(0.01)


def l1(fields: str) -> str:
    return f"type: 'L1Loss' l1_loss_param {{ {fields} }}"


def lengths(a: Any, b: Any, epsilon: float = 0.01, power: float = 0.5, mean: bool = False, least: float = 0) -> Any:
    """The loss with l2_per_location; NaN counts 0."""
    squares = np.nan_to_num(a - b) ** 2
    total = squares.mean(axis=1) if mean else squares.sum(axis=1)
    return ((np.where(total < least**2, 0, total) + epsilon) ** power).sum() / len(a)


@pytest.mark.parametrize(
    ("fields", "settings"),
    [
        ("", {}),
        ("epsilon: 0.2 power: 0.4", {"epsilon": 0.2, "power": 0.4}),
        ("l2_prescale_by_channels: true", {"mean": True}),
        ("plateau: 1.2", {"least": 1.2}),
    ],
)
def test_length_of_each_pixel(fields: str, settings: dict[str, Any]) -> None:
    check_layer(l1(f"l2_per_location: true {fields}"), [A, B], lambda a, b: lengths(a, b, **settings), step=1e-3)


def test_absolute_values() -> None:
    check_layer(l1(""), [A, B], lambda a, b: np.abs(a - b).sum() / 2, step=1e-3)
    check_layer(l1("plateau: 0.6"), [A, B], lambda a, b: np.where(abs(a - b) < 0.6, 0, abs(a - b)).sum() / 2, step=1e-3)
    check_layer("type: 'L1Loss'", [A], lambda a: np.abs(a).sum() / 2, step=1e-3)
    check_layer("type: 'L1Loss'", [A, B], lambda a, b: np.abs(a - b).sum() / 2, loss_weight=0.3, step=1e-3)


def holes() -> Any:
    """B without some pixels, and the part of the pixels that is left."""
    b = B.copy()
    b[0, :, 1, 2] = b[1, :, 0, 0] = np.nan
    return b, 22


@pytest.mark.parametrize("where", ["false", "true"])
def test_missing_values(where: str) -> None:
    """NaN counts 0, has no gradient, and with normalize_by_num_entries is not counted."""
    b, count = holes()
    text = l1(f"l2_per_location: {where} normalize_by_num_entries: true")
    runner = Runner(text, [A, b])
    result = runner.run([np.ones((), np.float32)])
    wanted = lengths(A, b) * 2 if where == "true" else np.nansum(abs(A - b))
    np.testing.assert_allclose(result.tops[0], wanted / count, rtol=1e-5)
    da, db = result.bottom_diffs
    assert da is not None and db is not None
    assert np.array_equal(da, -db) and not da[np.isnan(b)].any() and np.isfinite(da).all()
    step = 1e-3
    for place in ((0, 1, 2, 3), (1, 2, 1, 1)):
        ends = []
        for sign in (1, -1):
            moved = A.copy()
            moved[place] += sign * step
            ends.append(float(runner.forward([moved, b])[0]))
        assert abs((ends[0] - ends[1]) / (2 * step) - da[place]) < 2e-3


def lpq(fields: str) -> str:
    return f"type: 'LpqLoss' lpq_loss_param {{ {fields} }}"


def powers(p: float, q: float, p_shift: float = 0, q_shift: float = 0.01, mean: bool = False) -> Any:
    def formula(a: Any, b: Any) -> Any:
        terms = (np.abs(a - b) + p_shift) ** p
        total = terms.mean(axis=1) if mean else terms.sum(axis=1)
        return ((total + q_shift) ** q).sum() / len(a)

    return formula


def test_powers() -> None:
    check_layer(lpq("p: 1 q: 0.4 q_epsilon: 0.02"), [A, B], powers(1, 0.4, q_shift=0.02), step=1e-3)
    check_layer(lpq("p: 2 q: 1.5 p_epsilon: 0.1"), [A, B], powers(2, 1.5, 0.1), step=1e-3)
    check_layer(lpq("p: 1.3 q: 1 l2_prescale_by_channels: true"), [A, B], powers(1.3, 1, mean=True), step=1e-3)
    found = Runner(lpq("p: 1 q: 1 q_epsilon: 0 normalize_by_num_entries: true"), [A, holes()[0]]).forward()[0]
    np.testing.assert_allclose(found, np.nansum(abs(A - holes()[0])) / 22, rtol=1e-5)


def test_powers_change_at_iterations() -> None:
    fields = "p: 1 p: 2 q: 1 q: 0.5 pq_episode_starts_at_iter: 0 pq_episode_starts_at_iter: 3"
    for number, (p, q) in ((0, (1, 1)), (2, (1, 1)), (3, (2, 0.5)), (9, (2, 0.5))):
        found = Runner(lpq(fields), [A, B], pass_number=number).forward()[0]
        np.testing.assert_allclose(found, powers(p, q)(A.astype(float), B.astype(float)), rtol=1e-5)


def test_bad_settings() -> None:
    for fields in ("", "p: 1", "p: 1 p: 2 q: 1 q: 2", "p: 1 q: 1 pq_episode_starts_at_iter: 2"):
        with pytest.raises(ConfigError, match="lpq_loss_param"):
            Runner(lpq(fields), [A, B])
    for text in (lpq("p: 1 q: 1"), l1("")):
        with pytest.raises(ShapeError, match="same four axes"):
            Runner(text, [A, B[:, :, :, 1:]])
