"""The net that both exports get: folding of normalization, and nets that are refused."""

from __future__ import annotations

import numpy as np
import pytest
from export_cases import CHAIN
from google.protobuf import text_format
from onnx_nets import assert_exported, net_of

from caffepy.errors import ConfigError
from caffepy.export.check import random_inputs, run_net
from caffepy.export.prepare import Settings, build, fold_batch_norms, inference_net, with_parameters
from caffepy.formats.dialect import override_dialect
from caffepy.formats.proto import caffe_pb2


@pytest.mark.parametrize("dialect", ["bvlc", "nvidia"])
def test_folding_gives_the_same_numbers_with_fewer_layers(dialect: str):
    with override_dialect(dialect):
        net = net_of(CHAIN.replace('layer { name: "quiet"', 'layer { exclude { phase: TEST } name: "quiet"'))
        folded = fold_batch_norms(with_parameters(inference_net(net.param, Settings()), net), dialect == "nvidia")
    assert [layer.type for layer in folded.layer if layer.type in ("BatchNorm", "Scale")] == ["Scale", "Scale"]
    other = build(folded, net.backend)
    other.copy_trained_layers_from(folded, "folded")
    inputs = random_inputs(net)
    wanted, found = run_net(net, inputs)["sum"], run_net(other, inputs)["sum"]
    assert np.abs(wanted - found).max() <= 1e-5 * np.abs(wanted).max()
    assert_exported(other)


def test_folding_of_bn():
    kinds = ("eps: 1e-3", "inverse_std: true", "bn_mode: INFERENCE")
    text = 'layer { name: "data" type: "Input" top: "x" input_param { shape { dim: 2 dim: 3 dim: 6 dim: 6 } } }'
    bottom = "x"
    for number, fields in enumerate((*kinds, "bn_mode: LEARN")):
        top = f"x{number}"
        text += f"""
    layer {{ name: "c{number}" type: "Convolution" bottom: "{bottom}" top: "{top}" convolution_param {{ num_output: 4
      kernel_size: 1 }} }}
    layer {{ name: "bn{number}" type: "BN" bottom: "{top}" top: "{top}" bn_param {{ {fields} }} }}"""
        bottom = top
    net = net_of(text)
    folded = fold_batch_norms(with_parameters(inference_net(net.param, Settings()), net))
    assert [layer.type for layer in folded.layer if layer.type in ("BN", "Scale")] == ["BN"]
    other = build(folded, net.backend)
    other.copy_trained_layers_from(folded, "folded")
    inputs = random_inputs(net)
    wanted, found = run_net(net, inputs)["x3"], run_net(other, inputs)["x3"]
    assert np.abs(wanted - found).max() <= 1e-4 * np.abs(wanted).max()
    assert_exported(other)


def test_a_net_without_layers_is_refused_with_its_phase():
    with pytest.raises(ConfigError, match="the net has no layers for inference in the TEST phase; give --phase or "):
        inference_net(caffe_pb2.NetParameter(), Settings())


def test_a_data_layer_is_refused():
    text = 'layer { name: "d" type: "Data" top: "data" data_param { source: "x" batch_size: 2 } }'
    param = text_format.Parse(text, caffe_pb2.NetParameter())
    with pytest.raises(
        ConfigError, match="layer 'd' .Data. reads records, which an exported net does not; export the deploy"
    ):
        inference_net(param, Settings())
