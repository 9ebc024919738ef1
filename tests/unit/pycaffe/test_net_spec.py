"""Nets written in Python, against what Caffe's net_spec.py writes."""

from __future__ import annotations

import numpy as np
import pytest
from google.protobuf import text_format

from caffepy.formats.proto import caffe_pb2
from caffepy.pycaffe import net_spec
from caffepy.pycaffe.net_spec import Function, NetSpec, Top, assign_proto, layers, param_name_dict, params, to_proto

L, P = layers, params

LENET = """
layer { name: "data" type: "Data" top: "data" top: "label" transform_param { scale: 0.00390625 }
        data_param { source: "digits" batch_size: 64 backend: LMDB } }
layer { name: "conv1" type: "Convolution" bottom: "data" top: "conv1"
        convolution_param { num_output: 20 kernel_size: 5 weight_filler { type: "xavier" } } }
layer { name: "pool1" type: "Pooling" bottom: "conv1" top: "pool1"
        pooling_param { pool: MAX kernel_size: 2 stride: 2 } }
layer { name: "ip1" type: "InnerProduct" bottom: "pool1" top: "ip1" param { lr_mult: 1 } param { lr_mult: 2 }
        inner_product_param { num_output: 10 } }
layer { name: "relu1" type: "ReLU" bottom: "ip1" top: "ip1" }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip1" bottom: "label" top: "loss" loss_weight: 2 }
"""


def lenet() -> NetSpec:
    n = NetSpec()
    n.data, n.label = L.Data(
        batch_size=64, backend=P.Data.LMDB, source="digits", transform_param={"scale": 1 / 256}, ntop=2
    )
    n.conv1 = L.Convolution(n.data, kernel_size=5, num_output=20, weight_filler={"type": "xavier"})
    n.pool1 = L.Pooling(n.conv1, kernel_size=2, stride=2, pool=P.Pooling.MAX)
    n.ip1 = L.InnerProduct(n.pool1, num_output=10, param=[{"lr_mult": 1}, {"lr_mult": 2}])
    n.relu1 = L.ReLU(n.ip1, in_place=True)
    n.loss = L.SoftmaxWithLoss(n.relu1, n.label, loss_weight=2)
    return n


def test_a_net_spec_writes_the_prototxt():
    expected = text_format.Parse(LENET, caffe_pb2.NetParameter())
    assert lenet().to_proto() == expected


def test_tops_without_names_are_numbered_by_type():
    data = L.DummyData(shape={"dim": [2, 3]})
    two = [L.InnerProduct(data, num_output=3) for _ in range(2)]
    both = L.ReLU(L.Concat(*two), in_place=True)
    found = [(layer.name, list(layer.top)) for layer in both.to_proto().layer]
    assert found == [
        ("DummyData1", ["DummyData1"]),
        ("InnerProduct1", ["InnerProduct1"]),
        ("InnerProduct2", ["InnerProduct2"]),
        ("Concat1", ["Concat1"]),
        ("ReLU1", ["Concat1"]),
    ]


def test_unnamed_tops_of_one_layer_count_on():
    data, label = L.DummyData(ntop=2)
    assert list(to_proto(data, label).layer[0].top) == ["DummyData1", "DummyData2"]


def test_a_layer_is_written_once_for_several_tops():
    data, label = L.DummyData(ntop=2)
    net = to_proto(L.Sigmoid(data), L.TanH(data), label)
    assert [layer.type for layer in net.layer] == ["DummyData", "Sigmoid", "TanH"]


def test_layers_without_tops_have_the_name_that_they_are_assigned():
    n = NetSpec()
    n.data, n.label = L.DummyData(shape={"dim": 3}, ntop=2)
    n.quiet = L.Silence(n.data, ntop=0)
    assert [(layer.name, len(layer.top)) for layer in n.to_proto().layer] == [("data", 2), ("quiet", 0)]
    silent = L.Silence(n.label, ntop=0)
    assert isinstance(silent, Function)
    assert silent.to_proto().layer[1].name == "Silence1"


