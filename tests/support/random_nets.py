"""What the generators of random nets share: `fusible_nets` (chains and branches) and `wide_nets` (every layer type)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

from google.protobuf import text_format

from caffepy.proto import caffe_pb2

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


class RandomNet:
    """A prototxt that a seed stands for, written layer by layer.

    Args:
        seed: of everything, the parameters' values not counted.
    """

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
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
        """Add a layer of a new name.

        Args:
            kind: its type.
            bottoms: names of blobs.
            tops: names of blobs.
            settings: its other fields.
        """
        names = "".join(f' bottom: "{b}"' for b in bottoms) + "".join(f' top: "{t}"' for t in tops)
        self._layers.append(f'layer {{ name: "{self._new(f"{kind}_")}" type: "{kind}"{names} {settings} }}')

    def _new(self, stem: str) -> str:
        """A name that no layer and no blob has."""
        self._names[stem] += 1
        return f"{stem.lower()}{self._names[stem]}"

    def _chance(self, probability: float) -> bool:
        return self._random.random() < probability


def input_layer(name: str, shape: Shape) -> str:
    """The prototxt of an Input layer whose top has the layer's name."""
    dims = " ".join(f"dim: {size}" for size in shape)
    return f'layer {{ name: "{name}" type: "Input" top: "{name}" input_param {{ shape {{ {dims} }} }} }}'
