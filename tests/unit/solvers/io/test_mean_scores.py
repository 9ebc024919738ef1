"""Means of a test net's outputs: one whose size changes has none."""

from __future__ import annotations

import pytest
from training import build_solver

from caffepy.errors import ConfigError
from caffepy.solvers.io.testing import MeanScores

SOLVER = 'base_lr: 0.1 lr_policy: "fixed" test_iter: 1 test_interval: 1 '
NET = """
layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 4 dim: 3 } } }
layer { name: "ip" type: "InnerProduct" bottom: "x" top: "y" inner_product_param { num_output: 2 } }
"""


def test_an_output_that_changes_its_size_has_no_mean():
    with build_solver(SOLVER, NET) as solver:
        net = solver.test_nets[0]
        scores = MeanScores(solver.state, net)
        net.forward()
        scores.take(0)
        net.blobs["x"].reshape((5, 3))
        net.forward()
        with pytest.raises(ConfigError, match="have 10 elements in one batch and 8 in another, and so no mean"):
            scores.take(1)
