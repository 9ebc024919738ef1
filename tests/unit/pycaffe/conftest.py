"""A small net on disk, and settings of `caffe.set_...` that end with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from caffepy.pycaffe.device import mode

NET = """
name: 'small' force_backward: true
layer { name: 'data' type: 'Input' top: 'data' input_param { shape { dim: 5 dim: 2 dim: 3 dim: 4 } } }
layer { name: 'label' type: 'Input' top: 'label' input_param { shape { dim: 5 } } }
layer {
  name: 'conv' type: 'Convolution' bottom: 'data' top: 'conv' param { lr_mult: 1 decay_mult: 1 } param { lr_mult: 2 }
  convolution_param {
    num_output: 11 kernel_size: 2 pad: 3 weight_filler { type: 'gaussian' std: 1 } bias_filler { value: 2 }
  }
}
layer { name: 'relu' type: 'ReLU' bottom: 'conv' top: 'conv' }
layer {
  name: 'ip' type: 'InnerProduct' bottom: 'conv' top: 'ip_blob'
  inner_product_param { num_output: 13 weight_filler { type: 'gaussian' std: 0.1 } bias_filler { value: -3 } }
}
layer { name: 'loss' type: 'SoftmaxWithLoss' bottom: 'ip_blob' bottom: 'label' top: 'loss' }
layer { name: 'accuracy' type: 'Accuracy' bottom: 'ip_blob' bottom: 'label' top: 'accuracy' include { phase: TEST } }
"""

Write = Callable[[str, str], Path]


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    before = asdict(mode)
    yield
    for name, value in before.items():
        setattr(mode, name, value)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file of that name and content into the test's folder."""

    def write_file(name: str, content: str) -> Path:
        path = tmp_path / name
        path.write_text(content)
        return path

    return write_file


@pytest.fixture
def net_file(write: Write) -> Path:
    return write("net.prototxt", NET)


@pytest.fixture
def solver_file(net_file: Path, write: Write) -> Path:
    return write(
        "solver.prototxt",
        f"net: '{net_file}' test_iter: 1 test_interval: 1000 test_initialization: false base_lr: 0.01 momentum: 0.9 "
        f"lr_policy: 'step' gamma: 0.1 stepsize: 2 max_iter: 3 snapshot_prefix: '{net_file.parent / 'model'}' "
        "snapshot_after_train: false random_seed: 7",
    )
