"""`caffepy.net.deploy` and `caffepy deploy`: the deploy nets of training nets."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import generate
import numpy as np
import pytest
from google.protobuf import text_format

import caffepy
from caffepy.backend import create_backend
from caffepy.cli.main import main
from caffepy.data.sources.databases import write_datums
from caffepy.errors import ConfigError
from caffepy.formats.caffemodel import write_caffemodel
from caffepy.formats.load import read_net
from caffepy.formats.messages import walk_fields
from caffepy.formats.proto import caffe_pb2
from caffepy.layers import LayerContext
from caffepy.net import Net
from caffepy.net.deploy import deploy_net, plan_deploy
from caffepy.net.record_shape import told_shape

MODELS = Path(generate.__file__).parent
NO_SOFTMAX = "fcn8s/deploy"
"""The published net ends in scores; its loss begins with a Softmax, which the deploy net then has."""
PAIR = "mnist_siamese/deploy"
"""The published net is one half of the train net, and takes one image instead of a pair."""


def net_of(text: str) -> caffe_pb2.NetParameter:
    return text_format.Parse(text, caffe_pb2.NetParameter())


def inferred(net: caffe_pb2.NetParameter, **options: object) -> caffe_pb2.NetParameter:
    return deploy_net(net, plan_deploy(net, **options))


@pytest.mark.parametrize("path", [path for path in generate.DEPLOYS if path != PAIR])
def test_the_deploy_nets_of_the_models(path: str):
    train, deploy = generate.DEPLOYS[path]
    net = read_net(MODELS / f"{train if '/' in train else f'{train}/train_val'}.prototxt")
    shapes = {name: shape[1:] for name, shape in deploy.inputs.items()}
    found = deploy_net(net, replace(plan_deploy(net, shapes), sizes=deploy.sizes))
    if path == NO_SOFTMAX:
        assert found.layer[-1].type == "Softmax"
        del found.layer[-1]
    assert found == read_net(MODELS / f"{path}.prototxt")


def test_bvlc_caffe_parses_the_inputs_of_the_models():
    """Preparations have BVLC's fields alone, except for the resize of SSD, whose nets need SSD's Caffe anyway."""
    wire = json.loads((MODELS.parent / "tests/golden/wire.json").read_text())["bvlc"]["messages"]
    for path in generate.DEPLOYS:
        for layer in read_net(MODELS / f"{path}.prototxt").layer:
            if layer.type == "Input":
                used = {owner.DESCRIPTOR.name + "." + field.name for owner, field, _, _ in walk_fields(layer)}
                foreign = {name for name in used if name.split(".")[1] not in wire.get(name.split(".")[0], ())}
                assert not {name for name in foreign if "resize" not in name.lower()}, path
                assert not foreign or "ssd" in path


CROPPED = ["caffenet", "vgg16", "googlenet", "resnet18", "inception_v3", "ssd300"]


@pytest.mark.parametrize("folder", CROPPED)
def test_shapes_that_follow_from_the_prototxt(folder: str):
    found = inferred(read_net(MODELS / folder / "train_val.prototxt"), batch=5)
    wanted = read_net(MODELS / folder / "deploy.prototxt").layer[0].input_param.shape[0].dim
    assert found.layer[0].input_param.shape[0].dim == [5, *wanted[1:]]


def test_a_siamese_net_keeps_both_halves_and_what_they_share():
    net = read_net(MODELS / "mnist_siamese/train_val.prototxt")
    found = inferred(net, shapes={"pair_data": (2, 28, 28)})
    assert {"feat", "feat_p"} <= {top for layer in found.layer for top in layer.top}
    assert [param.name for layer in found.layer if layer.name == "conv1_p" for param in layer.param] == [
        "conv1_w",
        "conv1_b",
    ]
    assert not any(param.HasField("lr_mult") for layer in found.layer for param in layer.param)


SHARED = """
    layer { name: "data" type: "MemoryData" top: "data" top: "label"
            memory_data_param { batch_size: 4 channels: 6 height: 1 width: 1 } }
    layer { name: "a" type: "InnerProduct" bottom: "data" top: "a" param { name: "w" lr_mult: 2 } param { lr_mult: 3 }
            inner_product_param { num_output: 4 } }
    layer { name: "b" type: "InnerProduct" bottom: "a" top: "b" inner_product_param { num_output: 6 }
            param { name: "w" share_mode: PERMISSIVE } param { lr_mult: 3 } }
    layer { name: "loss" type: "SoftmaxWithLoss" bottom: "b" bottom: "label" }
