"""Random pycaffe programs that write blobs before any pass, beside a plain NumPy model of Caffe's memory.

The nets are chains of layers that move no number (Reshape, Flatten, Concat and Slice of one blob, Permute in order,
Split) or one (Power), from tops of DummyData, Input or Parameter, with two to five axes. The model follows BVLC Caffe's
`blob.cpp`, `dummy_data_layer.cpp`, `reshape_layer.cpp`, `flatten_layer.cpp`, `concat_layer.cpp`, `slice_layer.cpp`,
`split_layer.cpp` and `parameter_layer.hpp`: each blob has a piece of memory, and ShareData puts another blob's in its
place.

    python tests/support/shared_memory_programs.py --count 2000 --seed 1
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from random_programs import DifferenceError, Floats, main

from caffepy import pycaffe as caffe

SHARED_AT_SETUP = ("Reshape", "Concat", "Slice")
SHARED_IN_PASSES = ("Flatten", "Permute", "Split")


class ModelBlob:
    """A shape and a piece of memory, which other blobs may have too."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)
        self.memory = np.zeros(math.prod(shape), np.float32)

    @property
    def data(self) -> Floats:
        return self.memory[: math.prod(self.shape)].reshape(self.shape)

    def reshape(self, shape: Sequence[int]) -> None:
        """`Blob::Reshape`: other memory where there is too little; pycaffe keeps its numbers here."""
        self.shape = tuple(shape)
        if math.prod(shape) > self.memory.size:
            self.memory = np.concatenate([self.memory, np.zeros(math.prod(shape) - self.memory.size, np.float32)])


@dataclass
class ModelLayer:
    """A layer of the model: its type, blobs by name, and what its prototxt says."""

    type: str
    bottoms: list[str]
    tops: list[str]
    settings: str = ""
    value: float | None = None
    """A DummyData's constant; None: random."""
    shape: tuple[int, ...] = ()
    """Of the tops of a layer without bottoms; with a bottom the shape behind its first axis."""
    parameter: Floats | None = None

    def text(self, name: str) -> str:
        """The prototxt."""
        blobs = "".join(f"bottom: '{each}' " for each in self.bottoms) + "".join(
            f"top: '{each}' " for each in self.tops
        )
        return f"layer {{ name: '{name}' type: '{self.type}' {blobs}{self.settings} }}"


@dataclass
class ModelNet:
    """The model of a net."""

    layers: list[ModelLayer]
    blobs: dict[str, ModelBlob] = field(default_factory=dict)
    unknown: set[int] = field(default_factory=set)
    """The memory, by id, that holds random numbers."""

    def __post_init__(self) -> None:
        for layer in self.layers:
            for top in layer.tops:
                self.blobs[top] = ModelBlob(self._top_shape(layer))
            if layer.type == "DummyData" and layer.value is not None:
                self.blobs[layer.tops[0]].memory[...] = layer.value
            if layer.type == "Parameter":
                layer.parameter = np.zeros(math.prod(layer.shape), np.float32)
            self._reshape(layer)

    def _top_shape(self, layer: ModelLayer) -> tuple[int, ...]:
        return (self.blobs[layer.bottoms[0]].shape[0], *layer.shape) if layer.bottoms else layer.shape

    def _reshape(self, layer: ModelLayer) -> None:
        if layer.bottoms:
            for top in layer.tops:
                self.blobs[top].reshape(self._top_shape(layer))
        if layer.type in SHARED_AT_SETUP:
            self.blobs[layer.tops[0]].memory = self.blobs[layer.bottoms[0]].memory

    def reshape(self) -> None:
        for layer in self.layers:
            self._reshape(layer)

    def forward(self, first: int = 0, last: int | None = None) -> None:
        for layer in self.layers[first : None if last is None else last + 1]:
            self._reshape(layer)
            tops = [self.blobs[top] for top in layer.tops]
            if layer.type in SHARED_IN_PASSES:
                for top in tops:
                    top.memory = self.blobs[layer.bottoms[0]].memory
            elif layer.type == "Parameter":
                assert layer.parameter is not None
                tops[0].memory = layer.parameter
            elif layer.type == "DummyData" and layer.value is None:
                self.unknown.add(id(tops[0].memory))
            elif layer.type == "Power":
                bottom = self.blobs[layer.bottoms[0]]
                tops[0].data[...] = bottom.data * 2 + 1
                random = id(bottom.memory) in self.unknown
                (self.unknown.add if random else self.unknown.discard)(id(tops[0].memory))

    def known(self, name: str) -> bool:
        return id(self.blobs[name].memory) not in self.unknown


