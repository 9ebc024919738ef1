"""The nets and solvers in models/ hold together and have the published numbers of weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from caffepy.backend import create_backend
from caffepy.config.filter import filter_net, net_state
from caffepy.config.load import read_net, read_solver
from caffepy.config.paths import PathResolver
from caffepy.config.solver_check import check_solver
from caffepy.layers import LayerContext, layer_class
from caffepy.net import Net
from caffepy.proto import caffe_pb2

MODELS = Path(__file__).parents[2] / "models"
SOLVERS = sorted(MODELS.rglob("*solver*.prototxt"))
NETS = sorted(set(MODELS.rglob("*.prototxt")) - set(SOLVERS))


def name_of(path: Path) -> str:
    return str(path.relative_to(MODELS))


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
    net = filter_net(read_net(path), net_state(phase))
    assert net.layer[0].type == "Data"
    assert not Path(net.layer[0].data_param.source).is_absolute()
    losses = 3 if path.parent.name == "googlenet" else 1
    assert [layer.type for layer in net.layer].count("SoftmaxWithLoss") == losses
    assert ("Accuracy" in {layer.type for layer in net.layer}) == (phase == caffe_pb2.TEST)
    for layer in net.layer:
        layer_class(layer.type)


@pytest.mark.parametrize(
    "path, image, weights",
    [
        ("lenet/train_test.prototxt", (1, 28, 28), 431_080),
        ("cifar10/quick_train_test.prototxt", (3, 32, 32), 145_578),
        ("cifar10/full_train_test.prototxt", (3, 32, 32), 89_578),
        ("caffenet/train_val.prototxt", (3, 227, 227), 60_965_224),
        ("vgg16/train_val.prototxt", (3, 224, 224), 138_357_544),
        ("googlenet/train_val.prototxt", (3, 224, 224), 13_378_280),
        ("resnet18/train_val.prototxt", (3, 224, 224), 11_689_512),
        ("resnet50/train_val.prototxt", (3, 224, 224), 25_557_032),
    ],
)
def test_weights(path: str, image: tuple[int, int, int], weights: int):
    param = filter_net(read_net(MODELS / path), net_state(caffe_pb2.TRAIN))
    data = param.layer[0]
    data.type = "DummyData"
    data.dummy_data_param.shape.add(dim=[1, *image])
    data.dummy_data_param.shape.add(dim=[1])
    backend = create_backend()
    with backend.activate():
        net = Net(param, LayerContext(backend))
        learned = [parameter for parameter in net.parameters.parameters if parameter.lr_mult]
        assert sum(parameter.blob.count for parameter in learned) == weights
        net.close()
    backend.close()
