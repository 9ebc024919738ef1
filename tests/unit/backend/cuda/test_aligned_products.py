"""Products of odd lengths: their parts, computed in NumPy, are the product; the large part is aligned."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest


class HostArray(np.ndarray):
    """An array with an address like CuPy's."""

    @property
    def data(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(ptr=self.__array_interface__["data"][0])


def host(values: Any) -> Any:
    """At an address that is a multiple of 16 bytes, in the order of `values`."""
    memory = np.zeros(values.size + 16, values.dtype)
    first = -memory.__array_interface__["data"][0] % 16 // values.itemsize
    flat = memory[first : first + values.size]
    shape = values.shape if values.flags.c_contiguous else values.shape[::-1]
    array = flat.reshape(shape) if values.flags.c_contiguous else flat.reshape(shape).T
    array[...] = values
    return array.view(HostArray)


@pytest.fixture(scope="module")
def module(cupy_or_mock: None) -> Any:
    return importlib.import_module("caffepy.backend.cuda.dense")


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("kind", ["float16", "float32"])
@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("odd", ["rows", "depth", "columns"])
def test_the_parts_are_the_product(
    module: Any, monkeypatch: pytest.MonkeyPatch, odd: str, turned: tuple[bool, bool], kind: str, accumulate: bool
) -> None:
    monkeypatch.setattr(module, "MIN_LENGTH", 8)
    monkeypatch.setattr(module, "MIN_MULTIPLICATIONS", 1)
    monkeypatch.setattr(module, "copy", lambda source, destination: np.copyto(destination, source))
    sizes = {"rows": 16, "depth": 24, "columns": 32}
    sizes[odd] += 3
    rng = np.random.default_rng(4)

    def factor(shape: tuple[int, int], turn: bool) -> Any:
        values = rng.integers(-3, 4, shape).astype(np.float16)
        return host(np.asfortranarray(values) if turn else values)

    a = factor((sizes["rows"], sizes["depth"]), turned[0])
    b = factor((sizes["depth"], sizes["columns"]), turned[1])
    out = host(rng.integers(-3, 4, (sizes["rows"], sizes["columns"])).astype(kind))
    wanted = a.astype(float) @ b.astype(float) + (out if accumulate else 0)
    axis = module.odd_axis(a, b, out)
    along = {"rows": turned[0], "depth": not turned[0] or turned[1], "columns": True}
    assert axis == (odd if along[odd] else None)
    large = []

    def gemm(left: Any, right: Any, result: Any, add: bool) -> None:
        if min(*left.shape, *right.shape) >= 8:
            large.extend((left, right, result))
        result[...] = np.asarray(left, float) @ np.asarray(right, float) + (result if add else 0)

    if axis is None:
        return
    scratch = SimpleNamespace(get=lambda _, count, dtype="float32": host(np.zeros(count, dtype)))
    module.AlignedProduct(axis, gemm, scratch).run(a, b, out, accumulate)
    assert np.array_equal(np.asarray(out, float), wanted)
    assert len(large) == 3
    for matrix in large:
        assert module.lines(matrix)[1] * matrix.itemsize % 16 == 0 and matrix.data.ptr % 16 == 0


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