def test_deep_nets_need_no_deep_stack():
    top = L.Input(shape={"dim": [1]})
    for _ in range(3000):
        top = L.Power(top, power=2)
    assert len(top.to_proto().layer) == 3001


def test_bottoms_must_be_tops():
    with pytest.raises(TypeError, match=r"^Silence input 1 is not a Top \(type is <class 'tuple'>\)$"):
        L.Silence(L.Input(), L.DummyData(ntop=2), ntop=0)


def test_parameters_reach_the_message_of_their_type_or_the_layer():
    layer = (
        L.Python(module="loss", layer="Loss", param_str="{}", loss_weight=1, name="own", phase=1).to_proto().layer[0]
    )
    assert (layer.python_param.module, layer.python_param.layer, layer.python_param.param_str) == ("loss", "Loss", "{}")
    assert (list(layer.loss_weight), layer.name, layer.phase) == ([1.0], "own", caffe_pb2.TEST)
    rules = L.Input(include={"phase": caffe_pb2.TRAIN})
    assert rules.to_proto().layer[0].include[0].phase == caffe_pb2.TRAIN


def test_unknown_parameters_are_named():
    with pytest.raises(AttributeError, match="layer type Convolution has no parameter 'kernel'"):
        L.Convolution(L.Input(), kernel=3).to_proto()
    with pytest.raises(AttributeError, match="layer type Silence has no parameter 'colour'"):
        L.Silence(L.Input(), ntop=0, colour=3).to_proto()
    with pytest.raises(AttributeError, match="no parameter 'num_outptu': .*; did you mean 'num_output'"):
        L.InnerProduct(L.Input(), num_outptu=3).to_proto()
    with pytest.raises(AttributeError, match="nor is there such a layer type; did you mean 'InnerProduct'"):
        L.InnerProdct(L.Input(), num_output=3).to_proto()


@pytest.mark.parametrize("value", [[1, 2], (1, 2), np.array([1, 2])])
def test_sequences_become_repeated_fields(value):
    message = caffe_pb2.BlobShape()
    assign_proto(message, "dim", value)
    assert list(message.dim) == [1, 2]


def test_sizes_of_pooling_for_each_axis():
    spec = NetSpec()
    spec.x = L.Input(shape={"dim": [1, 1, 4, 4, 4]})
    spec.y = L.Pooling(spec.x, kernel_size=[1, 2, 2], stride=(1, 2, 2), pad=0)
    param = spec.to_proto().layer[1].pooling_param
    assert (list(param.kernel_shape.dim), list(param.stride_shape.dim), param.pad) == ([1, 2, 2], [1, 2, 2], 0)


