"""NaN passes on through each convolution with ReLU and through a net; the primitives are in test_primitives.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backend_arrays import dirty, normal, to_device
from convolution_checks import families_of
from primitive_checks.convolution import NAN

from caffepy.backend import Backend
from caffepy.backend.types import DTYPES
from caffepy.formats.proto import caffe_pb2
from caffepy.formats.prototxt import parse_text
from caffepy.layers.layer import LayerContext
from caffepy.net import Net


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", NAN)
def test_every_candidate_of_a_convolution_with_relu(backend: Any, case: str, dtype: str) -> None:
    """cuDNN's fused ReLU too: the frontend asks it to pass NaN on (CUDNN_PROPAGATE_NAN)."""
    from caffepy.backend.cuda.convolution.algorithm import Operands
    from caffepy.backend.cuda.convolution.problem import Direction, Problem, Task

    x_shape, outputs, geometry = NAN[case]
    weights_shape = (outputs, x_shape[1] // geometry.group, *geometry.kernel)
    problem = Problem(x_shape, weights_shape, geometry, dtype)
    host = normal(1, x_shape)
    host[(0,) * len(x_shape)] = np.nan
    x = to_device(backend, host, dtype)
    weights = to_device(backend, np.abs(normal(2, weights_shape)) + 0.1, dtype)
    bias = to_device(backend, normal(3, (outputs,)))
    tried = 0
    for with_bias in (False, True):
        task = Task(problem, Direction.FORWARD, with_bias, True, False)
        for family in families_of(backend, task):
            for candidate in list(family.candidates())[:4]:
                if not candidate.prepare():
                    continue
                tried += 1
                y = dirty(backend, problem.y, dtype)
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
