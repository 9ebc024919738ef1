"""A small net, its input and its output, for tests of forward passes."""

from __future__ import annotations

from typing import Any

import numpy as np
from fake_graph_backend import FakeGraphBackend
from google.protobuf import text_format

from caffepy.backend import Backend
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.layer import LayerContext
from caffepy.net import Net
from caffepy.net.executor import ForwardExecutor

NET = """
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 5 dim: 5 } } }
layer { name: "c" type: "Convolution" bottom: "data" top: "c"
  convolution_param { num_output: 4 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "n" type: "BatchNorm" bottom: "c" top: "c" }
layer { name: "s" type: "Scale" bottom: "c" top: "c" scale_param { bias_term: true } }
layer { name: "r" type: "ReLU" bottom: "c" top: "c" }
layer { name: "drop" type: "Dropout" bottom: "c" top: "out" }
"""
HOST = (
    NET + 'layer { name: "noise" type: "DummyData" top: "noise" dummy_data_param { shape { dim: 3 } data_filler { '
    'type: "gaussian" } } }'
)
"""A layer that draws its numbers on the host."""


def build(phase: int = caffe_pb2.TEST, text: str = NET, fuse: bool = True, backend: Backend | None = None) -> Net:
    param = text_format.Parse(text, caffe_pb2.NetParameter())
    net = Net(param, LayerContext(backend or FakeGraphBackend(), phase=phase, seed=3), fuse=fuse)
    give(net, 1)
    return net


def give(net: Net, seed: int) -> None:
    blob = net.blobs["data"]
    net.backend.from_host(np.random.default_rng(seed).standard_normal(blob.shape), blob.data)


def values(runner: ForwardExecutor) -> Any:
    runner.forward()
    return runner.net.blobs["out"].host_data()
