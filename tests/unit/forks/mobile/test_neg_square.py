"""NegSquare."""

from __future__ import annotations

from layer_harness import check_layer, gaussian


def test_formula_gradient_and_in_place() -> None:
    check_layer("type: 'NegSquare'", [gaussian((2, 3, 4, 5))], lambda x: -(x**2), in_place=True)
