"""Which products of odd lengths are divided, so that the large part is aligned."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest


@pytest.fixture(scope="module")
def module(cupy_or_mock: None) -> Any:
    return importlib.import_module("caffepy.backend.cuda.gemm")


def test_what_is_divided(module: Any) -> None:
    def made(rows: int, columns: int, kind: str = "float16") -> Any:
        return np.lib.stride_tricks.as_strided(
            np.zeros(1, kind), (rows, columns), (columns * np.dtype(kind).itemsize, np.dtype(kind).itemsize)
        )

    dy, words, x = made(2000, 8801), made(8801, 1000), made(2000, 1000)
    assert module.odd_axis(x, words.T, dy) == "columns"
    assert module.odd_axis(dy, words, x) == "depth"
    assert module.odd_axis(dy.T, x, made(8801, 1000, "float32")) == "rows"
    assert module.odd_axis(made(2000, 8800), made(8800, 1000), x) is None
    assert module.odd_axis(made(2000, 8801, "float32"), made(8801, 1000, "float32"), x) is None
    assert module.odd_axis(made(100, 8801), words, made(100, 1000)) is None
