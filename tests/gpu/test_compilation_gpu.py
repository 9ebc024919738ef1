"""Kernels that do not compile or cannot be kept, and arrays filled with a number."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from caffepy.backend import Backend
from caffepy.errors import RunError


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32", "uint8"])
@pytest.mark.parametrize("value", [1.0, 3.0])
def test_fill(backend: Backend, dtype: str, value: float) -> None:
    array = backend.zeros((3, 5, 7, 2), dtype)
    backend.fill(array, value)
    np.testing.assert_array_equal(backend.to_host(array), np.full((3, 5, 7, 2), value))


def test_fill_with_what_has_a_sign_and_what_is_no_number(backend: Backend) -> None:
    for dtype, value in (("int32", -1), ("float32", -0.5), ("float16", np.inf), ("bfloat16", np.nan)):
        array = backend.zeros((17,), dtype)
        backend.fill(array, value)
        np.testing.assert_array_equal(backend.to_host(array), np.full(17, value))
    part = backend.zeros((4, 6))
    backend.fill(part[:, 1:3], 2.0)
    assert backend.to_host(part).sum() == 16.0


def test_a_text_that_does_not_compile_is_refused(backend: Backend) -> None:
    from caffepy.backend.cuda.compiler import compiled

    with pytest.raises(RunError, match="NVRTC cannot compile .*undefined"):
        compiled('extern "C" __global__ void f() { undefined(); }', "f")


def test_where_cupy_cannot_keep_kernels_they_are_compiled(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from caffepy.backend.cuda.compiler import compiled, launch

    (tmp_path / "file").touch()
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "file" / "folder"))
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "0")
    array = backend.zeros((4,))
    text = 'extern "C" __global__ void kept(float *x, int n) { if (threadIdx.x < n) x[threadIdx.x] = 5; }'
    launch(compiled(text, "kept"), 4, (array, 4))
    assert backend.to_host(array).tolist() == [5.0] * 4