"""


def test_parameters_of_other_shapes_stay_shared():
    found = inferred(net_of(SHARED), shapes={"data": (6, 1, 1)})
    b = next(layer for layer in found.layer if layer.name == "b")
    assert text_format.MessageToString(b.param[0]).split() == ["name:", '"w"', "share_mode:", "PERMISSIVE"]
    net = Net(found, LayerContext(create_backend(None, 1), phase=caffe_pb2.TEST))
    first, second = (layer.blobs[0] for layer in net.layers[1:3])
    assert first.gradient_owner is first and second.gradient_owner is first


def test_a_net_of_nvidias_dialect_computes_the_same_without_the_field_that_chose_it():
    text = """reduce_buckets: 2
    layer { name: "data" type: "MemoryData" top: "data" top: "label"
            memory_data_param { batch_size: 4 channels: 3 height: 2 width: 2 } }
    layer { name: "fc" type: "InnerProduct" bottom: "data" top: "fc" inner_product_param { num_output: 3 } }
    layer { name: "bn" type: "BatchNorm" bottom: "fc" top: "bn" batch_norm_param { eps: 1e-7 } }
    layer { name: "same" type: "BatchNorm" bottom: "bn" top: "same" }
    layer { name: "loss" type: "InfogainLoss" bottom: "same" bottom: "label" infogain_loss_param { source: "h" } }
    """
    found = inferred(net_of(text), shapes={"data": (3, 2, 2)})
    assert [layer.type for layer in found.layer] == ["Input", "InnerProduct", "BatchNorm", "BatchNorm"]
    assert [layer.batch_norm_param.eps for layer in found.layer[2:]] == pytest.approx([1e-5, 1e-5], rel=1e-6)
    assert not found.layer[3].HasField("batch_norm_param")
    found = inferred(net_of(text.replace("reduce_buckets: 2", "")), shapes={"data": (3, 2, 2)})
    assert [layer.type for layer in found.layer] == ["Input", "InnerProduct", "BatchNorm", "BatchNorm", "Softmax"]
    assert found.layer[2].batch_norm_param.eps == pytest.approx(1e-7)


TASKS = """
    layer { name: "data" type: "MemoryData" top: "data" top: "label"
            memory_data_param { batch_size: 4 channels: 3 height: 2 width: 2 } }
    layer { name: "fc" type: "InnerProduct" bottom: "data" top: "fc" inner_product_param { num_output: 3 } }
    layer { name: "drop" type: "Dropout" bottom: "fc" top: "fc" }
    layer { name: "a" type: "InnerProduct" bottom: "fc" top: "a" inner_product_param { num_output: 3 } }
    layer { name: "b" type: "InnerProduct" bottom: "fc" top: "b" inner_product_param { num_output: 3 } }
    layer { name: "loss_a" type: "SoftmaxWithLoss" bottom: "a" bottom: "label" top: "loss_a"
            softmax_param { axis: -1 } }
    layer { name: "target" type: "Power" bottom: "data" top: "target" }