def random_net(random: Random) -> list[ModelLayer]:
    """One to three chains."""
    layers: list[ModelLayer] = []
    for chain in range(random.randint(1, 3)):
        shape = _shape(random, random.randint(2, 5))
        name = f"x{chain}"
        layers.append(_source(random, name, shape))
        for index in range(random.randint(1, 4)):
            top = f"b{chain}{index}"
            layer = _follower(random, name, top, shape)
            layers.append(layer)
            name, shape = layer.tops[0], (shape[0], *layer.shape)
        layers.append(ModelLayer("Power", [name], [f"y{chain}"], "power_param { scale: 2 shift: 1 }", shape=shape[1:]))
    return layers


def _shape(random: Random, axes: int) -> tuple[int, ...]:
    return tuple(random.choice([1, 2, 2, 3]) for _ in range(axes))


def _dims(shape: Sequence[int]) -> str:
    return "shape { " + " ".join(f"dim: {size}" for size in shape) + " }"


def _source(random: Random, name: str, shape: tuple[int, ...]) -> ModelLayer:
    kind = random.choice(["DummyData", "DummyData", "Input", "Input", "Parameter"])
    if kind == "Input":
        return ModelLayer(kind, [], [name], f"input_param {{ {_dims(shape)} }}", shape=shape)
    if kind == "Parameter":
        return ModelLayer(kind, [], [name], f"parameter_param {{ {_dims(shape)} }}", shape=shape)
    value = random.choice([None, 0, 7, -2.5, 3])
    filler = "type: 'uniform' min: 1 max: 2" if value is None else f"value: {value}"
    return ModelLayer(
        kind, [], [name], f"dummy_data_param {{ {_dims(shape)} data_filler {{ {filler} }} }}", value, shape
    )


def _follower(random: Random, bottom: str, top: str, shape: tuple[int, ...]) -> ModelLayer:
    """A layer on a blob; all keep the first axis, so that its size may change."""
    kind = random.choice(
        ["Reshape", "Reshape", "Reshape", "Flatten", "Flatten", "Concat", "Slice", "Permute", "Split", "Power"]
    )
    rest = shape[1:]
    if kind == "Power":
        return ModelLayer(kind, [bottom], [top], "power_param { scale: 2 shift: 1 }", shape=rest)
    if kind == "Flatten":
        return ModelLayer(kind, [bottom], [top], shape=(math.prod(rest),))
    if kind == "Reshape":
        wanted = random.choice(_factors(math.prod(rest)))
        dims = "dim: 0 " + " ".join(f"dim: {size}" for size in wanted)
        return ModelLayer(kind, [bottom], [top], f"reshape_param {{ shape {{ {dims} }} }}", shape=wanted)
    return ModelLayer(kind, [bottom], [top], shape=rest)


