"""NVIDIA's statistics on a GPU, in fused layers, in captured graphs and in half precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from training import CPU, build_solver, weights_of

from caffepy.backend import Backend
from caffepy.utils.options import ExecutionOptions

NET = """
layer { name: "data" type: "DummyData" top: "data" top: "label" dummy_data_param {
  shape { dim: 8 dim: 3 dim: 10 dim: 10 } shape { dim: 8 }
  data_filler { type: "constant" value: 0.7 } data_filler { type: "constant" value: 2 } } }
layer { name: "drop" type: "Dropout" bottom: "data" top: "drop" }
layer { name: "conv" type: "Convolution" bottom: "drop" top: "conv"
  convolution_param { num_output: 16 kernel_size: 3 bias_term: false weight_filler { type: "msra" } } }
layer { name: "bn" type: "BatchNorm" bottom: "conv" top: "bn"
  batch_norm_param { moving_average_fraction: 0.9 eps: 0.001 scale_bias: true } }
layer { name: "relu" type: "ReLU" bottom: "bn" top: "bn" }
layer { name: "ip" type: "InnerProduct" bottom: "bn" top: "ip"
  inner_product_param { num_output: 5 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss"
  loss_param { label_smoothing: 0.1 } }
"""
SOLVER = 'type: "SGD" base_lr: 0.05 momentum: 0.9 lr_policy: "fixed" max_iter: 7'


def _train(device: Any, net: str = NET, **options: bool) -> dict[str, np.ndarray]:
    with build_solver(SOLVER, net, device, engine=ExecutionOptions(**options)) as solver:
        assert solver.net.context.nvidia
        solver.step(7)
        return weights_of(solver.net)


def _check(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], tolerance: float) -> None:
    for name, values in wanted.items():
        assert np.abs(found[name] - values).max() <= tolerance * np.abs(values).max(), name


def test_captured_and_eager_are_the_same_bits(backend: Backend) -> None:
    _check(_train(backend), _train(backend, eager=True), 0)


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_gpu_trains_as_the_cpu_does(backend: Backend, deterministic: bool) -> None:
    _check(_train(backend, deterministic=deterministic), _train(CPU), 1e-3)


def test_half_precision_is_near(backend: Backend) -> None:
    half = "default_forward_type: FLOAT16 default_backward_type: FLOAT16\n"
    _check(_train(backend, half + NET), _train(backend), 0.05)