def test_assign_proto():
    layer = caffe_pb2.LayerParameter()
    assign_proto(layer, "loss_weight", 3)
    assign_proto(layer, "param", {"lr_mult": 2})
    assign_proto(layer, "dummy_data_param", {"shape": [{"dim": [2]}, {"dim": 3}], "num": []})
    assign_proto(layer, "convolution_param", caffe_pb2.ConvolutionParameter(group=2))
    assert list(layer.loss_weight) == [3]
    assert [param.lr_mult for param in layer.param] == [2]
    assert [list(shape.dim) for shape in layer.dummy_data_param.shape] == [[2], [3]]
    assert layer.convolution_param.group == 2
    deconvolution = layers.Deconvolution(layers.Input(), num_output=3).to_proto().layer[-1]
    assert deconvolution.convolution_param.num_output == 3
    assign_proto(layer, "convolution_param", {"num_output": 64 / 2, "kernel_size": [3, 4 / 2]})
    assert layer.convolution_param.num_output == 32 and list(layer.convolution_param.kernel_size) == [3, 2]
    with pytest.raises(AttributeError, match="colour"):
        assign_proto(layer, "colour", 1)
    with pytest.raises(TypeError):
        assign_proto(layer, "name", 1)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            {"num_output": 65 / 2},
            TypeError,
            r"num_output of ConvolutionParameter is 32\.5 and takes a whole number of 0 or more; write int",
        ),
        ({"kernel_size": [3, 2.5]}, TypeError, r"kernel_size of ConvolutionParameter is 2\.5 and takes a whole"),
        ({"num_output": -1}, ValueError, "num_output of ConvolutionParameter is -1 and takes a whole number of 0"),
        ({"weight_filler": {"std": "a"}}, TypeError, "std of FillerParameter is 'a' and takes a number$"),
        (
            {"weight_filler": "xavier"},
            AttributeError,
            "weight_filler of .* is 'xavier' and takes a dict with fields of FillerParameter",
        ),
        ({"param": [{"lr_mult": "x"}]}, TypeError, "lr_mult of ParamSpec is 'x' and takes a number"),
        ({"param": 3}, TypeError, "param of LayerParameter is 3 and takes a dict with fields of ParamSpec"),
        (
            {"engine": "FOO"},
            ValueError,
            "engine of ConvolutionParameter is 'FOO' and takes one of DEFAULT, CAFFE, CUDNN",
        ),
        ({"bias_term": "no"}, TypeError, "bias_term of ConvolutionParameter is 'no' and takes True or False"),
        ({"weight_filler": {"tpe": "x"}}, AttributeError, "FillerParameter has no field 'tpe'; did you mean 'type'"),
        ({"weight_filler": {"type": 3}}, TypeError, "type of FillerParameter is 3 and takes a text"),
    ],
)
def test_a_value_that_a_field_cannot_hold_names_layer_and_field(given, error, message):
    n = NetSpec()
    n.data = layers.Input(shape={"dim": [1, 3, 8, 8]})
    n.conv1 = layers.Convolution(n.data, **given)
    with pytest.raises(error, match=rf"^layer 'conv1' \(Convolution\): {message}"):
        n.to_proto()


def test_each_type_knows_its_field():
    names = param_name_dict()
    assert names["InnerProduct"] == "inner_product"
    assert names["LRN"] == "lrn"
    assert names["Python"] == "python"
    assert names["BatchNorm"] == "batch_norm"


def test_constants_of_parameter_messages():
    assert P.Pooling.AVE == caffe_pb2.PoolingParameter.AVE
    assert P.Eltwise.SUM == caffe_pb2.EltwiseParameter.SUM
    with pytest.raises(AttributeError, match="no message 'PolingParameter'"):
        P.Poling  # noqa: B018
    with pytest.raises(AttributeError, match="MEDIAN"):
        P.Pooling.MEDIAN  # noqa: B018


def test_items_attributes_and_nvidias_methods():
    n = lenet()
    assert n["conv1"] is n.conv1
    n["score"] = L.InnerProduct(n.pool1, num_output=3)
    assert "score" in n
    assert n.keys() == ["data", "label", "conv1", "pool1", "ip1", "relu1", "loss", "score"]
    assert all(isinstance(top, Top) for top in n.vals())
    n.update("score", {"num_output": 4})
    assert n.to_proto().layer[-1].inner_product_param.num_output == 4
    del n["score"]
    assert "score" not in dir(n)
    assert "conv1" in dir(n)
    del n.loss
    assert [layer.name for layer in n.to_proto().layer][-1] == "relu1"


def test_absent_tops():
    n = NetSpec()
    assert not hasattr(n, "conv1")
    with pytest.raises(AttributeError, match="the net has no top 'conv1'"):
        n.conv1  # noqa: B018
    with pytest.raises(KeyError):
        n["conv1"]


def test_verbose_logs_the_names(caplog):
    caplog.set_level("INFO", logger="caffepy")
    lenet().to_proto(verbose=True)
    assert "conv1 of Top(Convolution, 0)" in caplog.text


def test_module_names():
    assert isinstance(net_spec.layers, net_spec.Layers)
    assert isinstance(net_spec.params, net_spec.Parameters)
    assert not hasattr(net_spec.layers, "__wrapped__")
