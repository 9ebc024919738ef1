"""SegAccuracy against its definition, and SegmentationEvaluate."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_harness import BACKENDS, Runner, gaussian

from caffepy.errors import DataError, ShapeError


def confusion(scores, labels, ignored=()):
    classes = scores.shape[1]
    predicted = classes - 1 - scores[:, ::-1].argmax(1)  # of equal scores the last
    matrix = np.zeros((classes, classes))
    for label, guess in zip(labels.ravel(), predicted.ravel(), strict=True):
        if label not in ignored:
            matrix[int(label), guess] += 1
    return matrix


def measures(matrix):
    hits, actual, guessed = np.diag(matrix), matrix.sum(1), matrix.sum(0)
    recall = [h / a for h, a in zip(hits, actual, strict=True) if a]
    jaccard = [1 if a + g - h == h else h / (a + g - h) for h, a, g in zip(hits, actual, guessed, strict=True)]
    return [hits.sum() / max(matrix.sum(), 1), np.mean(recall) if recall else 0, np.mean(jaccard)]


@settings(max_examples=20, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 5), st.integers(1, 5)),
    ties=st.booleans(),
    ignored=st.sampled_from([(), (255,), (0, 255), (1,)]),
    seed=st.integers(0, 99),
)
def test_three_measures_of_one_pass(shape, ties, ignored, seed):
    random = np.random.default_rng(seed)
    scores = random.standard_normal(shape).astype(np.float32)
    scores = np.round(scores) if ties else scores
    labels = random.integers(0, shape[1], (shape[0], 1, *shape[2:])).astype(np.float32)
    if 255 in ignored:
        labels.reshape(-1)[::3] = 255
    listed = " ".join(f"ignore_label: {label}" for label in ignored)
    for backend in BACKENDS:
        runner = Runner(f"type: 'SegAccuracy' seg_accuracy_param {{ {listed} }}", [scores, labels], backend)
        for _ in range(2):
            (top,) = runner.forward()
            assert top.shape == (1, 1, 1, 3)
            assert np.allclose(top.ravel(), measures(confusion(scores, labels, ignored)), atol=1e-6)
        runner.layer.raise_device_errors()


@pytest.mark.parametrize("backend", BACKENDS)
def test_counts_of_all_passes(backend):
    total = np.zeros((4, 4))
    runner = None
    for seed in range(3):
        scores = gaussian((2, 4, 5, 3), seed)
        labels = np.random.default_rng(seed).integers(0, 4, (2, 1, 5, 3)).astype(np.float32)
        total += confusion(scores, labels)
        text = "type: 'SegAccuracy' seg_accuracy_param { reset: false }"
        runner = runner or Runner(text, [scores, labels], backend)
        assert np.allclose(runner.forward([scores, labels])[0].ravel(), measures(total), atol=1e-6)
    assert runner.layer.capture_blocker() and runner.layer.has_side_effects()


@pytest.mark.parametrize("bad", [4, -1, 300])
def test_labels_outside_the_classes(bad):
    labels = np.zeros((2, 1, 5, 3), np.float32)
    labels[1, 0, 2, 1] = bad
    runner = Runner("type: 'SegAccuracy'", [gaussian((2, 4, 5, 3)), labels])
    runner.forward()
    with pytest.raises(DataError, match="outside the 4 classes"):
        runner.layer.raise_device_errors()


def test_shapes_that_do_not_fit():
    with pytest.raises(ShapeError, match="needs scores"):
        Runner("type: 'SegAccuracy'", [gaussian((2, 4, 5, 3)), gaussian((2, 1, 5, 4))])


# -- SegmentationEvaluate --------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_masks_of_one_size(backend: str) -> None:
    random = np.random.default_rng(1)
    found, wanted = random.uniform(0, 1, (2, 2, 3, 6, 5)).astype(np.float32)
    wanted[:, 2] = 0
    runner = Runner(
        "type: 'SegmentationEvaluate' segmentation_evaluate_param { threshold: 0.3 }", [found, wanted], backend
    )
    a, b = found[0] > 0.3, wanted[0] > 0.3
    overlaps = [(a[c] & b[c]).sum() / (a[c] | b[c]).sum() for c in range(3)]
    np.testing.assert_allclose(runner.forward()[0][0, 0, 0], overlaps, rtol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_predictions_of_another_size_are_resized(backend: str) -> None:
    random = np.random.default_rng(1)
    found = random.uniform(0, 1, (1, 3, 4, 4)).astype(np.float32)
    wanted = random.uniform(0, 1, (1, 3, 8, 12)).astype(np.float32)
    wanted[:, 1] = 0
    found[:, 2] = 0
    runner = Runner("type: 'SegmentationEvaluate'", [found, wanted], backend)
    resized = cv2.resize((found[0, 0] * 255).astype(np.uint8), (12, 8)) > 127
    mask = wanted[0, 0] > 0.5
    overlap = (resized & mask).sum() / (resized | mask).sum()
    np.testing.assert_allclose(runner.forward()[0][0, 0, 0], [overlap, -1, 0], rtol=1e-6)


def test_mistakes_are_named() -> None:
    with pytest.raises(ShapeError, match="as many channels"):
        Runner("type: 'SegmentationEvaluate'", [np.zeros((1, 2, 3, 3), "f"), np.zeros((1, 3, 3, 3), "f")])


@pytest.mark.parametrize("backend", BACKENDS)
def test_eltwise_accuracy_of_pixels(backend):
    scores, labels = gaussian((2, 5, 3, 4)), np.random.default_rng(0).integers(0, 5, (2, 1, 3, 4)).astype(np.float32)
    labels[0, 0, 0] = 255
    first = np.argsort(-scores, axis=1)
    counted = labels[:, 0] != 255
    for top_k in (1, 2):
        text = f"type: 'EltwiseAccuracy' eltwise_accuracy_param {{ top_k: {top_k} ignore_label: 255 }}"
        hits = (first[:, :top_k] == labels).any(axis=1)[counted]
        assert Runner(text, [scores, labels], backend).forward()[0] == pytest.approx(hits.mean())
    with pytest.raises(ShapeError, match="top_k is 6"):
        Runner("type: 'EltwiseAccuracy' eltwise_accuracy_param { top_k: 6 }", [scores, labels], backend)
