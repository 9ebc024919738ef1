"""InnerDistance."""

from __future__ import annotations

import numpy as np
import pytest
from layer_harness import TEST, Floats, Runner, check_layer, gaussian, spread

from caffepy.errors import ConfigError, DataError, ShapeError

LABELS = np.array([0, 2, 1, 2], np.float32)
X = spread((4, 6), step=0.1)
W = spread((3, 6), step=0.07, seed=5)


def text(more: str = "") -> str:
    filler = "weight_filler { type: 'gaussian' }"
    return f"type: 'InnerDistance' inner_distance_param {{ num_output: 3 {filler} {more} }}"


def distances(x: Floats, w: Floats, kind: str) -> Floats:
    difference = x[:, None] - w[None]
    return np.abs(difference).sum(2) if kind == "L1" else (difference**2).sum(2)


@pytest.mark.parametrize("kind", ["L1", "L2"])
def test_formula_and_gradients(kind: str) -> None:
    check_layer(text(f"distance_type: '{kind}'"), [X], lambda x, w: distances(x, w, kind), params=[W])
    check_layer(text(f"distance_type: '{kind}'"), [X, W], lambda x, w: distances(x, w, kind))


@pytest.mark.parametrize("kind", ["L1", "L2"])
def test_only_centers_move(kind: str) -> None:
    settings = f"distance_type: '{kind}' update_center_only: true"
    dy = gaussian((4, 3), 2)
    hot = np.eye(3)[LABELS.astype(int)]
    plain = Runner(text(f"distance_type: '{kind}'"), [X], params=[W]).run([dy * hot])
    own = Runner(text(settings), [X, LABELS], params=[W])
    result = own.run([dy])
    np.testing.assert_allclose(result.param_diffs[0], plain.param_diffs[0], rtol=1e-4, atol=1e-4)
    whole = Runner(text(f"distance_type: '{kind}'"), [X], params=[W]).run([dy])
    np.testing.assert_allclose(result.bottom_diffs[0], whole.bottom_diffs[0], rtol=1e-5)
    given = Runner(text(settings), [X, W, LABELS]).run([dy])
    np.testing.assert_allclose(given.bottom_diffs[1], plain.param_diffs[0], rtol=1e-4, atol=1e-4)


def test_normalized_rows() -> None:
    unit = W / np.linalg.norm(W, axis=1, keepdims=True)
    runner = Runner(text("normalize: true"), [X], params=[W])
    np.testing.assert_allclose(runner.forward()[0], distances(X, unit, "L2"), rtol=1e-4)
    np.testing.assert_allclose(runner.layer.blobs[0].host_data(), unit, rtol=1e-5)
    tested = Runner(text("normalize: true"), [X], params=[W], phase=TEST)
    np.testing.assert_allclose(tested.forward()[0], distances(X, unit, "L2"), rtol=1e-4)
    np.testing.assert_array_equal(tested.layer.blobs[0].host_data(), W)


def test_axis() -> None:
    runner = Runner(text("axis: 2"), [X.reshape(2, 2, 6)], params=[W])
    assert runner.forward()[0].shape == (2, 2, 3)


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match="L1 or L2"):
        Runner(text("distance_type: 'L3'"), [X])
    with pytest.raises(ConfigError, match="num_output"):
        Runner("type: 'InnerDistance'", [X])
    with pytest.raises(ConfigError, match="x, optional weights, and labels"):
        Runner(text("update_center_only: true"), [X])
    with pytest.raises(ShapeError, match="each row of the weights"):
        Runner(text(), [X, W[:, :5]])
    runner = Runner(text("update_center_only: true"), [X, LABELS + 1])
    runner.forward()
    with pytest.raises(DataError, match="outside 0 to 2"):
        runner.layer.raise_device_errors()
