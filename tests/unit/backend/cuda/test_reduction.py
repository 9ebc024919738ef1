"""Which memory sums need beside their results."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest


@pytest.mark.parametrize(
    ("shape", "out", "axis", "most"),
    [
        ((4, 2**29), (2**29,), 1, 0),  # each result is one block's: as much memory again would be many gigabytes
        ((2**27, 16), (2**27,), 0, 0),
        ((2**20, 64), (64,), 1, 528 * 64),
    ],
)
def test_partial_sums_are_kept_only_where_blocks_share_a_result(
    cupy_or_mock: None,
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, ...],
    out: tuple[int, ...],
    axis: int,
    most: int,
) -> None:
    expression = importlib.import_module("caffepy.backend.cuda.expression")
    monkeypatch.setattr(expression, "compiled", lambda *_: None)

    def signature(sizes: tuple[int, ...]) -> Any:
        strides = tuple(4 * math.prod(sizes[i + 1 :]) for i in range(len(sizes)))
        return expression.Signature(sizes, strides, 16, "f")

    plan = expression._reduction_launch.__wrapped__(
        expression.Call(expression.identity, (signature(shape),), (signature(out),), axis, 0), shape
    )
    assert plan is not None
    assert (plan.partial == 0) == (most == 0) and plan.partial <= most
