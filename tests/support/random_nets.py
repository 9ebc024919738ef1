"""What the generators of random nets share.

`wide_nets` makes nets of every layer type, `named_nets` layers whose names say nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

from google.protobuf import text_format

from caffepy.formats.proto import caffe_pb2

Shape = tuple[int, ...]


@dataclass
class Stem:
    """A blob that a later layer may read.

    Args:
        name: the blob's.
        shape: its dimensions.
        positive: whether no element is below 0.
        bounded: whether no element can be huge.
        free: whether a layer may work in place on it.
        kind: the type of the layer that wrote it, where the generator asks for it.
    """

    name: str
    shape: Shape
    positive: bool = False
    bounded: bool = True
    free: bool = True
    kind: str = ""


NAMINGS = ("own", "none", "equal", "few", "types", "some")
"""How layers are named: each otherwise, not at all, all alike, by three names, by their types, or half of them."""


class RandomNet:
    """A prototxt that a seed stands for, written layer by layer.

    Args:
        seed: of everything, the parameters' values not counted.
        naming: one of `NAMINGS`. Blobs have names of their own in any case.
    """

    def __init__(self, seed: int, naming: str = "own") -> None:
        self._random = Random(seed)
        self.naming = naming
        self._layers: list[str] = []
        self._names: Counter[str] = Counter()

    @property
    def text(self) -> str:
        """The prototxt."""
        return "\n".join(self._layers)

    def param(self, kind: str = "FLOAT") -> caffe_pb2.NetParameter:
        """The net, with its blobs kept as a value of the schema's Type says."""
        param = text_format.Parse(self.text, caffe_pb2.NetParameter())
        param.default_forward_type = param.default_backward_type = caffe_pb2.Type.Value(kind)
        return param

    def _layer(self, kind: str, bottoms: Iterable[str], tops: Iterable[str], settings: str = "") -> None:
        """Add a layer, named as `naming` says.

        Args:
            kind: its type.
            bottoms: names of blobs.
            tops: names of blobs.
            settings: its other fields.
        """
        names = "".join(f' bottom: "{b}"' for b in bottoms) + "".join(f' top: "{t}"' for t in tops)
        self._layers.append(f'layer {{ {self._layer_name(kind)} type: "{kind}"{names} {settings} }}')

    def _layer_name(self, kind: str) -> str:
        """The field that names a layer of a type, or nothing."""
        if self.naming == "none" or (self.naming == "some" and self._chance(0.5)):
            return ""
        name = {"equal": "same", "types": kind}.get(self.naming) or (
            self._random.choice("abc") if self.naming == "few" else self._new(f"{kind}_")
        )
        return f'name: "{name}"'

    def _new(self, stem: str) -> str:
        """A name that no layer and no blob has."""
        self._names[stem] += 1
        return f"{stem.lower()}{self._names[stem]}"

    def _fill(self, template: str, shape: Shape = ()) -> str:
        """The template with a shape's sizes and its choices made, innermost first."""
        names = dict(zip("NCHW", (*shape, 1, 1, 1, 1), strict=False))
        text, filled = "", re.sub(r"\$([NCHW])", lambda found: str(names[found[1]]), template)
        while text != filled:
            text, filled = filled, re.sub(r"<([^<>]*)>", lambda found: self._random.choice(found[1].split("|")), filled)
        return text

    def _chance(self, probability: float) -> bool:
        return self._random.random() < probability


def input_layer(name: str, shape: Shape) -> str:
    """The prototxt of an Input layer whose top has the layer's name."""
    dims = " ".join(f"dim: {size}" for size in shape)
    return f'layer {{ name: "{name}" type: "Input" top: "{name}" input_param {{ shape {{ {dims} }} }} }}'


def shape_of(text: str, first: Shape) -> Shape | None:
    """The shape that `2xNx3` stands for beside a first bottom; None if that has no such axis."""
    sizes = dict(zip("NCHW", first, strict=False))
    try:
        return tuple(sizes[size] if size in "NCHW" else int(size) for size in text.split("x") if size != ".")
    except KeyError:
        return None
