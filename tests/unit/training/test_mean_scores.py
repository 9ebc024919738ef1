"""Means of a test net's outputs: one whose size changes has none."""

from __future__ import annotations

import numpy as np
import pytest
from training import build_solver

from caffepy.errors import ConfigError
from caffepy.training.evaluate import MeanScores

SOLVER = 'base_lr: 0.1 lr_policy: "fixed" test_iter: 1 test_interval: 1 '
NET = """
layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 4 dim: 3 } } }
layer { name: "ip" type: "InnerProduct" bottom: "x" top: "y"
  inner_product_param { num_output: 2 weight_filler { value: 1 } } }
"""


def test_an_output_that_changes_its_size_has_no_mean():
    with build_solver(SOLVER, NET) as solver:
        net = solver.test_nets[0]
        scores = MeanScores(net, solver.callback, solver.log)
        net.forward()
        scores.take(0)
        net.blobs["x"].reshape((5, 3))
        net.forward()
        with pytest.raises(ConfigError, match="have 10 elements in one batch and 8 in another, and so no mean"):
            scores.take(1)


def test_inputs_that_are_reshaped_before_a_test_are_scored_as_they_are():
    with build_solver(SOLVER, NET) as solver:
        net = solver.test_nets[0]
        net.blobs["x"].reshape((5, 3))
        net.blobs["x"].data[...] = 1
        (scores,) = solver.test_all()
        np.testing.assert_array_equal(scores["y"], np.full((5, 2), 3))
        net.blobs["x"].reshape((2, 3))
        net.blobs["x"].data[...] = 2
        (scores,) = solver.test_all()
        np.testing.assert_array_equal(scores["y"], np.full((2, 2), 6))