"""


def test_several_losses_and_targets():
    text = TASKS + 'layer { name: "loss_b" type: "SigmoidCrossEntropyLoss" bottom: "b" bottom: "target" top: "loss_b" }'
    found = inferred(net_of(text), shapes={"data": (3, 2, 2)})
    assert [(layer.type, layer.name) for layer in found.layer] == [
        ("Input", "data"),
        ("InnerProduct", "fc"),
        ("Dropout", "drop"),
        ("InnerProduct", "a"),
        ("InnerProduct", "b"),
        ("Softmax", "prob"),
        ("Sigmoid", "b_prob"),
    ]
    assert found.layer[-2].softmax_param.axis == -1


@pytest.mark.parametrize(
    "layer",
    [
        'type: "DenseBlock" denseblock_param { numTransition: 1 growthRate: 2 }',
        'type: "DepthwiseConvolution" convolution_param { num_output: 3 kernel_size: 1 }',
        'type: "Local" local_param { num_output: 2 kernel_size: 1 }',
    ],
)
def test_scores_that_a_forks_layer_learns_are_outputs(layer: str):
    data = TASKS[: TASKS.index('    layer { name: "fc"')]
    loss = 'layer { type: "SoftmaxWithLoss" bottom: "score" bottom: "label" top: "loss" }'
    found = inferred(
        net_of(f'{data} layer {{ bottom: "data" top: "score" {layer} }} {loss}'), shapes={"data": (3, 2, 2)}
    )
    assert found.layer[-1].type == "Softmax" and found.layer[-1].bottom == ["score"]


def test_an_auxiliary_classifier_is_left_out():
    text = (
        TASKS
        + """layer { name: "aux" type: "SoftmaxWithLoss" bottom: "b" bottom: "label" top: "aux"
                              loss_weight: 0.3 }"""
    )
    names = [layer.name for layer in inferred(net_of(text), shapes={"data": (3, 2, 2)}).layer]
    assert names == ["data", "fc", "drop", "a", "prob"]


def test_chosen_outputs():
    found = inferred(net_of(TASKS), shapes={"data": (3, 2, 2)}, outputs=["fc"])
    assert [layer.name for layer in found.layer] == ["data", "fc", "drop"]


@pytest.mark.parametrize(
    ("transform", "shape"),
    [
        ("crop_size: 7", (3, 7, 7)),
        ("crop_h: 4 crop_w: 5 mean_value: 1 mean_value: 2", (2, 4, 5)),
        ("crop_size: 7 force_gray: true mean_value: 3", (1, 7, 7)),
        ("resize_param { height: 8 width: 9 }", (3, 8, 9)),
        ("scale: 2", None),
    ],
)
def test_the_shape_of_a_record(transform: str, shape: tuple[int, ...] | None):
    layer = net_of(f'layer {{ name: "d" type: "Data" transform_param {{ {transform} }} }}').layer[0]
    told = told_shape(layer, nvidia=False)
    assert (told and told[0]) == shape


def test_what_tells_the_shape_depends_on_mode_layer_and_dialect():
    resized = "transform_param { resize_param { height: 8 width: 9 } }"
    (data,) = net_of(f'layer {{ name: "d" type: "Data" {resized} }}').layer
    assert told_shape(data, nvidia=True) is None, "which SSD's layers alone apply in NVIDIA's dialect"
    data.type = "AnnotatedData"
    assert told_shape(data, nvidia=True) == ((3, 8, 9), "resize_param")
    data.transform_param.resize_param[0].resize_mode = caffe_pb2.ResizeParameter.FIT_SMALL_SIZE
    assert told_shape(data, nvidia=False) is None, "one side alone is told"
    listed = "image_data_param { new_height: 4 new_width: 5 is_color: false }"
    (images,) = net_of(f'layer {{ name: "d" type: "ImageData" {listed} }}').layer
    assert told_shape(images, nvidia=False) == ((1, 4, 5), "new_height and new_width")


def test_mistakes_are_named():
    net = net_of(TASKS)
    with pytest.raises(ConfigError, match=r"give the shape of one record: --input data=3,224,224"):
        inferred(net)
    with pytest.raises(ConfigError, match="the net has no blob 'x' in its test phase"):
        inferred(net, outputs=["x"])
    with pytest.raises(ConfigError, match=r"no blob of the net depends on.*--outputs"):
        inferred(net_of('layer { name: "d" type: "DummyData" top: "d" }'))


MADE = """
    layer { name: "made" type: "%s" top: "x" top: "y" dummy_data_param { shape { dim: 1 dim: 3 } } }
    layer { name: "fc" type: "InnerProduct" bottom: "x" top: "fc" inner_product_param { num_output: 2 } }
    layer { name: "loss" type: "EuclideanLoss" bottom: "fc" bottom: "y" }
