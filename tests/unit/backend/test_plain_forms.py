"""The larger primitives as `composite.py` makes them, of the CPU's elementary ones, against float64 NumPy."""

from __future__ import annotations

import normalise_checks as checks
import pytest
from normalise_checks import SHAPES

from caffepy.backend.cpu.backend import CpuBackend
from caffepy.backend.interface import NormalisationPrimitives


class Composed(CpuBackend):
    """A CPU without kernels of its own for these primitives."""

    batch_norm_measure = NormalisationPrimitives.batch_norm_measure
    batch_norm_forward = NormalisationPrimitives.batch_norm_forward
    batch_norm_backward_sums = NormalisationPrimitives.batch_norm_backward_sums
    batch_norm_backward_data = NormalisationPrimitives.batch_norm_backward_data
    relu_backward = NormalisationPrimitives.relu_backward


BACKEND = Composed(2)
DTYPES = "float32"


@pytest.mark.parametrize("shape", SHAPES)
def test_measure(shape: tuple[int, ...]) -> None:
    checks.check_measure(BACKEND, shape, DTYPES)


@pytest.mark.parametrize("offset", [1e3, -1e4])
def test_measure_where_the_mean_is_large(offset: float) -> None:
    checks.check_measure(BACKEND, (16, 12, 9, 9), DTYPES, offset)


@pytest.mark.parametrize(("channels", "elements"), [(1, 1), (7, 20), (64, 3000)])
def test_measure_sums(channels: int, elements: int) -> None:
    checks.check_measure_sums(BACKEND, channels, elements)


@pytest.mark.parametrize("count", [0.0, 7.5])
def test_load(count: float) -> None:
    checks.check_load(BACKEND, 33, count)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("shape", [(3, 8, 4, 4), (2, 33, 3, 3), (64, 5), (3, 6, 5)])
def test_forward(shape: tuple[int, ...], residual: bool, relu: bool, mask: bool, in_place: bool) -> None:
    checks.check_forward(BACKEND, shape, DTYPES, residual, relu, mask, in_place)


@pytest.mark.parametrize("shape", SHAPES)
def test_backward(shape: tuple[int, ...]) -> None:
    checks.check_backward(BACKEND, shape, DTYPES)


@pytest.mark.parametrize(("relu", "mask"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(
    ("sources", "total"),
    [(1, ""), (1, "own"), (1, "first"), (2, "own"), (2, "last"), (3, "last"), (4, "own"), (5, "own"), (5, "first"),
     (6, "last"), (9, "own")],
)  # fmt: skip
def test_backward_of_fused_layers(sources: int, total: str, relu: bool, mask: bool) -> None:
    checks.check_backward(BACKEND, (4, 7, 5, 5), DTYPES, sources, relu, mask, total)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_relu_backward(shape: tuple[int, ...], bias: bool, in_place: bool) -> None:
    checks.check_relu_backward(BACKEND, shape, DTYPES, bias, in_place)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_activation_backward(shape: tuple[int, ...], bias: bool, in_place: bool) -> None:
    checks.check_activation_backward(BACKEND, shape, DTYPES, bias, in_place)


@pytest.mark.parametrize(("sources", "at"), [(2, None), (2, 0), (3, None), (3, 2), (8, None)])
def test_total(sources: int, at: int | None) -> None:
    checks.check_total(BACKEND, (3, 5, 4, 4), DTYPES, sources, at)
