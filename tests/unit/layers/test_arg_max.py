"""ArgMax: every field, ties, what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from layer_harness import Runner, check_layer, gaussian

from caffepy.errors import ConfigError, ShapeError


def best(x, axis, count):
    """Indices of the largest, the larger index first where two are equal."""
    return np.take(np.flip(np.argsort(x, axis=axis, kind="stable"), axis=axis), range(count), axis=axis)


@pytest.mark.parametrize(("shape", "axis"), [((3, 7), 1), ((3, 7), -2), ((2, 5, 3, 4), 1), ((2, 5, 3, 4), 2),
                                             ((2, 5, 3, 4), -1), ((2, 3, 4, 5, 2), 3), ((6,), 0)])  # fmt: skip
@pytest.mark.parametrize("values", [False, True])
def test_along_an_axis(shape, axis, values):
    x = np.round(gaussian(shape) * 2)
    for count in (1, shape[axis]):
        text = f"argmax_param {{ axis: {axis} top_k: {count} out_max_val: {str(values).lower()} }}"
        reference = (lambda x, n=count: np.take_along_axis(x, best(x, axis, n), axis)) if values else (
            lambda x, n=count: best(x, axis, n))  # fmt: skip
        check_layer(f"type: 'ArgMax' {text}", [x], reference)


@pytest.mark.parametrize("shape", [(3, 7), (3, 2, 4), (2, 3, 4, 5), (2, 3, 1, 2, 2), (4,)])
def test_over_whole_samples(shape):
    x = gaussian(shape)
    rows = x.reshape(shape[0], -1)
    count = min(3, rows.shape[1])
    tail = (1,) * max(len(shape) - 3, 0)
    check_layer(
        f"type: 'ArgMax' argmax_param {{ top_k: {count} }}", [x],
        lambda x: best(x.reshape(rows.shape), 1, count).reshape(shape[0], 1, count, *tail),
    )  # fmt: skip
    both = f"type: 'ArgMax' argmax_param {{ out_max_val: true top_k: {count} }}"
    check_layer(both, [x], lambda x: np.stack(
        [best(x.reshape(rows.shape), 1, count), -np.sort(-x.reshape(rows.shape))[:, :count]], 1
    ).reshape(shape[0], 2, count, *tail))  # fmt: skip


def test_refused():
    with pytest.raises(ConfigError, match=r"layer 'L' \(ArgMax\): argmax_param.top_k is 0; give at least 1"):
        Runner("type: 'ArgMax' argmax_param { top_k: 0 }", [gaussian((2, 3))])
    with pytest.raises(ShapeError, match="top_k is 4, but there are only 3 elements"):
        Runner("type: 'ArgMax' argmax_param { top_k: 4 axis: 1 }", [gaussian((2, 3, 5))])
    with pytest.raises(ShapeError, match="axis 3 does not exist"):
        Runner("type: 'ArgMax' argmax_param { axis: 3 }", [gaussian((2, 3, 5))])
