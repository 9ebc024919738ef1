"""The nets of models/ with small images: data layers become Input layers, which random numbers fill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from caffepy.formats.load import filter_net, net_state, read_net, read_solver
from caffepy.formats.proto import caffe_pb2
from caffepy.net import Net

MODELS = Path(__file__).parents[2] / "models"
DATA = {"Data", "AnnotatedData", "ImageData", "HDF5Data"}
Shape = tuple[int, ...]
Values = Callable[[np.random.Generator, Shape], np.ndarray]
Feed = tuple[Shape, Values]
"""A top of a data layer: its shape, and what makes its values."""


def normal(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    return rng.normal(size=shape)


def positive(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    return rng.random(shape)


def below(classes: int) -> Values:
    return lambda rng, shape: rng.integers(0, classes, shape)


def boxes(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """One object an image, as AnnotatedData gives it: image, class, instance, the box, difficult."""
    corner = rng.uniform(0.1, 0.4, (shape[2], 2))
    item, rest = np.arange(shape[2]), np.zeros(shape[2])
    return np.column_stack([item, item % 20 + 1, rest, corner, corner + 0.4, rest]).reshape(shape)


def continued(_: np.random.Generator, shape: Shape) -> np.ndarray:
    """Every sentence begins at the first time step."""
    return np.broadcast_to(np.arange(shape[0])[:, None] > 0, shape)


@dataclass(frozen=True)
class Small:
    """A model as small as its layers allow.

    Attributes:
        solver: below models/.
        deploy: below models/.
        feeds: by top of the data layers.
        inputs: the deploy net's, where they are not what `feeds` says.
    """

    solver: str
    deploy: str
    feeds: dict[str, Feed]
    inputs: dict[str, Feed]

    def train_net(self) -> caffe_pb2.NetParameter:
        """The train phase, its data layers replaced."""
        path = MODELS / self.solver
        train = read_net(path.parent / read_solver(path).net)
        return with_inputs(filter_net(train, net_state(caffe_pb2.TRAIN)), self.feeds)

    def solver_param(self) -> caffe_pb2.SolverParameter:
        """The model's own solver without tests, one pass an iteration, at a thousandth of the rate.

        The full rate suits the published batches; on two small images it makes the deepest nets overflow.
        """
        param = read_solver(MODELS / self.solver)
        for name in ("net", "test_iter", "test_interval", "test_state", "iter_size", "solver_mode", "eval_type"):
            param.ClearField(name)
        param.base_lr /= 1000
        param.random_seed = 1
        param.net_param.CopyFrom(self.train_net())
        return param

    def deploy_net(self) -> caffe_pb2.NetParameter:
        param = read_net(MODELS / self.deploy)
        for layer in param.layer:
            if layer.type == "Input":
                layer.input_param.shape[0].dim[:] = (self.feeds | self.inputs)[layer.name][0]
        return param

    def fill(self, net: Net) -> None:
        """The same values for train and deploy net: running statistics of two small images suit no others."""
        rng = np.random.default_rng(13)
        for name, (shape, values) in (self.feeds | self.inputs).items():
            array = values(rng, shape).astype(np.float32)
            if name in net.blobs and net.blobs[name].shape == shape:
                net.backend.from_host(array, net.blobs[name].data)


def with_inputs(net: caffe_pb2.NetParameter, feeds: dict[str, Feed]) -> caffe_pb2.NetParameter:
    """Input layers in place of data layers, with the feeds' shapes."""
    for layer in net.layer:
        if layer.type in DATA:
            tops = list(layer.top)
            layer.CopyFrom(caffe_pb2.LayerParameter(name=layer.name, type="Input", top=tops))
            for top in tops:
                layer.input_param.shape.add(dim=feeds[top][0])
    return net


def images(size: int, count: int = 2, classes: int = 1000, channels: int = 3) -> dict[str, Feed]:
    return {"data": ((count, channels, size, size), normal), "label": ((count,), below(classes))}


def small(
    model: str,
    feeds: dict[str, Feed],
    inputs: dict[str, Feed] | None = None,
    names: tuple[str, str] = ("solver", "deploy"),
) -> Small:
    solver, deploy = (f"{model}/{name}.prototxt" for name in names)
    return Small(solver, deploy, feeds, inputs or {})


DIGITS: Feed = ((2, 1, 28, 28), positive)
SENTENCES: dict[str, Feed] = {
    "cont_sentence": ((3, 2), continued),
    "input_sentence": ((3, 2), below(8801)),
    "target_sentence": ((3, 2), below(8801)),
}
QUICK = [
    small("lenet", {"data": DIGITS, "label": ((2,), below(10))}),
    small("cifar10", images(32, classes=10), names=("quick_solver", "quick_deploy")),
    small("cifar10", images(32, classes=10), names=("full_solver", "full_deploy")),
    small("mnist_autoencoder", {"data": DIGITS}),
    small("mnist_siamese", {"pair_data": ((2, 2, 28, 28), positive), "sim": ((2,), below(2))}, {"data": DIGITS}),
    small("caffenet", images(67)),
    small("alexnet", images(67)),
    small("vgg16", images(32)),
    small("vgg19", images(32)),
    small("googlenet", images(224, count=1)),
    small("resnet18", images(64)),
    small("resnet50", images(64)),
    small("resnet152", images(64)),
    small("squeezenet", images(67)),
    small("mobilenet", images(64)),
    small("densenet121", images(64)),
    small("inception_v3", images(139)),
    small("mobilenet_ssd", {"data": ((8, 3, 96, 96), normal), "label": ((1, 1, 8, 8), boxes)}),
    small("lrcn", images(67) | SENTENCES),
]
"""A step takes a second or two."""
SLOW = [
    small("fcn8s", {"data": ((1, 3, 32, 32), normal), "label": ((1, 1, 32, 32), below(21))}),
    small("ssd300", {"data": ((1, 3, 300, 300), normal), "label": ((1, 1, 1, 8), boxes)}),
]
"""Their layers need large images: some seconds."""
