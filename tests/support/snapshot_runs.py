"""Small training runs that write and resume from snapshots in the working folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from training import build_solver, weights_of

NET = """
name: "tiny"
layer { name: "data" type: "DummyData" top: "data" top: "label"
  dummy_data_param { shape { dim: 4 dim: 3 dim: 5 dim: 5 } shape { dim: 4 } data_filler { type: "gaussian" }
    data_filler { type: "constant" value: 1 } } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 2 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "norm" type: "BatchNorm" bottom: "conv" top: "conv"
  param { lr_mult: 0 } param { lr_mult: 0 } param { lr_mult: 0 } }
layer { name: "drop" type: "Dropout" bottom: "conv" top: "conv" dropout_param { dropout_ratio: 0.3 } }
layer { name: "group/ip" type: "InnerProduct" bottom: "conv" top: "ip"
  inner_product_param { num_output: 2 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""
SOLVER = (
    'base_lr: 0.1 momentum: 0.9 weight_decay: 0.01 lr_policy: "multistep" gamma: 0.5 stepvalue: 3 stepvalue: 5 '
    'snapshot_prefix: "x" average_loss: 3 test_interval: 2 test_iter: 2 '
)


def train(iterations: int, text: str = "", resume: str = "", net: str = NET, **keywords: Any) -> dict[str, np.ndarray]:
    with build_solver(SOLVER + f"max_iter: {iterations} " + text, net, **keywords) as solver:
        solver.solve(Path(resume) if resume else None)
        return weights_of(solver.net)


FORMATS = ["", "snapshot_format: HDF5 "]
