"""Average precision against definitions and against Caffe's loops, written out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caffepy.training.evaluate import average_precision


def caffes(hits: Sequence[bool], objects: int, version: str) -> float:  # noqa: C901
    """`ComputeAP` statement by statement, for detections in the order of their scores."""
    if not hits or not objects:
        return 0.0
    precision, recall, right = [], [], 0
    for count, hit in enumerate(hits, 1):
        right += hit
        precision.append(np.float32(right) / np.float32(count))
        recall.append(np.float32(right) / np.float32(objects))
    ap, eps = 0.0, 1e-6
    if version.endswith("point"):
        steps = int(version.removesuffix("point")) - 1
        best = [0.0] * (steps + 1)
        start = len(hits) - 1
        for j in range(steps, -1, -1):
            for i in range(start, -1, -1):
                if float(recall[i]) < j / steps:
                    start = i
                    if j > 0:
                        best[j - 1] = best[j]
                    break
                best[j] = max(best[j], precision[i])
        return sum(best) / (steps + 1)
    if version == "MaxIntegral":
        last, largest = recall[-1], precision[-1]
        for i in range(len(hits) - 2, -1, -1):
            largest = max(precision[i], largest)
            if abs(last - recall[i]) > eps:
                ap += largest * abs(last - recall[i])
            last = recall[i]
        return float(ap + last * largest)
    last = np.float32(0)
    for p, r in zip(precision, recall, strict=True):
        if abs(r - last) > eps:
            ap += p * abs(r - last)
        last = r
    return float(ap)


@given(
    st.lists(st.booleans(), max_size=40),
    st.integers(0, 12),
    st.sampled_from(["11point", "101point", "MaxIntegral", "Integral"]),
)
@settings(max_examples=300, derandomize=True)
def test_agrees_with_caffes_loops(hits: list[bool], more: int, version: str) -> None:
    objects = sum(hits) + more
    scores = np.linspace(1, 0, len(hits))
    order = np.random.default_rng(len(hits)).permutation(len(hits))
    found = average_precision(scores[order], np.array(hits, bool)[order], objects, version)
    assert found == pytest.approx(caffes(hits, objects, version), rel=2e-6, abs=1e-7)


def test_by_hand() -> None:
    """Hit, miss, hit, of two objects: precisions 1, 1/2, 2/3 at recalls 1/2, 1/2, 1."""
    scores, hits = [0.9, 0.8, 0.7], [True, False, True]
    assert average_precision(scores, hits, 2, "Integral") == pytest.approx(1 / 2 + 2 / 3 / 2)
    assert average_precision(scores, hits, 2, "11point") == pytest.approx((6 + 5 * 2 / 3) / 11)
    assert average_precision(scores, [True, True, True], 3, "MaxIntegral") == pytest.approx(1)


def test_equal_scores_stay_in_order() -> None:
    assert average_precision([0.5, 0.5], [True, False], 1, "Integral") == pytest.approx(1)
    assert average_precision([0.5, 0.5], [False, True], 1, "Integral") == pytest.approx(0.5)
