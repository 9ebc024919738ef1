"""Random nets of every layer type that takes part in a feed-forward net.

A layer's settings are a template in which `<a|b>` is one of several texts. What comes out is tried on its bottoms'
shapes: a layer that the net would refuse is thrown away, so that the templates need not know what is legal.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from google.protobuf import text_format
from layer_templates import IN_PLACE, OUTPUTS
from random_nets import RandomNet, Shape, Stem, input_layer, shape_of
from wide_layers import (
    BOUNDING,
    FUSIBLE,
    INPUT_KINDS,
    LOSSES,
    PAIR_WEIGHTS,
    PAIRS,
    POSITIVE,
    SINGLE,
    STOPPING,
    USUAL,
    WEIGHTS,
    WILD,
)

from caffepy.backend import create_backend
from caffepy.errors import UserError
from caffepy.formats.proto import caffe_pb2
from caffepy.layers import LayerContext
from caffepy.net import Net

Values = dict[str, Any]

LARGEST = 3000
"""Elements of a blob of most nets."""
SIZES = (1, 2, 3, 5, 7, 17)
LARGE_SIZES = (4, 8, 16, 24, 33, 64)
"""Channels of large nets, whose convolutions run by other kernels."""
TRIES = 60
"""Layers that are made up before one is added."""
_CPU = create_backend(None, 1)


class WideNet(RandomNet):
    """A net of any layer types, whose layers were all tried on their bottoms' shapes.

    Args:
        seed: of everything, the parameters' values not counted.
        layers: at most so many, losses not counted.
        only: types to take, all if empty; with some, the nets have longer chains and more readers.
    """

    def __init__(self, seed: int, layers: int = 9, only: Sequence[str] = ()) -> None:
        super().__init__(seed)
        self._stays_open, self._odd = (0.05, 0.01) if only else (0.25, 0.06)
        self.seed = seed
        self._large = self._chance(0.2)
        self._only = only
        self._open: list[Stem] = []
        self._again: list[tuple[str, str, Shape, str]] = []
        """Layers with parameters that others may share: type, settings, bottom's shape, `param` fields."""
        self.inputs: dict[str, tuple[Shape, str]] = {}
        """Shapes, and the kinds of numbers that they take (`INPUT_KINDS`)."""
        self._build(self._random.randint(2, layers))

    @property
    def text(self) -> str:
        inputs = [input_layer(name, shape) for name, (shape, _) in self.inputs.items()]
        return "\n".join([f'name: "wide{self.seed}"', *inputs, super().text])

    @property
    def overwrites_inputs(self) -> bool:
        """Whether a layer works in place on an input."""
        return any(top in self.inputs for layer in self.param().layer if layer.bottom for top in layer.top)

    def values(self, seed: int, batch: int = 1, longer: int = 0) -> Values:
        """Numbers for the inputs.

        Args:
            seed: chooses them.
            batch: so many times as many samples.
            longer: so much longer the last of four or five axes.
        """
        generator = np.random.default_rng([self.seed, seed])
        result = {}
        for name, (shape, kind) in self.inputs.items():
            grows = kind in ("normal", "target", "unit") or name.startswith("label")
            grown = (shape[0] * batch, *shape[1:]) if grows else shape
            if kind == "normal" and len(shape) > 3:
                grown = (*grown[:-1], grown[-1] + longer)
            what, _, limit = kind.partition(":")
            result[name] = INPUT_KINDS[what](generator, grown, int(limit or 0)).astype(np.float32)
        return result

    # -- the course of things --------------------------------------------------------------------------

    def _build(self, layers: int) -> None:
        choose = self._random.choice
        axes = choose([2, 2, 2, 2, 3, 1, 0])
        sizes, lengths = (LARGE_SIZES, [1, 4, 8, 14]) if self._large else (SIZES, [1, 2, 3, 5, 7])
        shape = (choose([1, 2, 3, 4]), choose(sizes), *(choose(lengths) for _ in range(axes)))
        self._open = [replace(self._input("data", shape, "normal"), free=self._chance(0.05))]
        if self._chance(0.2):
            self._open.append(self._input("more", shape if self._chance(0.6) else (shape[0], 3, 5), "normal"))
        for _ in range(layers):
            self._step()
        for stem in self._random.sample(self._open, min(8 if self._only else 2, len(self._open))):
            self._finish(stem)

    def _step(self) -> None:
        """Add one layer behind an open blob, which may stay open for another reader."""
        for _ in range(TRIES):
            stem = self._random.choice(self._open)
            added = self._pair(stem) if self._chance(0.25) else self._single(stem)
            if added:
                self._follow()
                if self._only:
                    self._chain()
                    self._pool()
                return

    def _chain(self) -> None:
        """Up to four layers by elements behind the last layer, now and then with five readers."""
        kinds = [kind for kind in self._only if kind in IN_PLACE and kind != "Log"]
        weights = [WEIGHTS.get(kind, 1) for kind in kinds]
        for _ in range(self._random.randint(0, 4) if self._open else 0):
            stem = self._open[-1]
            kind = "Log" if stem.positive and self._chance(0.1) else self._random.choices(kinds, weights)[0]
            self._add(kind, self._settings(self._random.choice(SINGLE[kind]), stem), [stem])
            self._follow()
        if self._open and self._chance(0.15):
            stem = self._open[-1]
            stem.free = False
            self._stays_open = 1
            for kind in self._random.choices(kinds, weights, k=5):
                self._add(kind, self._settings(self._random.choice(SINGLE[kind]), stem), [stem])
            self._stays_open = 0.05

    def _pool(self) -> None:
        """Now and then a convolution, a ReLU and a pooling, one behind the other."""
        for kind in ("Convolution", "ReLU", "Pooling") if self._open and self._chance(0.5) else ():
            stem = self._open[-1]
            texts = (self._settings(self._random.choice(SINGLE[kind]), stem) for _ in range(8))
            if not any(self._add(kind, text, [stem]) for text in texts) or not self._open:
                return

    def _follow(self) -> None:
        """Add what usually stands behind a layer: groups that are computed as one."""
        while self._open and self._chance(0.85 if self._only else 0.5):
            stem, last = self._open[-1], self._layers[-1]
            kind = next((after for before, after in USUAL if f'type: "{before}"' in last and self._chance(0.7)), None)
            if kind is None or (self._only and kind not in self._only):
                return
            same = [one for one in self._open[:-1] if one.shape == stem.shape]
            if kind == "Eltwise" and not (same and self._add(kind, "", [stem, self._random.choice(same)])):
                return
            if kind != "Eltwise" and not self._add(
                kind, self._settings(self._random.choice(SINGLE[kind]), stem), [stem]
            ):
                return

    def _single(self, stem: Stem) -> bool:
        if self._again and self._chance(0.12):
            kind, settings, shape, params = self._random.choice(self._again)
            return stem.shape == shape and self._add(kind, settings + params, [stem])
        kinds = list(self._only or SINGLE)
        kind = self._random.choices(kinds, [WEIGHTS.get(kind, 1) for kind in kinds])[0]
        if kind == "Log" and not stem.positive:
            return False
        return self._add(kind, self._settings(self._random.choice(SINGLE[kind]), stem), [stem])

    def _pair(self, stem: Stem) -> bool:
        """A layer of several bottoms: another open blob, or an input of a shape and kind that the template names."""
        kinds = [kind for kind in PAIRS if not self._only or kind in self._only]
        if not kinds:
            return False
        kind = self._random.choices(kinds, [PAIR_WEIGHTS.get(kind, 1) for kind in kinds])[0]
        template, *others = self._random.choice(PAIRS[kind])
        bottoms = [stem]
        for other in others:
            found = self._other(stem, other)
            if found is None:
                return False
            bottoms.append(found)
        if "only" in template:
            bottoms = bottoms[1:]
        return self._add(kind, self._settings(template.replace("only", ""), stem), bottoms)

    def _other(self, stem: Stem, wanted: str) -> Stem | None:
        """An open blob: `same` shape, or `any`; or a new input, as in `N ids:4`."""
        if wanted in ("same", "any"):
            fits = [one for one in self._open if one is not stem and (wanted == "any" or one.shape == stem.shape)]
            return self._random.choice(fits) if fits else None
        shape_text, _, kind = self._fill(wanted, stem.shape).partition(" ")
        shape = shape_of(shape_text, stem.shape)
        if shape is None:
            return None
        kind = kind or "normal"
        return Stem(f"{kind.partition(':')[0]}{len(self.inputs)}?{kind}", shape, free=False)

    def _finish(self, stem: Stem) -> None:
        """Lead an open blob to a loss."""
        for _ in range(8 if stem.shape else 0):
            kind, template, *others = self._random.choice(LOSSES)
            bottoms = [stem]
            for other in others:
                if other == "labels":
                    shape = (stem.shape[0], *stem.shape[2:])
                    bottoms.append(Stem(f"label{len(self.inputs)}?ids:{(*stem.shape, 1)[1]}", shape))
                else:
                    bottoms.append(Stem(f"target{len(self.inputs)}?{other}", stem.shape))
            if self._add(kind, self._settings(template, stem), bottoms):
                return

    # -- one layer -------------------------------------------------------------------------------------

    def _add(self, kind: str, settings: str, bottoms: list[Stem]) -> bool:
        """Add a layer if the net would have it; whether it would."""
        stem = bottoms[0]
        wild = kind in WILD and "tame" not in settings
        if wild and not stem.bounded:
            return False
        if kind == "BatchNorm" and int(np.prod(stem.shape)) == (*stem.shape, 1, 1)[1]:
            return False  # a channel of one element is 0 but for roundings, whose sign a ReLU behind it would see
        settings = settings.replace("tame", "")
        count = int(found.group(1)) if (found := re.search(r"tops:(\d)", settings)) else 1
        settings = re.sub(r"tops:\d", "", settings)
        tried = try_layer(f'type: "{kind}" {settings}', [one.shape for one in bottoms], count)
        largest = LARGEST * (16 if self._large else 1)
        if tried is None or any(int(np.prod(shape)) > largest for shape in tried.tops):
            return False
        bottoms = [self._made_input(one) for one in bottoms]
        in_place = kind in IN_PLACE and stem.free and self._open.count(stem) == 1 and self._chance(0.6)
        if self._only and kind == "Softmax":  # it computes in float32, and these nets run in half precision too
            in_place = False
        tops = [stem.name if in_place else self._new(kind)] + [self._new(kind) for _ in range(count - 1)]
        settings += self._extras(kind, settings, tried.parameters, bottoms, count)
        self._layer(kind, [one.name for one in bottoms], tops, settings)
        for one in bottoms:
            if one in self._open and (one.name in tops or not self._chance(self._stays_open)):
                self._open.remove(one)
            elif one in self._open:
                self._open[self._open.index(one)] = replace(one, free=False)
        bounded = kind in BOUNDING or (all(one.bounded for one in bottoms) and not wild)
        positive = kind in POSITIVE or (kind in ("Flatten", "Reshape", "Dropout", "Slice", "Permute") and stem.positive)
        if not kind.endswith("Loss"):
            free = "loss_weight" not in settings
            self._open += [Stem(top, s, positive, bounded, free) for top, s in zip(tops, tried.tops, strict=True)]
        return True

    def _extras(self, kind: str, settings: str, parameters: int, bottoms: list[Stem], tops: int) -> str:
        """Shared and frozen parameters, weights in the loss, and where no gradient goes."""
        text = ""
        if parameters and "param { name" not in settings and self._chance(0.3):
            share, frozen = self._chance(0.7), self._chance(0.3)
            names = [f'name: "{self._new("shared")}"' if share else "" for _ in range(parameters)]
            fixed = [frozen or kind == "BatchNorm" or self._chance(0.1) for _ in names]
            pairs = zip(names, fixed, strict=True)
            params = "".join(f" param {{ {name} {'lr_mult: 0' if fixed else ''} }}" for name, fixed in pairs)
            if share and kind not in STOPPING:
                self._again.append((kind, settings, bottoms[0].shape, params))
            text += params
        if not kind.endswith("Loss") and tops == 1 and kind not in STOPPING and self._chance(self._odd):
            text += f" loss_weight: {self._random.choice([0.3, -0.2, 1])}"
        if kind in STOPPING or (self._chance(self._odd / 2) and not kind.endswith("Loss")):
            text += " propagate_down: false" * len(bottoms)
        return text

    def _settings(self, template: str, stem: Stem) -> str:
        """The filled template, with more outputs in a large net."""
        if self._large:
            template = template.replace(OUTPUTS, "num_output: <8|16|24|33|64>")
        return self._fill(template, stem.shape)

    def _input(self, name: str, shape: Shape, kind: str) -> Stem:
        self.inputs[name] = (shape, kind)
        return Stem(name, shape, kind == "positive", free=False)

    def _made_input(self, stem: Stem) -> Stem:
        if "?" not in stem.name:
            return stem
        name, _, kind = stem.name.partition("?")
        while name in self.inputs:
            name += "b"
        return self._input(name, stem.shape, kind)


def fusible_net(seed: int) -> WideNet:
    """A net of fewer types, most of which are fused, in chains and branches."""
    return WideNet(seed, 9, FUSIBLE)


@dataclass(frozen=True)
class Tried:
    """What a layer makes of its bottoms' shapes."""

    tops: list[Shape]
    parameters: int


def try_layer(text: str, bottoms: Sequence[Shape], tops: int) -> Tried | None:
    """What a layer makes of bottoms of these shapes; None if it refuses them."""
    net = caffe_pb2.NetParameter()
    for index, shape in enumerate(bottoms):
        net.layer.add(name=f"b{index}", type="Input", top=[f"b{index}"]).input_param.shape.add(dim=shape)
    layer = text_format.Parse(text, net.layer.add(name="L"))
    layer.bottom.extend(f"b{index}" for index in range(len(bottoms)))
    layer.top.extend(f"t{index}" for index in range(tops))
    del layer.propagate_down[:]
    try:
        made = Net(net, LayerContext(_CPU, phase=caffe_pb2.TRAIN, seed=1, run_fillers=False))
    except UserError:
        return None
    return Tried([made.blobs[f"t{index}"].shape for index in range(tops)], len(made.layers[-1].blobs))
