"""The nets of models/ as the benchmarks measure them: made-up inputs in place of data layers, at any batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from net_files import file_param, is_file

ROOT = Path(__file__).resolve().parents[1]
OBJECTS, WORDS, VOCABULARY = 3, 20, 8801
"""Objects in an image of a detector; words of a sentence, and how many there are."""


@dataclass(frozen=True)
class Case:
    """A net of models/.

    Args:
        train: prototxt that is trained, below models/.
        deploy: prototxt that predicts.
        gpu: batch in training on a GPU.
        cpu: batch in training on the CPU.
    """

    train: str
    deploy: str
    gpu: int
    cpu: int


def _case(folder: str, gpu: int, cpu: int, prefix: str = "", train: str = "train_val") -> Case:
    return Case(f"{folder}/{prefix}{train}.prototxt", f"{folder}/{prefix}deploy.prototxt", gpu, cpu)


CASES = {
    "lenet": _case("lenet", 64, 64, train="train_test"),
    "mnist_autoencoder": _case("mnist_autoencoder", 100, 100),
    "mnist_siamese": _case("mnist_siamese", 64, 64),
    "cifar10_quick": _case("cifar10", 100, 100, "quick_", "train_test"),
    "cifar10_full": _case("cifar10", 100, 100, "full_", "train_test"),
    "alexnet": _case("alexnet", 256, 10),
    "caffenet": _case("caffenet", 256, 10),
    "vgg16": _case("vgg16", 128, 2),
    "vgg19": _case("vgg19", 128, 2),
    "googlenet": _case("googlenet", 128, 8),
    "inception_v3": _case("inception_v3", 64, 4),
    "resnet18": _case("resnet18", 256, 8),
    "resnet50": _case("resnet50", 256, 8),
    "resnet152": _case("resnet152", 64, 2),
    "squeezenet": _case("squeezenet", 128, 16),
    "mobilenet": _case("mobilenet", 128, 16),
    "densenet121": _case("densenet121", 64, 4),
    "fcn8s": _case("fcn8s", 1, 1),
    "ssd300": _case("ssd300", 32, 1),
    "mobilenet_ssd": _case("mobilenet_ssd", 24, 2),
    "lrcn": _case("lrcn", 100, 4),
}
CUT = {"DetectionOutput", "Accuracy", "DetectionEvaluate"}
"""Layers that neither side runs: PyTorch has no counterpart of its own for the choice of boxes."""

Made = tuple[list[int], str]
"""A blob's shape, and what it holds.

normal, unit (0 to 1), begins (0 for the first word, then 1), boxes, ints:N, or regions:N:H:W of N images.
"""


def inputs(name: str, train: bool, batch: int, image: list[int]) -> dict[str, Made]:
    """Shapes and kinds of what a net is given.

    Args:
        name: of CASES.
        train: with labels.
        batch: images.
        image: channels, height, width.
    """
    found: dict[str, Made] = {"data": ([batch, *image], "unit" if name == "mnist_autoencoder" else "normal")}
    if name == "lrcn":
        words = WORDS if train else 1
        found["cont_sentence"] = ([words, batch], "begins")
        found["input_sentence"] = ([words, batch], f"ints:{VOCABULARY}")
    if not train or name == "mnist_autoencoder":
        return found
    if name == "mnist_siamese":
        return {"pair_data": ([batch, 2, *image[1:]], "normal"), "sim": ([batch], "ints:2")}
    if name == "lrcn":
        return {**found, "target_sentence": ([words, batch], f"ints:{VOCABULARY}")}
    if name == "fcn8s":
        return {**found, "label": ([batch, 1, *image[1:]], "ints:21")}
    if name in ("ssd300", "mobilenet_ssd"):
        return {**found, "label": ([1, 1, OBJECTS * batch, 8], "boxes")}
    return {**found, "label": ([batch], "ints:10")}


def net_param(name: str, train: bool, batch: int, source: str = "Input") -> tuple[Any, dict[str, Made]]:
    """The net's NetParameter with made-up inputs, and these.

    Args:
        name: of CASES, or a prototxt's path.
        train: the net that is trained, or the one that predicts.
        batch: images.
        source: type of the layer that holds the inputs: Input or DummyData.
    """
    from caffepy.formats.load import read_net

    if is_file(name):
        return file_param(name, train, batch, source)
    case = CASES[name]
    deploy = read_net(ROOT / "models" / case.deploy)
    image = list(next(layer for layer in deploy.layer if layer.type == "Input").input_param.shape[0].dim)[1:]
    net = read_net(ROOT / "models" / case.train) if train else deploy
    made = inputs(name, train, batch, image)
    gone = {top for layer in net.layer if not layer.bottom and layer.top for top in layer.top} - set(made)
    kept = [layer for layer in net.layer if layer.bottom and layer.type not in CUT and not set(layer.bottom) & gone]
    del net.layer[:]
    holder = net.layer.add(name="inputs", type=source, top=list(made))
    for shape, _ in made.values():
        (holder.input_param if source == "Input" else holder.dummy_data_param).shape.add(dim=shape)
    net.layer.extend(kept)
    return net, made


def values(made: Made, seed: int) -> Any:
    """Numbers of an input, float32."""
    import numpy as np

    shape, kind = made
    generator = np.random.default_rng(seed)
    if kind.startswith("ints:"):
        return generator.integers(0, int(kind[5:]), shape).astype(np.float32)
    if kind == "begins":
        return (np.arange(shape[0])[:, None] > np.zeros(shape)).astype(np.float32)
    if kind == "boxes":
        return _boxes(shape, generator)
    if kind.startswith("regions:"):
        return _regions(shape, generator, [int(number) for number in kind.split(":")[1:]])
    makers: dict[str, Callable[..., Any]] = {"normal": generator.standard_normal, "unit": generator.random}
    return makers[kind](shape, dtype=np.float32)


def _regions(shape: list[int], generator: Any, sizes: list[int]) -> Any:
    """Rows of image, left, top, right, bottom in pixels."""
    import numpy as np

    images, height, width = sizes
    low = generator.uniform(0, 0.6, (shape[0], 2))
    high = low + generator.uniform(0.05, 0.35, (shape[0], 2))
    corners = np.concatenate([low, high], 1) * np.array([width, height] * 2)
    return np.column_stack([generator.integers(0, images, shape[0]), corners.round()]).astype(np.float32)


def _boxes(shape: list[int], generator: Any) -> Any:
    """Rows of image, class, number, left, top, right, bottom, difficult; as many in every image."""
    import numpy as np

    count = shape[2]
    low = generator.uniform(0, 0.6, (count, 2))
    high = low + generator.uniform(0.1, 0.4, (count, 2))
    numbers = np.arange(count)
    columns = [numbers // OBJECTS, generator.integers(1, 21, count), numbers % OBJECTS, *low.T, *high.T, 0 * numbers]
    return np.stack(columns, 1).reshape(shape).astype(np.float32)