"""


@pytest.mark.parametrize("kind", ["DummyData", "Python"])
def test_a_layer_of_constants_becomes_an_input_where_its_shape_is_given(kind: str):
    net = net_of(MADE % kind)
    assert [layer.type for layer in inferred(net, outputs=["fc"]).layer] == [kind, "InnerProduct"]
    found = inferred(net, outputs=["fc"], shapes={"x": (3,)}, batch=4)
    assert [layer.type for layer in found.layer] == ["Input", "InnerProduct"]
    assert list(found.layer[0].input_param.shape[0].dim) == [4, 3]


# -- the command ------------------------------------------------------------------------------------------


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    net = Net(read_net(MODELS / "lenet/deploy.prototxt"), LayerContext(create_backend(None, 1), phase=caffe_pb2.TEST))
    saved = caffe_pb2.NetParameter()
    for layer in net.layers:
        stored = saved.layer.add(name=layer.name, type=layer.type)
        for blob in layer.blobs:
            stored.blobs.add(shape={"dim": blob.shape}, data=[0.0] * blob.count)
    net.close()
    path = tmp_path / "lenet.caffemodel"
    path.write_bytes(saved.SerializeToString())
    return path


def test_the_command_writes_and_checks(tmp_path: Path, weights: Path, capsys: pytest.CaptureFixture[str]):
    net, output = MODELS / "lenet/train_test.prototxt", tmp_path / "deploy.prototxt"
    arguments = ["deploy", str(net), "--input", "data=1,28,28", "--weights", str(weights)]
    for named in ([str(output)], ["--output", str(output)]):
        output.unlink(missing_ok=True)
        assert main([*arguments, *named]) == 0
    assert "9 layers; 4 layers take their weights from" in capsys.readouterr().out
    assert read_net(output) == read_net(MODELS / "lenet/deploy.prototxt")
    assert read_net(output).layer[0].transform_param.scale == 1 / 256
    assert main([*arguments[:2], "--input", "data=1,32,32", *arguments[4:]]) == 2
    assert "layer 'ip1', parameter 0: shape is" in capsys.readouterr().err


def test_weights_in_hdf5(tmp_path: Path, weights: Path, capsys: pytest.CaptureFixture[str]):
    net = Net(read_net(MODELS / "lenet/deploy.prototxt"), LayerContext(create_backend(None, 1), phase=caffe_pb2.TEST))
    stored = tmp_path / "lenet.caffemodel.h5"
    write_caffemodel(stored, net.name, net.layers)
    output = tmp_path / "deploy.prototxt"
    arguments = ["deploy", str(MODELS / "lenet/train_test.prototxt"), str(output), "--input", "data=1,28,28"]
    assert main([*arguments, "--weights", str(stored)]) == 0
    assert "9 layers; 4 layers take their weights from" in capsys.readouterr().out
    found = caffepy.read_weights(str(stored))
    assert {layer.name: len(layer.blobs) for layer in found.layer} == {"conv1": 2, "conv2": 2, "ip1": 2, "ip2": 2}
    assert len(caffepy.read_weights(str(weights)).layer) == 9


def test_the_shape_of_records_in_nvidias_dialect(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """There `resize_param` is SSD's layers' alone; the field that chooses the dialect is the net's."""
    write_datums(tmp_path / "records", [(b"0", caffe_pb2.Datum(channels=3, height=4, width=5, data=bytes(60)))])
    net = tmp_path / "net.prototxt"
    for chosen, shape in (("", [1, 3, 8, 9]), ("reduce_buckets: 2", [1, 3, 4, 5])):
        net.write_text(f"""{chosen}
        layer {{ name: "data" type: "Data" top: "data" top: "label" data_param {{ batch_size: 1 backend: LMDB
                source: "{tmp_path}/records" }} transform_param {{ resize_param {{ height: 8 width: 9 }} }} }}
        layer {{ name: "fc" type: "InnerProduct" bottom: "data" top: "fc" inner_product_param {{ num_output: 3 }} }}
        layer {{ name: "loss" type: "SoftmaxWithLoss" bottom: "fc" bottom: "label" }}
        """)
        assert main(["deploy", str(net)]) == 0
        assert net_of(capsys.readouterr().out).layer[0].input_param.shape[0].dim == shape
        assert main(["net", "--model", str(net)]) == 0
        assert "x".join(map(str, shape)) in capsys.readouterr().out


def test_the_command_prints(capsys: pytest.CaptureFixture[str]):
    assert main(["deploy", str(MODELS / "caffenet/train_val.prototxt"), "--image-size", "256,256"]) == 0
    text = capsys.readouterr().out
    assert net_of(text) == read_net(MODELS / "caffenet/deploy.prototxt")


