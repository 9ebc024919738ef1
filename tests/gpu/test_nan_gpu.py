"""NaN passes on through everything on the GPU that takes a maximum, in every dtype and every convolution."""

from __future__ import annotations

from typing import Any

import nan_checks as checks
import numpy as np
import pytest
from dtype_checks import dtypes

from caffepy.backend import Backend, Geometry
from caffepy.config.text import parse_text
from caffepy.layers.core.base import LayerContext
from caffepy.net import Net
from caffepy.proto import caffe_pb2

WINDOWS = {
    "LeNet": ((8, 20, 12, 12), 50, Geometry((5, 5), (1, 1), (0, 0), (1, 1))),
    "3x3": ((4, 64, 14, 14), 64, Geometry((3, 3), (1, 1), (1, 1), (1, 1))),
    "1x1": ((4, 16, 8, 8), 32, Geometry((1, 1), (1, 1), (0, 0), (1, 1))),
    "7x7 / 2": ((2, 3, 23, 21), 16, Geometry((7, 7), (2, 2), (3, 3), (1, 1))),
    "one channel": ((16, 1, 28, 28), 20, Geometry((5, 5), (1, 1), (0, 0), (1, 1))),
    "two groups": ((2, 32, 9, 9), 64, Geometry((3, 3), (1, 1), (1, 1), (1, 1), 2)),
    "one axis": ((2, 3, 12), 4, Geometry((3,), (2,), (1,), (1,))),
}


@dtypes
@pytest.mark.parametrize("shape", checks.SHAPES)
def test_formulas(backend: Backend, shape: tuple[int, ...], dtype: str) -> None:
    checks.check_formulas(backend, shape, dtype)
    if len(shape) > 1:
        checks.check_channel_formulas(backend, shape, dtype)


@dtypes
@pytest.mark.parametrize("mask", ["int32", "uint8"])
@pytest.mark.parametrize("case", checks.POOLINGS)
def test_pooling(backend: Backend, case: Any, mask: str, dtype: str) -> None:
    checks.check_pooling(backend, *case, dtype, mask)


@pytest.mark.parametrize(("shape", "axis"), [((3, 5), 1), ((2, 4, 3, 3), 1), ((64, 1000), 1), ((4, 9000), 1)])
def test_softmax_loss(backend: Backend, shape: tuple[int, ...], axis: int) -> None:
    checks.check_softmax_loss(backend, shape, axis)


def test_statistics(backend: Backend) -> None:
    checks.check_statistics_of_sums(backend, 33)


@dtypes
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("shape", [(3, 8, 4, 4), (2, 33, 3, 3), (64, 5)])
def test_normalised(backend: Backend, shape: tuple[int, ...], residual: bool, mask: bool, dtype: str) -> None:
    checks.check_normalised(backend, shape, dtype, residual, mask)


@dtypes
@pytest.mark.parametrize("case", list(WINDOWS))
def test_the_chosen_convolution(backend: Backend, case: str, dtype: str) -> None:
    checks.check_convolution(backend, *WINDOWS[case], dtype)


@dtypes
@pytest.mark.parametrize("case", list(WINDOWS))
def test_every_candidate_of_a_convolution_with_relu(backend: Any, case: str, dtype: str) -> None:
    """cuDNN's fused ReLU too: the frontend asks it to pass NaN on (CUDNN_PROPAGATE_NAN)."""
    from caffepy.backend.cuda.convolution.algorithm import Operands
    from caffepy.backend.cuda.convolution.plan import CudaConvolutionPlan
    from caffepy.backend.cuda.convolution.problem import Direction, Problem, Task
    from caffepy.backend.cuda.convolution.registry import algorithm_families

    x_shape, outputs, geometry = WINDOWS[case]
    weights_shape = (outputs, x_shape[1] // geometry.group, *geometry.kernel)
    problem = Problem(x_shape, weights_shape, geometry, dtype)
    host = checks.normal(1, x_shape)
    host[(0,) * len(x_shape)] = np.nan
    x = checks.to_device(backend, host, dtype)
    weights = checks.to_device(backend, np.abs(checks.normal(2, weights_shape)) + 0.1, dtype)
    bias = checks.to_device(backend, checks.normal(3, (outputs,)))
    tried = 0
    for with_bias in (False, True):
        task = Task(problem, Direction.FORWARD, with_bias, True, False)
        plan = CudaConvolutionPlan(problem, backend._resources)
        for family in algorithm_families(task, plan.run, plan.candidate, backend._resources):
            for candidate in list(family.candidates())[:4]:
                if not candidate.prepare():
                    continue
                tried += 1
                y = checks.dirty(backend, problem.y, dtype)
                candidate.run(Operands(x, weights, y, bias if with_bias else None))
                found = backend.to_host(y)
                reached = found[(0, slice(0, outputs // geometry.group), *(0,) * len(geometry.kernel))]
                assert np.isnan(reached).all(), f"{candidate.name}, bias {with_bias}: NaN became {reached}"
    assert tried


@pytest.mark.parametrize("kind", ["FLOAT", "FLOAT16", "BFLOAT16"])
def test_the_loss_of_a_net_that_overflows_is_not_finite(backend: Backend, kind: str) -> None:
    """Infinite pixels times weights of both signs are NaN behind the first convolution; nothing may hide that."""
    text = f"""default_forward_type: {kind} default_backward_type: {kind}
        layer {{ name: "x" type: "Input" top: "x" input_param {{ shape {{ dim: 4 dim: 3 dim: 12 dim: 12 }} }} }}
        layer {{ name: "l" type: "Input" top: "l" input_param {{ shape {{ dim: 4 }} }} }}
        layer {{ name: "conv" type: "Convolution" bottom: "x" top: "conv" convolution_param {{ num_output: 8
          kernel_size: 3 weight_filler {{ type: "gaussian" std: 1 }} }} }}
        layer {{ name: "relu" type: "ReLU" bottom: "conv" top: "conv" }}
        layer {{ name: "pool" type: "Pooling" bottom: "conv" top: "pool" pooling_param {{ kernel_size: 2 stride: 2 }} }}
        layer {{ name: "ip" type: "InnerProduct" bottom: "pool" top: "ip" inner_product_param {{ num_output: 16
          weight_filler {{ type: "gaussian" std: 1 }} }} }}
        layer {{ name: "relu2" type: "ReLU" bottom: "ip" top: "ip" }}
        layer {{ name: "last" type: "InnerProduct" bottom: "ip" top: "last" inner_product_param {{ num_output: 5
          weight_filler {{ type: "gaussian" std: 1 }} }} }}
        layer {{ name: "loss" type: "SoftmaxWithLoss" bottom: "last" bottom: "l" top: "loss" }}"""
    param = parse_text(text, caffe_pb2.NetParameter(), "net")
    for fuse in (False, True):
        net = Net(param, LayerContext(backend, phase=caffe_pb2.TRAIN), fuse=fuse)
        backend.from_host(np.full((4, 3, 12, 12), np.inf, np.float32), net.blobs["x"].data)
        net.forward()
        assert np.isnan(net.loss())
