"""AssistedExcitation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from layer_harness import BACKENDS, TEST, Runner, gaussian
from training import build_solver
from yolo_reference import yolo_rows

from caffepy.errors import ShapeError

OBJECTS = [[(0, (0.5, 0.5, 0.5, 0.25)), (1, (0.1, 0.9, 0.05, 0.4))], [(1, (0.95, 0.1, 0.4, 0.4))], []]
X, MEAN = gaussian((3, 4, 8, 6)), gaussian((3, 8, 6), 1)


def wanted(factor: float) -> np.ndarray:
    y = X.copy()
    for image, found in enumerate(OBJECTS):
        inside = np.zeros((8, 6), bool)
        for _, (x, y_center, w, h) in found:
            for j in range(8):
                for i in range(6):
                    right, bottom = int((x + w / 2) * 6 + 0.95), int((y_center + h / 2) * 8 + 0.95)
                    inside[j, i] |= (
                        max(int((x - w / 2) * 6), 0) <= i < right and max(int((y_center - h / 2) * 8), 0) <= j < bottom
                    )
        y[image] += factor * inside * MEAN[image]
    return y


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_mean_is_added_inside_of_objects_and_less_so_later(backend: str) -> None:
    runner = Runner("type: 'AssistedExcitation'", [X, yolo_rows(OBJECTS), MEAN], backend)
    np.testing.assert_allclose(runner.forward()[0], wanted(1.0), rtol=1e-5, atol=1e-6)
    dy = gaussian(X.shape, 2)
    np.testing.assert_array_equal(runner.backward([dy], [True, False, True])[0], dy)
    assert not runner.bottom[2].host_diff().any()
    runner.layer.context.max_iter, runner.layer.context.iter_size = 100, 2
    for number, factor in ((0, 1.0), (100, math.cos(math.pi / 2 * 50 / 75)), (150, 0.0), (199, 0.0)):
        runner.layer.context.passes.number = number
        np.testing.assert_allclose(runner.forward()[0], wanted(factor), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tests_change_nothing(backend: str) -> None:
    runner = Runner("type: 'AssistedExcitation'", [X, yolo_rows(OBJECTS), MEAN], backend, phase=TEST)
    np.testing.assert_array_equal(runner.forward()[0], X)


def test_a_solver_tells_its_nets_how_long_it_trains() -> None:
    net = """layer { name: "d" type: "DummyData" top: "x" dummy_data_param { shape { dim: 2 dim: 3 } } }
      layer { name: "p" type: "InnerProduct" bottom: "x" top: "p" inner_product_param { num_output: 1 } }
      layer { name: "l" type: "Reduction" bottom: "p" top: "l" loss_weight: 1 }"""
    with build_solver('base_lr: 0.1 lr_policy: "fixed" max_iter: 7', net) as solver:
        assert solver.net.context.max_iter == 7


def test_mistakes_are_named() -> None:
    with pytest.raises(ShapeError, match="means N H W"):
        Runner("type: 'AssistedExcitation'", [X, yolo_rows(OBJECTS), MEAN[:, :5]])
    with pytest.raises(ShapeError, match="objects N 1 T 5"):
        Runner("type: 'AssistedExcitation'", [X, np.zeros((3, 8), "f"), MEAN])