CROPPED_RECORDS = """
    layer { name: "data" type: "Data" top: "data" top: "label" include { phase: TEST }
            data_param { batch_size: 1 backend: LMDB source: "records" }
            transform_param { crop_size: 3 mirror: true mean_file: "mean.binaryproto" } }
    layer { name: "fc" type: "InnerProduct" bottom: "data" top: "fc" inner_product_param { num_output: 3 } }
    layer { name: "loss" type: "SoftmaxWithLoss" bottom: "fc" bottom: "label" }
"""


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A training net with records of 4 x 5 and a mean file beside it."""
    folder = tmp_path / "train"
    folder.mkdir()
    write_datums(folder / "records", [(b"0", caffe_pb2.Datum(channels=3, height=4, width=5, data=bytes(60)))])
    mean = caffe_pb2.BlobProto(num=1, channels=3, height=4, width=5, data=[1.0] * 60)
    (folder / "mean.binaryproto").write_bytes(mean.SerializeToString())
    (folder / "train_val.prototxt").write_text(CROPPED_RECORDS)
    return folder / "train_val.prototxt"


def test_the_size_of_records_and_the_mean_file_are_written(trained: Path, tmp_path: Path):
    output = tmp_path / "made" / "deploy.prototxt"
    output.parent.mkdir()
    assert main(["deploy", str(trained), str(output)]) == 0
    layer = read_net(output).layer[0]
    assert text_format.MessageToString(layer.transform_param, as_one_line=True) == (
        'crop_size: 3 mean_file: "../train/mean.binaryproto"'
    )
    assert (layer.image_data_param.new_height, layer.image_data_param.new_width) == (4, 5)
    net = caffepy.load(output)
    assert net.prepare(np.full((9, 9, 3), 7, np.uint8)).tolist() == np.full((1, 3, 3, 3), 6.0).tolist()
    net.close()


def test_a_deploy_net_from_elsewhere_is_prepared_like_a_training_net(trained: Path, tmp_path: Path, capsys):
    old, output = tmp_path / "old.prototxt", tmp_path / "new.prototxt"
    old.write_text("""input: "image" input_dim: 10 input_dim: 3 input_dim: 3 input_dim: 3
        layer { name: "fc" type: "InnerProduct" bottom: "image" top: "fc" inner_product_param { num_output: 3 } }""")
    assert main(["deploy", str(old), str(output), "--like", str(trained)]) == 0
    found, expected = read_net(output), read_net(old)
    assert list(found.layer[0].input_param.shape[0].dim) == [10, 3, 3, 3]
    assert found.layer[0].transform_param.crop_size == 3
    assert found.layer[1] == expected.layer[1]
    capsys.readouterr()
    assert main(["deploy", str(old), "--like", str(trained), "--image-size", "6,7"]) == 0
    assert net_of(capsys.readouterr().out).layer[0].image_data_param.new_width == 7
    assert main(["deploy", str(old), "--like", str(trained), "--batch", "3"]) == 2
    assert "--like keeps the net" in capsys.readouterr().err
    old.write_text(old.read_text().replace("input_dim: 3", "input_dim: 2", 1))
    assert main(["deploy", str(old), "--like", str(trained)]) == 2
    said = capsys.readouterr().err
    assert "none of its Input layers (input) takes images of 1 or 3 channels as a data layer of" in said


@pytest.mark.parametrize("name", ["dta", "label", "ip1"])
def test_an_input_that_the_deploy_net_does_not_have(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    net, output = str(MODELS / "lenet/train_test.prototxt"), tmp_path / "deploy.prototxt"
    assert main(["deploy", net, str(output), "--input", "data=1,28,28", "--input", f"{name}=3"]) == 2
    assert f"--input {name}: the deploy net has no such input; its inputs are data" in capsys.readouterr().err
    assert not output.exists()


def test_weights_that_lack_a_layer(tmp_path: Path, weights: Path, capsys: pytest.CaptureFixture[str]):
    stored = caffe_pb2.NetParameter.FromString(weights.read_bytes())
    del stored.layer[-2]
    weights.write_bytes(stored.SerializeToString())
    net = str(MODELS / "lenet/train_test.prototxt")
    assert main(["deploy", net, "--input", "data=1,28,28", "--weights", str(weights)]) == 2
    assert "has no weights for layer 'ip2' (1 layers lack theirs)" in capsys.readouterr().err