def _factors(count: int) -> list[tuple[int, ...]]:
    """Shapes of one to four axes with so many elements."""
    found = [(count,), (1, count), (count, 1, 1)]
    for first in range(2, count):
        if count % first == 0:
            rest = count // first
            found += [(first, rest), (first, rest, 1), (first, 1, rest), (1, first, rest), (first, 1, 1, rest)]
            found += [(first, second, rest // second) for second in range(2, rest) if rest % second == 0]
    return found


class Program:
    """A random program.

    Args:
        seed: decides it.
        folder: for its file.
    """

    def __init__(self, seed: int, folder: Path) -> None:
        self.random = random = Random(seed)
        self.layers = random_net(random)
        self.text = "\n".join(layer.text(f"l{index}") for index, layer in enumerate(self.layers))
        (folder / "net.prototxt").write_text(self.text)
        phase = random.choice([caffe.TRAIN, caffe.TEST])
        self.lines = [f"net = caffe.Net('net.prototxt', {phase})"]
        self.real: Any = caffe.Net(str(folder / "net.prototxt"), phase)
        self.model = ModelNet(self.layers)
        self._kept: list[tuple[str, Floats, Floats]] = []
        """Arrays that the program keeps, with the model's memory."""
        self._ran = False

    def run(self, steps: int) -> None:
        """Do some steps, the first of which write blobs before any pass.

        Raises:
            DifferenceError: caffepy and the model differ.
        """
        self._check()
        for _ in range(self.random.randint(1, 4)):
            self.random.choice([self._write, self._write, self._keep])()
            self._check()
        for _ in range(steps):
            actions = [
                self._write,
                self._write,
                self._forward,
                self._forward_part,
                self._look,
                self._keep,
                self._reshape,
            ]
            self.random.choice(actions)()
        self._check()

    def _say(self, line: str) -> None:
        self.lines.append(line)

    def _values(self, shape: Sequence[int]) -> Floats:
        return np.array([self.random.randint(-40, 40) / 4 for _ in range(math.prod(shape))], np.float32).reshape(shape)

    def _write(self) -> None:
        if self._kept and self.random.random() < 0.3:
            name, real, model = self.random.choice(self._kept)
            values = self._values(model.shape)
            self._say(f"kept_{name}[...] = {values.tolist()}")
            real[...] = values
            model[...] = values
            return
        name = self.random.choice(list(self.model.blobs))
        real, blob = self.real.blobs[name].data, self.model.blobs[name]
        values = self._values(blob.shape)
        self._say(f"net.blobs['{name}'].data[...] = {values.tolist()}")
        real[...] = values
        blob.data[...] = values
        if blob.memory.size == values.size:
            self.model.unknown.discard(id(blob.memory))

    def _keep(self) -> None:
        """Keep an array of a source or an output until the next reshape."""
        layers = [layer for layer in self.layers if not layer.bottoms or layer.tops[0].startswith("y")]
        name = self.random.choice(layers).tops[0]
        if any(layer.type == "Parameter" and layer.tops == [name] for layer in self.layers) and not self._ran:
            return  # the first pass gives the top the parameter's memory
        self._say(f"kept_{name} = net.blobs['{name}'].data")
        self._kept.append((name, self.real.blobs[name].data, self.model.blobs[name].data))

    def _forward(self) -> None:
        self._say("net.forward()")
        found = self.real.forward()
        self.model.forward()
        self._ran = True
        for name, values in found.items():
            self._compare(name, values)

    def _forward_part(self) -> None:
        """From or to a layer: the rest keeps its numbers."""
        index = self.random.randrange(len(self.layers))
        if self.random.random() < 0.6:
            self._say(f"net.forward(start='l{index}')")
            found = self.real.forward(start=f"l{index}")
            self.model.forward(index)
        else:
            self._say(f"net.forward(end='l{index}')")
            found = self.real.forward(end=f"l{index}")
            self.model.forward(0, index)
        for name, values in found.items():
            self._compare(name, values)

    def _reshape(self) -> None:
        """Another size of the first axis of a DummyData or an Input, new numbers, and a pass."""
        sources = [layer.tops[0] for layer in self.layers if layer.type in ("Input", "DummyData")]
        if not sources:
            return
        name = self.random.choice(sources)
        blob = self.model.blobs[name]
        shape = (self.random.randint(1, 4), *blob.shape[1:])
        values = self._values(shape)
        self._say(f"net.blobs['{name}'].reshape{shape}; net.blobs['{name}'].data[...] = {values.tolist()}")
        self.real.blobs[name].reshape(*shape)
        self.real.blobs[name].data[...] = values
        blob.memory = np.zeros(0, np.float32)  # arrays and tops from before are those of the old memory
        blob.reshape(shape)
        blob.data[...] = values
        self._kept.clear()
        if self.random.random() < 0.5:
            self._say("net.reshape()")
            self.real.reshape()
            self.model.reshape()
        self._forward()

    def _look(self) -> None:
        name = self.random.choice(list(self.model.blobs))
        self._say(f"net.blobs['{name}'].data")
        self._compare(name, self.real.blobs[name].data)

    def _check(self) -> None:
        for name in self.model.blobs:
            self._compare(name, self.real.blobs[name].data)
        for layer, (name, blobs) in zip(
            [layer for layer in self.layers if layer.type == "Parameter"], self.real.params.items(), strict=True
        ):
            assert layer.parameter is not None
            self._equal(f"the parameter of {name}", blobs[0].data.ravel(), layer.parameter)

    def _compare(self, name: str, real: Floats) -> None:
        if self.model.known(name):
            self._equal(name, real, self.model.blobs[name].data)

    def _equal(self, what: str, real: Floats, model: Floats) -> None:
        if real.shape != model.shape or not np.array_equal(real, model):
            raise DifferenceError(
                f"{what}: {real.tolist()}, in Caffe {model.tolist()}\n{self.text}\n" + "\n".join(self.lines)
            )


if __name__ == "__main__":
    sys.exit(main(str(__doc__), Program))
