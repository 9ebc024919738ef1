"""Random nets of all exported layer types and fields, exported to ONNX and PyTorch and compared with the exports.

    python tests/support/export_nets.py --count 500

An export is right, refused by name, or wrong. Inputs that no layer reads are among them, and the values of the others
are those of the exports' own checks (`export/check.py`, random_inputs): inverted boxes, regions outside of images.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from google.protobuf import text_format
from layer_templates import EXPORT, IN_PLACE, LEAPING, SHARED, Template
from onnx_nets import BACKEND, random_parameters
from random_nets import RandomNet, Shape, Stem, input_layer, shape_of
from torch_nets import HAS_TORCH, write_module
from wide_nets import try_layer

from caffepy.errors import ConfigError, UserError
from caffepy.export.check import compare, larger_batch, random_inputs, run_net
from caffepy.export.onnx.libraries import run_model
from caffepy.export.onnx.write import serialised, to_model
from caffepy.export.prepare import Settings, build, fold_batch_norms, inference_net, varying_axes, with_parameters
from caffepy.export.torch.write import run_exported
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.export_rules import TORCH, import_families
from caffepy.net import Net

Arrays = dict[str, np.ndarray]
LIMITS = {"ONNX": 1e-4, "PyTorch": 1e-5}
"""Those of `caffepy export`, relative to an output's largest value."""
RANKS = {"image": 4, "vector": 2, "clip": 5}
LARGEST = 3000
"""Elements of a blob."""
TRIES = 40
TEMPLATES: dict[str, list[Template]] = {
    kind: SHARED.get(kind, []) + EXPORT.get(kind, []) for kind in sorted({*SHARED, *EXPORT})
}


@cache
def files() -> dict[str, str]:
    """The files that templates name."""
    folder = Path(tempfile.mkdtemp(prefix="export_nets"))
    (folder / "shift").write_text("0.5 -1 2")
    values = np.linspace(-1, 1, 60)
    mean = caffe_pb2.BlobProto(num=1, channels=3, height=4, width=5, data=values)
    (folder / "mean").write_bytes(mean.SerializeToString())
    return {"SHIFT_FILE": f"'{folder / 'shift'}'", "MEAN_FILE": f"'{folder / 'mean'}'"}


class ExportNet(RandomNet):
    """A random net of Input layers and layers with an exported form.

    Args:
        seed: of everything, the parameters' values not counted. Even ones take types with a PyTorch form only.
        only: types to take, all if empty.
    """

    def __init__(self, seed: int, only: Sequence[str] = ()) -> None:
        super().__init__(seed)
        import_families()
        self._open: list[Stem] = []
        kinds = list(only or (TEMPLATES if seed % 2 else [kind for kind in TEMPLATES if kind in TORCH.functions]))
        for _ in range(self._random.randint(1, 7)):
            for _ in range(TRIES):
                if self._add(self._random.choice(kinds)):
                    break
        for _ in range(self._random.choice([0, 0, 1, 2])):
            self._layers.insert(self._random.randint(0, len(self._layers)), self._unread())

    def _add(self, kind: str) -> bool:
        """Add a layer of a type if its bottoms suit it; return whether they do."""
        settings, *wanted = self._random.choice(TEMPLATES[kind])
        before = len(self._layers), list(self._open), self._names.copy()
        bottoms: list[Stem] = []
        for text in wanted:
            first = bottoms[0] if bottoms else None
            what, _, sizes = text.partition(" ")
            if what == "pooled":
                found: list[Stem] | None = self._pooled(sizes)
            elif what == "positive":
                found = self._positive(sizes)
            else:
                found = self._bottom(self._fill(text), first, kind in LEAPING)
            if found is None:
                break
            bottoms += found
        if len(bottoms) >= len(wanted) and self._join(kind, self._settings(settings, bottoms), bottoms):
            return True
        del self._layers[before[0] :]
        self._open, self._names = before[1:]
        return False

    def _join(self, kind: str, settings: str, bottoms: list[Stem]) -> bool:
        count = int(found[1]) if (found := re.search(r"tops:(\d)", settings)) else 1
        settings = re.sub(r"tops:\d", "", settings)
        tried = try_layer(f'type: "{kind}" {settings}', [one.shape for one in bottoms], count)
        if tried is None or any(np.prod(shape) > LARGEST or 0 in shape for shape in tried.tops):
            return False
        in_place = kind in IN_PLACE and bottoms[0].free and self._chance(0.4)
        tops = [bottoms[0].name] if in_place else [self._new(kind.lower()) for _ in range(count)]
        self._layer(kind, [one.name for one in bottoms], tops, settings)
        for one in bottoms:
            one.free = False
        if in_place:
            self._open.remove(bottoms[0])
        if kind not in LEAPING:
            self._open += [Stem(top, shape) for top, shape in zip(tops, tried.tops, strict=True)]
        return True

    def _bottom(self, text: str, first: Stem | None, alone: bool) -> list[Stem] | None:
        """A blob as a template asks for it; None: there is none."""
        if text in ("any", "same", *RANKS) and not alone:
            shape = first.shape if first is not None and text == "same" else None
            axes = RANKS.get(text)
            fits = [
                one
                for one in self._open
                if one is not first and shape in (None, one.shape) and axes in (None, len(one.shape))
            ]
            if fits and self._chance(0.8):
                return [self._random.choice(fits)]
        if text == "same" and first is not None:
            return [self._input(first.shape, alone)]
        if text in ("any", *RANKS):
            axes = RANKS.get(text, self._random.choice([1, 2, 3, 4, 4, 5]))
            return [self._input(tuple(self._random.choice([1, 2, 3, 4, 7]) for _ in range(axes)), alone)]
        shape = shape_of(text.partition(" ")[0], first.shape if first is not None else ())
        return None if shape is None else [self._input(shape, True)]

    def _input(self, shape: Shape, alone: bool) -> Stem:
        stem = Stem(self._new("in"), shape, free=False)
        self._layers.append(input_layer(stem.name, shape))
        if not alone:
            self._open.append(stem)
        return stem

    def _pooled(self, sizes: str) -> list[Stem]:
        """A maximum pooling of an image of its own, and the mask."""
        height, width = map(int, sizes.split("x"))
        image, names = self._input((2, 3, height, width), True), [self._new("pooled"), self._new("mask")]
        self._layer("Pooling", [image.name], names, "pooling_param { kernel_size: 2 stride: 2 }")
        return [Stem(name, (2, 3, 3, 2)) for name in names]

    def _positive(self, sizes: str) -> list[Stem]:
        """The absolute values of an input."""
        source = self._input(tuple(map(int, sizes.split("x"))), True)
        name = self._new("positive")
        self._layer("AbsVal", [source.name], [name])
        return [Stem(name, source.shape)]

    def _settings(self, template: str, bottoms: Sequence[Stem]) -> str:
        """The filled template, with the paths of its files."""
        filled = self._fill(template, bottoms[0].shape if bottoms else ())
        return re.sub("SHIFT_FILE|MEAN_FILE", lambda found: files()[found[0]], filled)

    def _unread(self) -> str:
        shape = (self._random.randint(1, 3), *(3 for _ in range(self._random.randint(0, 2))))
        return input_layer(self._new("unread"), shape)


