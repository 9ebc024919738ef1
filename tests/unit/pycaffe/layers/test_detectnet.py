"""`caffe.layers.detectnet`: groups of rectangles, lists of boxes and their scores."""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training import build_net

from caffepy import as_caffe
from caffepy.errors import CaffepyError
from caffepy.pycaffe.layers.detectnet.clustering import group_rectangles
from caffepy.pycaffe.layers.detectnet.mean_ap import score_det


@pytest.fixture(autouse=True)
def _caffe() -> None:
    as_caffe.install(force=True)


def plain_groups(rectangles: list[list[int]], threshold: int, eps: float) -> list[tuple[list[int], int]]:
    """Union of similar rectangles pair by pair, then means, then groups inside others."""
    parent = list(range(len(rectangles)))

    def root(i: int) -> int:
        return i if parent[i] == i else root(parent[i])

    for i, (x, y, w, h) in enumerate(rectangles):
        for j, (u, v, s, t) in enumerate(rectangles[:i]):
            reach = eps * (min(w, s) + min(h, t)) * 0.5
            if max(abs(x - u), abs(y - v), abs(x + w - u - s), abs(y + h - v - t)) <= reach:
                parent[max(root(i), root(j))] = min(root(i), root(j))
    found = []
    for first in sorted({root(i) for i in range(len(rectangles))}):
        members = [r for i, r in enumerate(rectangles) if root(i) == first]
        found.append(
            (
                [
                    round(float(np.float32(sum(column)) * (np.float32(1) / np.float32(len(members)))))
                    for column in zip(*members, strict=True)
                ],
                len(members),
            )
        )
    large = [(mean, size) for mean, size in found if size > threshold]

    def covered(one: Any, other: Any) -> bool:
        (x, y, w, h), size = one
        (u, v, s, t), more = other
        dx, dy = round(s * eps), round(t * eps)
        inside = x >= u - dx and y >= v - dy and x + w <= u + s + dx and y + h <= v + t + dy
        return inside and (more > max(3, size) or size < 3)

    return [
        one for i, one in enumerate(large) if not any(covered(one, other) for j, other in enumerate(large) if j != i)
    ]


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10_000), threshold=st.integers(1, 3), eps=st.sampled_from([0.025, 0.1, 0.2, 0.6]))
def test_groups_against_a_plain_computation(seed: int, threshold: int, eps: float) -> None:
    rng = np.random.default_rng(seed)
    count, centers = int(rng.integers(1, 40)), int(rng.integers(1, 6))
    base = np.concatenate([rng.uniform(0, 200, (centers, 2)), rng.uniform(5, 120, (centers, 2))], 1)
    noisy = base[rng.integers(0, centers, count)] + rng.normal(0, rng.choice([0.5, 3, 10]), (count, 4))
    rectangles = np.maximum(noisy, 1).astype(int).tolist()
    means, sizes = group_rectangles(rectangles, threshold, eps)
    assert list(zip(means.tolist(), sizes.tolist(), strict=True)) == plain_groups(rectangles, threshold, eps)


def test_groups_without_a_threshold() -> None:
    means, sizes = group_rectangles([[1.9, 2, 3, 4], [1, 2, 3, 4]], 0, 0.2)
    assert means.tolist() == [[1, 2, 3, 4], [1, 2, 3, 4]] and sizes.tolist() == [1, 1]
    assert not len(group_rectangles([], 2, 0.2)[0])


def test_modules_and_layer_types_share_a_name() -> None:
    caffe = importlib.import_module("caffe")
    assert callable(caffe.layers.Convolution)
    clustering = importlib.import_module("caffe.layers.detectnet.clustering")
    assert caffe.layers.detectnet.clustering is clustering
    top = caffe.layers.ReLU(caffe.layers.Input(shape={"dim": [1, 2]}))
    assert [one.type for one in caffe.to_proto(top).layer] == ["Input", "ReLU"]


GRIDS = """
layer { name: "c" type: "Input" top: "coverage" input_param { shape { dim: 2 dim: 2 dim: 4 dim: 6 } } }
layer { name: "b" type: "Input" top: "boxes" input_param { shape { dim: 2 dim: 4 dim: 4 dim: 6 } } }
"""


