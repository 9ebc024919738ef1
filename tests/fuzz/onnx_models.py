"""ONNX models, read as Caffe nets."""

from __future__ import annotations

from fuzz.mutate import Random, damage_message
from fuzz.target import BinaryTarget
from google.protobuf import text_format
from onnx import ModelProto

from caffepy.backend.cpu.backend import CpuBackend
from caffepy.export.onnx.write import serialised, to_model
from caffepy.export.onnx_import.read import read_onnx
from caffepy.export.prepare import Settings, build, inference_net
from caffepy.formats.proto import caffe_pb2
from caffepy.net import Net

_INPUT = 'layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 4 dim: 6 dim: 6 } } }'
_BODIES = (
    """layer { name: "conv" type: "Convolution" bottom: "data" top: "conv" convolution_param { num_output: 4
  kernel_size: 3 pad: 1 group: 2 } } layer { name: "bn" type: "BatchNorm" bottom: "conv" top: "conv" }
layer { name: "scale" type: "Scale" bottom: "conv" top: "conv" scale_param { bias_term: true } }
layer { name: "pool" type: "Pooling" bottom: "conv" top: "pool" pooling_param { pool: AVE kernel_size: 3 stride: 2 } }
layer { name: "fc" type: "InnerProduct" bottom: "pool" top: "fc" inner_product_param { num_output: 3 } }
layer { name: "soft" type: "Softmax" bottom: "fc" top: "soft" }""",
    """layer { name: "norm" type: "Normalize" bottom: "data" top: "norm" }
layer { name: "mvn" type: "MVN" bottom: "data" top: "mvn" }
layer { name: "shuffle" type: "ShuffleChannel" bottom: "norm" top: "shuffle" shuffle_channel_param { group: 2 } }
layer { name: "sum" type: "Eltwise" bottom: "shuffle" bottom: "mvn" top: "sum" eltwise_param { coeff: 1 coeff: 2 } }
layer { name: "up" type: "Upsample" bottom: "sum" top: "up" upsample_param { scale: 2 } }
layer { name: "cut" type: "Slice" bottom: "up" top: "a" top: "b" }
layer { name: "cat" type: "Concat" bottom: "b" bottom: "a" top: "cat" }
layer { name: "p" type: "Permute" bottom: "cat" top: "p" permute_param { order: 0 order: 2 order: 3 order: 1 } }
layer { name: "r" type: "Reduction" bottom: "p" top: "r" reduction_param { axis: 2 } }""",
)


def models() -> list[bytes]:
    """Whole models."""
    found = []
    for body in _BODIES:
        param = inference_net(text_format.Parse(_INPUT + body, caffe_pb2.NetParameter()), Settings())
        net: Net = build(param, CpuBackend(1))
        found.append(serialised(to_model(net)))
    return found


class OnnxModel(BinaryTarget):
    """A model; damaged bytes are seldom a message, so that most are damaged as messages."""

    name = "ONNX model"
    file = "model.onnx"
    kind = ModelProto

    def prepare(self) -> None:
        self.seeds = models()

    def make(self, random: Random) -> bytes:
        if random.random() < 0.2:
            return super().make(random)
        message = ModelProto.FromString(random.choice(self.seeds))
        part = random.choice((message, message.graph, *message.graph.node, *message.graph.initializer))
        damage_message(part, random)
        return message.SerializePartialToString()

    def read(self) -> None:
        read_onnx(self.path, "net")


TARGETS = (OnnxModel,)
