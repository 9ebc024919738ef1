"""The nets and solvers in models/ hold together, have the published numbers of weights, and learn."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from generate import DEPLOYS, generated
from small_models import DATA, MODELS, QUICK, SLOW, Small, normal, with_inputs
from training import CPU

from caffepy.backend.meta import MetaBackend
from caffepy.formats.load import filter_net, net_state, read_net, read_solver
from caffepy.formats.paths import PathResolver
from caffepy.formats.proto import caffe_pb2
from caffepy.layers import LayerContext, layer_class
from caffepy.net import Net
from caffepy.training.solver import create_solver
from caffepy.training.solver_check import check_solver

SOLVERS = sorted(MODELS.rglob("*solver*.prototxt"))
DEPLOY_NETS = sorted(MODELS / f"{path}.prototxt" for path in DEPLOYS)
NETS = sorted(set(MODELS.rglob("*.prototxt")) - set(SOLVERS) - set(DEPLOY_NETS))
LOSSES = {"SoftmaxWithLoss", "SigmoidCrossEntropyLoss", "EuclideanLoss", "ContrastiveLoss", "MultiBoxLoss"}
TRAINING_ONLY = DATA | LOSSES | {"Accuracy", "DetectionEvaluate", "Silence"}
SEVERAL_LOSSES = {"googlenet": 3, "inception_v3": 2, "mnist_autoencoder": 2}
UNSCORED = {"mnist_autoencoder", "mnist_siamese"}
"""Nets whose tests show the loss alone."""


def name_of(path: Path) -> str:
    return str(path.relative_to(MODELS))


def sources(layer: caffe_pb2.LayerParameter) -> list[str]:
    parameters = (layer.data_param, layer.image_data_param, layer.hdf5_data_param)
    return [parameter.source for parameter in parameters if parameter.source]


def meta_net(param: caffe_pb2.NetParameter, phase: int = caffe_pb2.TRAIN) -> Net:
    """A net of shapes alone."""
    backend = MetaBackend()
    with backend.activate():
        return Net(param, LayerContext(backend, phase=phase))


@pytest.mark.parametrize("readme", sorted(MODELS.glob("*/README.md")), ids=name_of)
def test_readmes_say_where_weights_are_and_with_which_checksum(readme: Path):
    (weights,) = re.findall(r"^Weights: (.*)\Z", readme.read_text(), re.MULTILINE | re.DOTALL)
    published = re.search(r"SHA-(1\s+`[0-9a-f]{40}`|256\s+`[0-9a-f]{64}`)", weights)
    assert published or re.search(r"no checksum|train it|does not fit|no public|begins with", weights)
    assert bool(published) or "http" not in weights or "no checksum" in weights


@pytest.mark.parametrize("path", SOLVERS, ids=name_of)
def test_solvers(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(MODELS.parent)
    solver = read_solver(path)
    check_solver(solver, str(path))
    assert PathResolver(path)(solver.net) == path.parent / solver.net
    assert Path(solver.snapshot_prefix).parent == path.parent.relative_to(MODELS.parent)


@pytest.mark.parametrize("path", NETS, ids=name_of)
@pytest.mark.parametrize("phase", [caffe_pb2.TRAIN, caffe_pb2.TEST])
def test_nets(path: Path, phase: int):
    model, testing = path.parent.name, phase == caffe_pb2.TEST
    state = caffe_pb2.NetState(stage=["test-on-test"] if model == "mnist_autoencoder" and testing else [])
    net = filter_net(read_net(path), net_state(phase, state))
    data = [layer for layer in net.layer if layer.type in DATA]
    assert data and net.layer[0] == data[0]
    assert all(sources(layer) and not Path(sources(layer)[0]).is_absolute() for layer in data)
    types = [layer.type for layer in net.layer]
    losses = 0 if "DetectionOutput" in types else SEVERAL_LOSSES.get(model, 1)
    assert sum(types.count(loss) for loss in LOSSES) == losses
    scored = bool({"Accuracy", "DetectionEvaluate"} & set(types))
    assert scored == (testing and model not in UNSCORED)
    for layer in net.layer:
        layer_class(layer.type)


def test_the_generated_files_are_up_to_date():
    """`python models/generate.py` writes them anew."""
    differing = [name_of(path) for path, text in generated() if not path.exists() or path.read_text() != text]
    assert differing == []


@pytest.mark.parametrize(
    "folder", sorted(path for path in MODELS.iterdir() if list(path.glob("*.prototxt"))), ids=name_of
)
def test_every_model_has_a_solver_a_deploy_net_and_a_line_in_the_tables(folder: Path):
    assert list(folder.glob("*solver.prototxt")) and list(folder.glob("*deploy.prototxt"))
    assert (folder / "README.md").exists()
    assert f"| [{folder.name}]({folder.name}/README.md) |" in (MODELS / "README.md").read_text()


WEIGHTS = {
    "lenet/train_test": (28, 431_080),
    "cifar10/quick_train_test": (32, 145_578),
    "cifar10/full_train_test": (32, 89_578),
    "caffenet/train_val": (227, 60_965_224),
    "vgg16/train_val": (224, 138_357_544),
    "googlenet/train_val": (224, 13_378_280),
    "resnet18/train_val": (224, 11_689_512),
    "resnet50/train_val": (224, 25_557_032),
    "mnist_autoencoder/train_val": (28, 2_837_314),
    "mnist_siamese/train_val": (28, 431_102),
    "alexnet/train_val": (227, 60_965_224),
    "vgg19/train_val": (224, 143_667_240),
    "inception_v3/train_val": (299, 23_834_568 + 3_325_928),
    "resnet152/train_val": (224, 60_192_808),
    "squeezenet/train_val": (227, 1_235_496),
    "mobilenet/train_val": (224, 4_231_976),
    "densenet121/train_val": (224, 7_978_856),
    "fcn8s/train_val": (500, 134_362_751),
    "ssd300/train_val": (300, 26_285_486),
    "mobilenet_ssd/train_val": (300, 5_796_089),
    "lrcn/train_val": (227, 41_715_801),
}
"""Size of the image, and learned weights: shared ones once, those with a rate of 0 not at all."""


def with_published_sizes(path: str, size: int) -> caffe_pb2.NetParameter:
    model = path.split("/")[0]
    image = (1, 1 if "mnist" in model or model == "lenet" else 3, size, size)
    labels = {"fcn8s": (1, 1, size, size), "ssd300": (1, 1, 1, 8), "mobilenet_ssd": (1, 1, 1, 8)}
    shapes = {"data": image, "pair_data": (1, 2, size, size), "label": labels.get(model, (1,)), "sim": (1,)}
    shapes |= dict.fromkeys(("cont_sentence", "input_sentence", "target_sentence"), (20, 1))
    net = filter_net(read_net(MODELS / f"{path}.prototxt"), net_state(caffe_pb2.TRAIN))
    return with_inputs(net, {name: (shape, normal) for name, shape in shapes.items()})


@pytest.mark.parametrize("path", [name_of(path).removesuffix(".prototxt") for path in NETS])
def test_weights(path: str):
    size, weights = WEIGHTS[path]
    net = meta_net(with_published_sizes(path, size))
    learned = [parameter for parameter in net.parameters.parameters if parameter.lr_mult]
    assert sum(parameter.blob.count for parameter in learned) == weights
    net.close()


@pytest.mark.parametrize("path", DEPLOYS)
def test_deploy_nets(path: str):
    """Layers of the train net with the same weights, at the published size of images, and none that only trains."""
    train = DEPLOYS[path][0] if "/" in DEPLOYS[path][0] else f"{DEPLOYS[path][0]}/train_val"
    trained = meta_net(with_published_sizes(train, WEIGHTS[train][0]))
    wanted = {layer.name: [blob.shape for blob in layer.blobs] for layer in trained.layers}
    param = read_net(MODELS / f"{path}.prototxt")
    assert param.layer[0].type == "Input" and not TRAINING_ONLY & {layer.type for layer in param.layer}
    net = meta_net(param, caffe_pb2.TEST)
    found = {layer.name: [blob.shape for blob in layer.blobs] for layer in net.layers if layer.blobs}
    assert found and found == {name: wanted[name] for name in found}
    trained.close()
    net.close()


def model_name(case: Small) -> str:
    return case.deploy.removesuffix("/deploy.prototxt").removesuffix("_deploy.prototxt")


@pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids=model_name
)
def test_steps(case: Small):
    """One step with the model's own solver changes the weights, with which the deploy net then gives its outputs."""
    with CPU.activate():
        solver = create_solver(case.solver_param(), CPU)
        learned = [parameter.blob for parameter in solver.net.parameters.parameters if parameter.lr_mult]
        before = [blob.host_data().ravel()[:1000].copy() for blob in learned]
        case.fill(solver.net)
        solver.step(1)
        assert np.isfinite(solver.net.loss())
        assert all(np.isfinite(blob.host_data()).all() for blob in learned)
        after = [blob.host_data().ravel()[:1000] for blob in learned]
        assert not all(map(np.array_equal, before, after))
        net = Net(case.deploy_net(), LayerContext(CPU, phase=caffe_pb2.TEST))
        net.share_trained_layers_with(solver.net)
        case.fill(net)
        net.forward()
        check_outputs(net)
        net.close()
        solver.close()


def check_outputs(net: Net) -> None:
    for layer, tops in zip(net.layers, net.tops, strict=True):
        assert all(np.isfinite(top.host_data()).all() for top in tops), layer.name
    if "prob" in net.blobs:
        probabilities = net.blobs["prob"].host_data()
        axis = int(np.argmax([size in (10, 1000, 8801) for size in probabilities.shape]))
        assert np.allclose(probabilities.sum(axis), 1, atol=1e-4)