def clusters(kind: str, settings: str) -> Any:
    return build_net(
        f"{GRIDS} layer {{ name: 'L' type: 'Python' bottom: 'coverage' bottom: 'boxes' top: 'x' top: 'y' "
        f"python_param {{ module: 'caffe.layers.detectnet.clustering' layer: '{kind}' param_str: '{settings}' }} }}"
    )


def put(net: Any, name: str, values: Any) -> None:
    net.context.backend.from_host(values.astype(np.float32), net.blobs[name].data)


def test_boxes_of_a_grid() -> None:
    """Cells of 16 pixels; boxes are relative to their cells."""
    coverage, boxes = np.zeros((2, 2, 4, 6)), np.zeros((2, 4, 4, 6))
    for row, column in ((1, 2), (1, 3), (2, 2)):  # one object of 40 x 30 pixels at (30, 20), seen by three cells
        coverage[0, 1, row, column] = 0.9
        boxes[0, :, row, column] = np.array([30, 20, 70, 50]) - np.tile([16 * column, 16 * row], 2)
    coverage[1, 0, 0, 0] = 0.04
    net = clusters("ClusterDetections", "96,64,16,0.05,1,0.2,10,2")
    put(net, "coverage", coverage)
    put(net, "boxes", boxes)
    net.forward()
    assert not net.blobs["x"].host_data().any()
    found = net.blobs["y"].host_data()
    assert found.shape == (2, 50, 5) and not found[0, 1:].any() and not found[1].any()
    np.testing.assert_allclose(found[0, 0], [30, 20, 70, 50, math.log(3)], rtol=1e-3)
    truth = clusters("ClusterGroundtruth", "96,64,16,2")
    put(truth, "coverage", coverage)
    put(truth, "boxes", boxes)
    truth.forward()
    assert truth.blobs["x"].host_data()[1, 0].tolist() == [0, 0, 0, 0, 0]
    assert truth.blobs["y"].host_data()[0, 0].tolist() == [30, 20, 70, 50, 0]
    assert not truth.blobs["y"].host_data()[0, 1:].any(), "the same object of three cells is listed once"


@pytest.mark.parametrize(
    ("kind", "words", "message"),
    [
        ("ClusterDetections", "96,64,16", "needs 7 numbers"),
        ("ClusterGroundtruth", "96,x,16", "not a list of numbers"),
        ("ClusterGroundtruth", "96,64,16", "2 tops for 1 classes"),
    ],
)
def test_settings_are_checked(kind: str, words: str, message: str) -> None:
    with pytest.raises(CaffepyError, match=message):
        clusters(kind, words)


def test_scores() -> None:
    objects, boxes = np.zeros((2, 50, 5)), np.zeros((2, 50, 5))
    objects[0, :2, :4] = [[10, 10, 50, 50], [100, 100, 150, 150]]
    boxes[0, :3, :4] = [[12, 10, 50, 50], [11, 10, 50, 50], [60, 60, 70, 70]]
    scored = score_det(objects, boxes)
    assert scored[0, :4].tolist() == [
        [12, 10, 50, 50, 1],
        [11, 10, 50, 50, 2],
        [60, 60, 70, 70, 2],
        [100, 100, 150, 150, 3],
    ]
    assert not scored[0, 4:].any() and not scored[1].any()
    net = build_net(
        """
        layer { name: "g" type: "Input" top: "g" input_param { shape { dim: 2 dim: 50 dim: 5 } } }
        layer { name: "d" type: "Input" top: "d" input_param { shape { dim: 2 dim: 50 dim: 5 } } }
        layer { name: "s" type: "Python" bottom: "g" bottom: "d" top: "s"
                python_param { module: 'caffe.layers.detectnet.mean_ap' layer: 'ScoreDetections' } }
        layer { name: "m" type: "Python" bottom: "s" top: "map" top: "precision" top: "recall"
                python_param { module: 'caffe.layers.detectnet.mean_ap' layer: 'mAP' param_str: '96, 64, 16' } }
        """
    )
    put(net, "g", objects)
    put(net, "d", boxes)
    net.forward()
    values = [float(net.blobs[name].host_data()[0]) for name in ("map", "precision", "recall")]
    np.testing.assert_allclose(values, [100 / 3 * 50 / 100, 100 / 3, 50], rtol=1e-6)
