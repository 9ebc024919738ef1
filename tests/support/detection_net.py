"""A net that learns to detect: predictions and scores of an InnerProduct each, priors of a PriorBox layer."""

from __future__ import annotations

import numpy as np

from caffepy.training.solver import Solver

NET = """
name: "tiny_ssd"
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 12 dim: 12 } } }
layer { name: "gt" type: "Input" top: "gt" input_param { shape { dim: 1 dim: 1 dim: 3 dim: 8 } } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 6 kernel_size: 4 stride: 4 weight_filler { type: "xavier" } } }
layer { name: "relu" type: "ReLU" bottom: "conv" top: "conv" }
layer { name: "loc" type: "InnerProduct" bottom: "conv" top: "loc"
  inner_product_param { num_output: 108 weight_filler { type: "xavier" } } }
layer { name: "conf" type: "InnerProduct" bottom: "conv" top: "conf"
  inner_product_param { num_output: 81 weight_filler { type: "xavier" } } }
layer { name: "prior" type: "PriorBox" bottom: "conv" bottom: "data" top: "prior"
  prior_box_param { min_size: 4 aspect_ratio: 2 variance: 0.1 variance: 0.1 variance: 0.2 variance: 0.2 } }
layer { name: "loss" type: "MultiBoxLoss" bottom: "loc" bottom: "conf" bottom: "prior" bottom: "gt" top: "loss"
  multibox_loss_param { num_classes: 3 code_type: CENTER_SIZE overlap_threshold: 0.4 } }
"""
"""27 priors: nine positions, three boxes at each."""
SOLVER = 'base_lr: 0.02 lr_policy: "fixed" momentum: 0.9 max_iter: 12 snapshot_after_train: false random_seed: 2 '
OBJECTS = [[0, 1, 0, 0.05, 0.05, 0.45, 0.4, 0], [1, 2, 0, 0.5, 0.5, 0.95, 0.9, 0], [1, 1, 0, 0.1, 0.6, 0.4, 0.9, 0]]


def fill(solver: Solver) -> None:
    """Give the net its images and objects, the same in every pass."""
    images = np.random.default_rng(0).normal(size=(2, 3, 12, 12)).astype(np.float32)
    solver.backend.from_host(images, solver.net.blobs["data"].data)
    solver.backend.from_host(np.array(OBJECTS, np.float32)[None, None], solver.net.blobs["gt"].data)
