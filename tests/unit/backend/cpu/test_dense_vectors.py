"""Products with up to four vectors, both factors contiguous in depth, against float64 NumPy."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from caffepy.backend import create_backend
from caffepy.backend.cpu import dense


@settings(max_examples=60)
@given(
    vectors=st.integers(1, 5), rows=st.integers(1, 23), depth=st.integers(1, 133), accumulate=st.booleans(),
    turned=st.booleans(), threads=st.sampled_from([1, 2]),
)  # fmt: skip
def test_dots(vectors: int, rows: int, depth: int, accumulate: bool, turned: bool, threads: int) -> None:
    rng = np.random.default_rng(depth)
    w, x = rng.standard_normal((rows, depth), dtype=np.float32), rng.standard_normal((vectors, depth), dtype=np.float32)
    out = rng.standard_normal((rows, vectors) if turned else (vectors, rows), dtype=np.float32)
    first, second = (w, x) if turned else (x, w)
    expected = first.astype(float) @ second.T.astype(float) + (out if accumulate else 0)
    backend = create_backend(None, threads)
    with backend.activate():
        backend.gemm(first, second, out, False, True, accumulate)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_one_image_takes_dots_and_many_take_tiles(monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(dense.Gemm, "_by_dots", lambda self, a, b, c, accumulate: seen.append(c.shape))
    backend = create_backend(None, 1)
    weights = np.ones((30, 40), np.float32)
    with backend.activate():
        for images in (1, dense.MAX_VECTORS, dense.MAX_VECTORS + 1):
            out = np.zeros((images, 30), np.float32)
            backend.gemm(np.ones((images, 40), np.float32), weights, out, False, True, False)
    assert seen == [(1, 30), (dense.MAX_VECTORS, 30)]