@dataclass(frozen=True)
class Outcome:
    """What became of one export.

    Args:
        export: ONNX or PyTorch.
        refused: the message of a refusal, or "".
        wrong: what differs, or "".
    """

    export: str
    refused: str = ""
    wrong: str = ""


def outcomes(seed: int, only: Sequence[str] = ()) -> Iterator[Outcome]:
    """Export the net that a seed stands for."""
    param = text_format.Parse(ExportNet(seed, only).text, caffe_pb2.NetParameter())
    rng = np.random.default_rng(seed)
    try:
        param = inference_net(param, Settings())
    except ConfigError:
        return  # only inputs
    net = random_parameters(build(param, BACKEND), seed)
    source = net
    if rng.random() < 0.2:
        param = fold_batch_norms(with_parameters(param, net))
        source = build(param, net.backend)
        source.copy_trained_layers_from(param, "folded")
    try:
        varying = varying_axes(param)
    except UserError:
        varying = {}
    inputs = random_inputs(net, seed)
    feeds = [inputs]
    if varying and rng.random() < 0.5 and all(values.ndim for values in inputs.values()):
        feeds.append(larger_batch(inputs))
    with tempfile.TemporaryDirectory() as folder:
        opset = int(rng.integers(13, 22))

        def to_onnx() -> Callable[[Arrays], Arrays]:
            content = serialised(to_model(source, opset, varying if len(feeds) > 1 else None))
            return lambda given: run_model(content, given)

        def to_module() -> Callable[[Arrays], Arrays]:
            path = write_module(source, Path(folder), varying)
            return lambda given: run_exported(path, given, list(source.outputs))

        yield _outcome("ONNX", to_onnx, net, feeds)
        if HAS_TORCH:
            yield _outcome("PyTorch", to_module, net, feeds)


def _outcome(export: str, write: Callable[[], Callable[[Arrays], Arrays]], net: Net, feeds: list[Arrays]) -> Outcome:
    try:
        run = write()
    except ConfigError as error:
        named = re.search(r"layer '|'\S+' \(\w+\)|has no output", str(error))
        return Outcome(export, str(error)) if named else Outcome(export, wrong=f"refused without a name: {error}")
    except Exception as error:
        return Outcome(export, wrong=f"{type(error).__name__}: {error}")
    for number, given in enumerate(feeds):
        try:
            wanted = run_net(net, given)
        except UserError:
            assert number, "the net refuses another batch only"
            continue
        try:
            found = compare(run(given), wanted)
        except Exception as error:
            return Outcome(export, wrong=f"{type(error).__name__}: {error}")
        bad = [one for one in found if not one.relative <= LIMITS[export]]
        if bad:
            return Outcome(export, wrong=str(bad[0]))
    return Outcome(export)


def main() -> int:
    """Print how many exports are right, refused and wrong, and the seeds of the wrong ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="nets (100)")
    parser.add_argument("--first", type=int, default=0, help="the first net's seed (0)")
    parser.add_argument("--only", nargs="*", default=[], help="layer types (all)")
    args = parser.parse_args()
    tally: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for seed in range(args.first, args.first + args.count):
        for one in outcomes(seed, args.only):
            tally[f"{one.export} {'wrong' if one.wrong else 'refused' if one.refused else 'right'}"] += 1
            if one.refused:
                reasons[f"{one.export}: {re.sub(r'[0-9]+', '#', one.refused)[:150]}"] += 1
            if one.wrong:
                print(f"seed {seed}: {one.export}: {one.wrong[:300]}", flush=True)  # noqa: T201
    for reason, count in reasons.most_common():
        print(f"{count:5} {reason}")  # noqa: T201
    print(", ".join(f"{name}: {count}" for name, count in sorted(tally.items())))  # noqa: T201
    return 1 if any("wrong" in name for name in tally) else 0


if __name__ == "__main__":
    sys.exit(main())
