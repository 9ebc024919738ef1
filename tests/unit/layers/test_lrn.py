"""LRN's formulas by square roots, which hold for a beta of 0.75."""

from __future__ import annotations

import numpy as np
import pytest

from caffepy.layers.normalization import BY_ROOTS, GENERAL


@pytest.mark.parametrize("index", range(3))
def test_roots_are_the_power(index: int) -> None:
    general, by_roots = GENERAL[index], BY_ROOTS[index]
    assert general.parameters == by_roots.parameters
    rng = np.random.default_rng(index)
    for values in rng.uniform(0.01, 9, (20, len(general.parameters) - 2)):
        assert by_roots(*values, 0.5, 0.75) == pytest.approx(general(*values, 0.5, 0.75), rel=1e-12)
