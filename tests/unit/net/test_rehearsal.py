"""A net that runs to note which kernels it needs."""

from __future__ import annotations

from google.protobuf import text_format

from caffepy.backend.cpu.backend import CpuBackend, Rehearsal
from caffepy.backend.cpu.jit.ahead import recorded_entries
from caffepy.layers import LayerContext
from caffepy.net.rehearsal import rehearse
from caffepy.proto import caffe_pb2

NET = """
layer { name: "data" type: "Input" top: "x" top: "label" input_param { shape { dim: 4 dim: 3 dim: 8 dim: 8 }
  shape { dim: 4 } } }
layer { name: "conv" type: "Convolution" bottom: "x" top: "c" convolution_param { num_output: 4 kernel_size: 3 } }
layer { name: "norm" type: "BatchNorm" bottom: "c" top: "n" }
layer { name: "ip" type: "InnerProduct" bottom: "n" top: "y" inner_product_param { num_output: 5 } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "y" bottom: "label" top: "loss" loss_param { ignore_label: 1 } }
"""


def test_both_passes_are_noted_without_other_devices() -> None:
    called: list[str] = []
    context = LayerContext(CpuBackend(1), caffe_pb2.TRAIN)
    context.all_reduce_sum = lambda _: called.append("sum")
    context.all_reduce_mean = lambda _: called.append("mean")
    param = text_format.Parse(NET, caffe_pb2.NetParameter())
    with recorded_entries() as noted:
        rehearse(param, context, None, Rehearsal(1))
    names = {entry.name.rpartition("_")[0] for entry in noted}
    assert {"correlate", "correlate_weights", "loss", "loss_backward"} <= names
    assert called == []
    assert context.backend.holds_values
