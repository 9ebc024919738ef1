"""CenterLoss."""

from __future__ import annotations

import numpy as np
import pytest
from layer_harness import BACKENDS, Floats, Runner, check_layer, gaussian, spread

from caffepy.data.sharding import Shard
from caffepy.errors import ConfigError, DataError, ShapeError

LABELS = np.array([0, 2, 1, 2, 2], np.float32)
X = spread((5, 4), step=0.1)
C = gaussian((4, 4), 2)


def text(more: str = "") -> str:
    return f"type: 'CenterLoss' center_loss_param {{ num_output: 4 center_filler {{ type: 'xavier' }} {more} }}"


def differences(x: Floats, centers: Floats) -> Floats:
    return x - centers[LABELS.astype(int)]


def test_loss_and_gradient_of_features() -> None:
    def l2(x: Floats, _: Floats, c: Floats) -> Floats:
        return (differences(x, c) ** 2).sum() / 10

    def l1(x: Floats, _: Floats, c: Floats) -> Floats:
        return np.abs(differences(x, c)).sum() / 5

    check_layer(text(), [X, LABELS], l2, params=[C], learned=[])
    check_layer(text("distance_type: 'L1'"), [X, LABELS], l1, params=[C], learned=[])
    check_layer(text(), [X, LABELS], l2, params=[C], learned=[], loss_weight=0.3)


@pytest.mark.parametrize("kind", ["L1", "L2"])
@pytest.mark.parametrize("weight", [1.0, 0.01])
@pytest.mark.parametrize("backend", BACKENDS)
def test_centers_move_as_in_caffe_face(kind: str, weight: float, backend: str) -> None:
    runner = Runner(text(f"distance_type: '{kind}'"), [X, LABELS], backend, params=[C], loss_weight=weight)
    found = runner.run([np.float32(weight)]).param_diffs[0]
    d = differences(X.astype(np.float64), C)
    d = np.sign(d) if kind == "L1" else d
    for j in range(4):
        own = d[j == LABELS]
        np.testing.assert_allclose(found[j], -own.sum(0) / (len(own) + 1), rtol=1e-5, atol=1e-6)


def test_the_average_of_two_devices_is_the_gradient_of_the_whole_batch() -> None:
    x, labels = gaussian((4, 4), 5), np.array([0, 2, 2, 1], np.float32)
    whole = Runner(text(), [x, labels], params=[C]).run([np.float32(1)])
    parts = []
    for rank, own in enumerate((slice(0, 2), slice(2, 4))):
        runner = Runner(text(), [x[own], labels[own]], params=[C], shard=Shard(rank, 2))
        counts = np.bincount(np.delete(labels, own).astype(int), minlength=4)

        def add_other(array: Floats, other: Floats = counts) -> None:
            array += other.reshape(array.shape).astype(np.float32)

        runner.layer.context.all_reduce_sum = add_other
        assert runner.layer.communicates()
        parts.append(runner.run([np.float32(1)]))
    averaged = (parts[0].param_diffs[0] + parts[1].param_diffs[0]) / 2
    np.testing.assert_allclose(averaged, whole.param_diffs[0], rtol=1e-5, atol=1e-6)
    halves = np.concatenate([part.bottom_diffs[0] for part in parts]) / 2
    np.testing.assert_allclose(halves, whole.bottom_diffs[0], rtol=1e-5)


def test_images_and_axis() -> None:
    x = gaussian((2, 2, 3, 4))
    labels = np.array([0, 1, 2, 3], np.float32)
    assert Runner(text(), [x, labels[:2]]).layer.blobs[0].shape == (4, 24)
    assert Runner(text("axis: 2"), [x, labels.reshape(2, 2)]).layer.blobs[0].shape == (4, 12)


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match="num_output"):
        Runner("type: 'CenterLoss'", [X, LABELS])
    with pytest.raises(ConfigError, match="L1 or L2"):
        Runner(text("distance_type: 'cos'"), [X, LABELS])
    with pytest.raises(ShapeError, match="one label for each of 5"):
        Runner(text("axis: 1"), [X, np.zeros((5, 2), np.float32)])
    runner = Runner(text(), [X, LABELS * 2])
    runner.forward()
    with pytest.raises(DataError, match="label . of 'b' is outside 0 to 3"):
        runner.layer.raise_device_errors()
