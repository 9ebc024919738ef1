"""Loss weights and shared parameters in captured, fused iterations on a GPU: weights become those of the CPU."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from training import CPU, build_solver, relative_error, weights_of

from caffepy.backend import Backend

DATA = """layer { name: "data" type: "DummyData" top: "data" top: "target" dummy_data_param {
  shape { dim: 8 dim: 6 dim: 4 dim: 4 } shape { dim: 8 dim: 8 dim: 4 dim: 4 }
  data_filler { type: "constant" value: 0.75 } data_filler { type: "constant" value: 0.25 } } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "x" convolution_param { num_output: 8 kernel_size: 3 pad: 1
  weight_filler { type: "gaussian" std: 0.2 } } }
"""
LOSS = 'layer { name: "loss" type: "EuclideanLoss" bottom: "x" bottom: "target" top: "loss" %s }'
NETS = {
    "a loss that is read elsewhere": LOSS % "loss_weight: 0.3"
    + 'layer { name: "half" type: "Power" bottom: "loss" top: "half" loss_weight: 1 power_param { scale: 0.5 } }',
    "a weight at a ReLU in place": 'layer { name: "relu" type: "ReLU" bottom: "x" top: "x" loss_weight: 0.01 }',
    "a weight at a ReLU that is read": 'layer { name: "relu" type: "ReLU" bottom: "x" top: "y" loss_weight: 0.01 }'
    + LOSS.replace('"x"', '"y"') % "",
    "scale and bias of one name": """layer { name: "bn" type: "BatchNorm" bottom: "x" top: "n" }
        layer { name: "scale" type: "Scale" bottom: "n" top: "y" param { name: "s" } param { name: "s" }
          scale_param { bias_term: true } }"""
    + LOSS.replace('"x"', '"y"') % "",
}


@pytest.fixture(autouse=True)
def bvlc(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss scale, which only NVIDIA Caffe has, would change BatchNorm's statistics."""
    monkeypatch.setenv("CAFFEPY_DIALECT", "bvlc")


def train(net: str, backend: Backend = CPU) -> tuple[dict[str, NDArray[np.float32]], float]:
    with build_solver('base_lr: 0.0005 lr_policy: "fixed" momentum: 0.9', net, backend) as solver:
        solver.step(8)
        return weights_of(solver.net), solver.net.loss()


@pytest.mark.parametrize("scale", ["", "global_grad_scale: 64 "])
@pytest.mark.parametrize("case", list(NETS))
def test_as_on_the_cpu(backend: Backend, case: str, scale: str) -> None:
    wanted, wanted_loss = train(DATA + NETS[case])
    found, loss = train(scale + DATA + NETS[case], backend)
    assert loss == pytest.approx(wanted_loss, rel=5e-3)
    for name, values in wanted.items():
        assert relative_error(found[name], values) < 5e-3 or np.abs(values).max() < 1e-6, name
