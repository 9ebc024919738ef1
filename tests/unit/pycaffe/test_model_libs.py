"""`caffe.model_libs`: the nets have SSD's layers, sizes and settings, and run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from caffepy.backend import create_backend
from caffepy.formats.proto import caffe_pb2
from caffepy.formats.prototxt import parse_text
from caffepy.layers import LayerContext
from caffepy.net import Net
from caffepy.pycaffe import model_libs
from caffepy.pycaffe.net_spec import NetSpec, layers


def spec(side: int = 224) -> NetSpec:
    net = NetSpec()
    net.data = layers.Input(shape={"dim": [1, 3, side, side]})
    return net


def layer(net: NetSpec, name: str) -> Any:
    return next(one for one in net.to_proto().layer if one.name == name)


def counts(net: NetSpec) -> Counter[str]:
    return Counter(one.type for one in net.to_proto().layer)


def shapes(net: NetSpec) -> dict[str, tuple[int, ...]]:
    """Shapes of the blobs, from the net as a text."""
    param = caffe_pb2.NetParameter()
    parse_text(str(net.to_proto()), param, "spec")
    backend = create_backend()
    with backend.activate():
        built = Net(param, LayerContext(backend, phase=caffe_pb2.TEST, run_fillers=False))
        return {name: blob.shape for name, blob in built.blobs.items()}


def test_the_base_net_of_ssd() -> None:
    net = model_libs.VGGNetBody(spec(300), "data", fully_conv=True, reduced=True, dilated=True, dropout=False)
    fc6 = layer(net, "fc6").convolution_param
    assert (fc6.num_output, list(fc6.dilation), list(fc6.pad), list(fc6.kernel_size)) == (1024, [6], [6], [3])
    assert counts(net) == {"Input": 1, "Convolution": 15, "ReLU": 15, "Pooling": 5}
    sizes = shapes(net)
    assert sizes["conv4_3"] == (1, 512, 38, 38) and sizes["fc7"] == (1, 1024, 19, 19)


@pytest.mark.parametrize(
    ("settings", "fc6"),
    [
        ({}, (1, 4096)),
        ({"fully_conv": True}, (1, 4096, 7, 7)),
        ({"fully_conv": True, "reduced": True}, (1, 1024, 7, 7)),
        ({"fully_conv": True, "dilated": True}, (1, 4096, 14, 14)),
        ({"nopool": True}, (1, 4096)),
        ({"fully_conv": True, "reduced": True, "dilate_pool4": True}, (1, 1024, 14, 14)),
    ],
)
def test_variants_of_vgg(settings: dict[str, bool], fc6: tuple[int, ...]) -> None:
    net = model_libs.VGGNetBody(spec(), "data", freeze_layers=["conv1_1", "none"], **settings)
    assert shapes(net)["fc6"] == fc6
    assert [p.lr_mult for p in layer(net, "conv1_1").param] == [0, 0]
    assert [p.lr_mult for p in layer(net, "conv1_2").param] == [1, 2]


@pytest.mark.parametrize("body", [model_libs.ZFNetBody, model_libs.AlexNetBody])
@pytest.mark.parametrize("convolutions", [False, True])
def test_nets_of_five_convolutions(body: Any, convolutions: bool) -> None:
    net = body(spec(227), "data", fully_conv=convolutions, reduced=True, dilated=True, need_fc8=True)
    assert shapes(net)["prob"][:2] == (1, 1000)
    assert counts(net)["Convolution"] == 5 + 3 * convolutions and counts(net)["Dropout"] == 2


@pytest.mark.parametrize(("body", "convolutions"), [(model_libs.ResNet101Body, 104), (model_libs.ResNet152Body, 155)])
def test_resnets(body: Any, convolutions: int) -> None:
    net = body(spec(64), "data", use_dilation_conv5=True, use_global_stats=True)
    assert counts(net)["Convolution"] == counts(net)["BatchNorm"] == counts(net)["Scale"] == convolutions
    assert shapes(net)["res5c"] == (1, 2048, 4, 4) and shapes(net)["pool5"] == (1, 2048, 1, 1)
    assert layer(net, "bn2a_branch1").batch_norm_param.use_global_stats
    assert [p.lr_mult for p in layer(net, "scale2a_branch1").param] == [0, 0]


def test_inception() -> None:
    net = model_libs.InceptionV3Body(spec(299), "data", output_pred=True)
    sizes = shapes(net)
    assert sizes["mixed_10/join"] == (1, 2048, 8, 8) and sizes["softmax_prob"] == (1, 1008)
    assert counts(net)["Convolution"] == counts(net)["Bias"] == 94


def test_heads() -> None:
    net = model_libs.VGGNetBody(spec(300), "data", need_fc=False)
    tops = model_libs.CreateMultiBoxHead(
        net,
        num_classes=21,
        from_layers=["conv4_3", "conv5_3"],
        min_sizes=[30, [60]],
        max_sizes=[60, [111]],
        aspect_ratios=[2, [2, 3]],
        normalizations=[20, -1],
        steps=[8, 16],
        use_batchnorm=False,
        use_objectness=True,
        inter_layer_depth=[0, 64],
        prior_variance=[0.1, 0.1, 0.2, 0.2],
        lr_mult=2,
        kernel_size=3,
        pad=1,
    )
    assert len(tops) == 4
    sizes = shapes(net)
    priors = 38 * 38 * 4 + 19 * 19 * 6
    assert sizes["conv5_3_inter"] == (1, 64, 19, 19)
    assert sizes["mbox_priorbox"] == (1, 2, 4 * priors) and sizes["mbox_loc"] == (1, 4 * priors)
    assert sizes["mbox_conf"] == (1, 21 * priors) and sizes["mbox_objectness"] == (1, 2 * priors)
    assert layer(net, "conv4_3_norm").norm_param.scale_filler.value == 20
    assert [p.lr_mult for p in layer(net, "conv4_3_norm_mbox_loc").param] == [2, 4]
    with pytest.raises(ValueError, match="max_sizes has 1 entries for 2 from_layers"):
        model_libs.CreateMultiBoxHead(
            net, num_classes=2, from_layers=["conv4_3", "conv5_3"], min_sizes=[1, 2], max_sizes=[3]
        )
    with pytest.raises(ValueError, match="no layer 'images'"):
        model_libs.VGGNetBody(net, "images")


def test_data_layer() -> None:
    net = NetSpec()
    sampler = [{"max_sample": 1}]
    net.data, net.label = model_libs.CreateAnnotatedDataLayer("db", batch_size=4, batch_sampler=sampler, anno_type=0)
    data = layer(net, "data")
    assert (data.data_param.source, data.data_param.batch_size, list(data.top)) == ("db", 4, ["data", "label"])
    assert data.include[0].phase == caffe_pb2.TRAIN and data.annotated_data_param.batch_sampler[0].max_sample == 1
    net = NetSpec()
    net.data = model_libs.CreateAnnotatedDataLayer("db", train=False, output_label=False)
    assert layer(net, "data").include[0].phase == caffe_pb2.TEST


def test_values_and_folders(tmp_path: Path) -> None:
    assert model_libs.UnpackVariable(3, 2) == model_libs.UnpackVariable([3], 2) == [3, 3]
    assert model_libs.UnpackVariable([1, 2], 2) == [1, 2]
    with pytest.raises(ValueError, match="has 3 values; give 1 or 2"):
        model_libs.UnpackVariable([1, 2, 3], 2)
    folder = str(tmp_path / "a" / "b")
    assert not model_libs.check_if_exist(folder)
    for _ in range(2):
        model_libs.make_if_not_exist(folder)
    assert model_libs.check_if_exist(folder)
