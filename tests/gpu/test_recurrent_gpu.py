"""RNN and LSTM on a GPU: single layers are in tests/unit/layers/test_recurrent.py.

Here trained nets, captured and not, in half precision, and that the state goes on from one replay of the graph to the
next.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from training import CPU, build_solver, weights_of

from caffepy.backend import Backend
from caffepy.utils.options import ExecutionOptions

NET = """
layer { name: "data" type: "DummyData" top: "x" top: "cont" top: "goal" dummy_data_param {
  shape { dim: 5 dim: 4 dim: 6 } shape { dim: 5 dim: 4 } shape { dim: 5 dim: 4 dim: 7 }
  data_filler { type: "constant" value: 0.7 } data_filler { type: "constant" value: 1 }
  data_filler { type: "constant" value: 0.3 } } }
layer { name: "lstm" type: "LSTM" bottom: "x" bottom: "cont" top: "h" recurrent_param {
  num_output: 8 weight_filler { type: "xavier" } } }
layer { name: "rnn" type: "RNN" bottom: "h" bottom: "cont" top: "o" recurrent_param {
  num_output: 7 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "EuclideanLoss" bottom: "o" bottom: "goal" top: "loss" }
"""
SOLVER = 'type: "SGD" base_lr: 0.05 momentum: 0.9 lr_policy: "fixed" max_iter: 8'


def _train(device: Any, net: str = NET, capture: bool = True) -> dict[str, np.ndarray]:
    with build_solver(SOLVER, net, device, engine=ExecutionOptions(eager=not capture)) as solver:
        solver.step(8)
        assert solver.graph_executor.captured == (capture and device.captures)
        states = {f"state_{i}": device.to_host(array) for i, array in enumerate(solver.net.state())}
        return weights_of(solver.net) | states


def _check(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], tolerance: float) -> None:
    for name, values in wanted.items():
        assert np.abs(found[name] - values).max() <= tolerance * np.abs(values).max(), name


def test_captured_and_eager_are_the_same_bits(backend: Backend) -> None:
    _check(_train(backend), _train(backend, capture=False), 0)


def test_a_gpu_trains_as_the_cpu_does(backend: Backend) -> None:
    _check(_train(backend), _train(CPU), 1e-4)


def test_half_precision_is_near(backend: Backend) -> None:
    half = "default_forward_type: FLOAT16 default_backward_type: FLOAT16\n"
    _check(_train(backend, half + NET), _train(backend), 0.02)
