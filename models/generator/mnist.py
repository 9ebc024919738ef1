"""The autoencoder and the siamese net of Caffe's MNIST examples, with their names of layers."""

from __future__ import annotations

from typing import Any

from caffepy.formats.proto import caffe_pb2
from generator.builder import Builder

PIXEL = 1 / 256


def autoencoder() -> caffe_pb2.NetParameter:
    """Hinton and Salakhutdinov, 2006: 784-1000-500-250-30 and back, all at once, with sparse first weights."""
    net = Builder("MNISTAutoencoder", {"type": "gaussian", "std": 1, "sparse": 15})
    param = [{"lr_mult": 1, "decay_mult": 1}, {"lr_mult": 1, "decay_mult": 0}]
    _digits(net)
    flat, x = net.layer("Flatten", "flatdata", "data"), "data"
    names = [(f"encode{item}", width) for item, width in enumerate((1000, 500, 250, 30), 1)]
    names += [(f"decode{item}", width) for item, width in ((4, 250), (3, 500), (2, 1000), (1, 784))]
    for name, width in names:
        x = score = net.fc(name, x, width, param=param)
        if name not in ("encode4", "decode1"):
            x = net.layer("Sigmoid", f"{name}neuron", x)
    net.layer("SigmoidCrossEntropyLoss", "loss", [score, flat], "cross_entropy_loss", loss_weight=[1])
    x = net.layer("Sigmoid", "decode1neuron", score)
    net.layer("EuclideanLoss", "l2_error", [x, flat], loss_weight=[0])
    return net.net


def _digits(net: Builder) -> None:
    """The training digits, and two test sets told apart by stages: the same digits, and the test digits."""
    sources = (
        ({"phase": "TRAIN"}, "mnist_train_lmdb"),
        ({"phase": "TEST", "stage": ["test-on-train"]}, "mnist_train_lmdb"),
        ({"phase": "TEST", "stage": ["test-on-test"]}, "mnist_test_lmdb"),
    )
    for include, source in sources:
        fields: dict[str, Any] = {"data_param": {"source": source, "batch_size": 100, "backend": "LMDB"}}
        fields |= {"include": [include], "transform_param": {"scale": 0.0039215684}}
        net.net.layer.add(name="data", type="Data", top=["data"], **fields)


def siamese() -> caffe_pb2.NetParameter:
    """Hadsell, Chopra and LeCun, 2006: LeNet's layers, twice with the same weights, and a point in the plane."""
    net = Builder("mnist_siamese_train_test", {"type": "xavier"})
    for phase, source, batch in (("TRAIN", "mnist_pairs_train_lmdb", 64), ("TEST", "mnist_pairs_test_lmdb", 100)):
        net.net.layer.add(
            name="pair_data",
            type="Data",
            top=["pair_data", "sim"],
            include=[{"phase": phase}],
            transform_param={"scale": PIXEL},
            data_param={"source": source, "batch_size": batch, "backend": "LMDB"},
        )
    net.net.layer.add(
        name="slice_pair",
        type="Slice",
        bottom=["pair_data"],
        top=["data", "data_p"],
        slice_param={"axis": 1, "slice_point": [1]},
    )
    feats = [_twin(net, suffix) for suffix in ("", "_p")]
    net.layer("ContrastiveLoss", "loss", [*feats, "sim"], contrastive_loss_param={"margin": 1})
    return net.net


def _twin(net: Builder, suffix: str) -> str:
    """One of the two nets; the parameters' names make their weights the same."""

    def shared(name: str) -> list[dict[str, Any]]:
        return [{"name": f"{name}_w", "lr_mult": 1}, {"name": f"{name}_b", "lr_mult": 2}]

    x = f"data{suffix}"
    for item, outputs in ((1, 20), (2, 50)):
        x = net.conv(f"conv{item}{suffix}", x, outputs, 5, stride=1, param=shared(f"conv{item}"))
        x = net.pool(f"pool{item}{suffix}", x, 2, stride=2)
    x = net.relu(f"relu1{suffix}", net.fc(f"ip1{suffix}", x, 500, param=shared("ip1")))
    x = net.fc(f"ip2{suffix}", x, 10, param=shared("ip2"))
    return net.fc(f"feat{suffix}", x, 2, param=shared("feat"))
