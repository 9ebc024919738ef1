"""Random programs on pycaffe's nets and solvers beside a plain NumPy model of what Caffe does.

The model follows BVLC Caffe's sources: `blob.cpp` (memory that blobs share), `net.cpp` (Init, ShareWeights,
ShareTrainedLayersWith, CopyTrainedLayersFrom, ForwardFromTo, BackwardFromTo), `solver.cpp` and `sgd_solver.cpp`. Where
docs/reference/pycaffe.md and docs/reference/differences.md name a difference, it follows caffepy: after an update
parameters' diffs are the gradients, a solver's test nets have the train net's parameters from the beginning, and
EuclideanLoss takes the numbers that its bottoms have in the backward pass, ReLU those of its top.

    python tests/support/random_programs.py --count 2000 --seed 1
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy import pycaffe as caffe
from caffepy.errors import SnapshotError

Floats = NDArray[np.float32]
TRAIN, TEST = 0, 1
TOLERANCE = 1e-4
STEPS = 40
LARGEST, FRAGILE = 1e4, 1e-4
"""A program ends where a number of the model is larger, or that before a ReLU smaller: rounding would show."""


# -- the model ---------------------------------------------------------------------------------------


class ModelBlob:
    """Caffe's Blob: two pieces of memory, which other blobs may share, and a shape."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape: tuple[int, ...] = ()
        self.memory = {"data": np.zeros(0, np.float32), "diff": np.zeros(0, np.float32)}
        self.known = {"data": True, "diff": True}
        """False for numbers that the model does not follow: those after a reshape."""
        self.reshape(shape)

    @property
    def count(self) -> int:
        return int(np.prod(self.shape))

    def reshape(self, shape: Sequence[int]) -> None:
        """Another shape; new memory where there is too little."""
        if tuple(shape) == self.shape and self.memory["data"].size:
            return
        self.shape = tuple(shape)
        first = not self.memory["data"].size
        if self.count > self.memory["data"].size:
            self.memory = {part: np.zeros(self.count, np.float32) for part in self.memory}
        self.known = dict.fromkeys(self.known, first)

    def view(self, part: str) -> Floats:
        return self.memory[part][: self.count].reshape(self.shape)

    @property
    def data(self) -> Floats:
        return self.view("data")

    @property
    def diff(self) -> Floats:
        return self.view("diff")

    def write(self, part: str, values: Any) -> None:
        self.view(part)[...] = values
        self.known[part] = True


@dataclass(frozen=True)
class Inner:
    """An InnerProduct layer of the chain and the ReLU behind it.

    Args:
        outputs: its num_output.
        bias: whether it has one.
        share: name of the weights, by which layers share them; empty: none.
        permissive: share_mode.
        lr_mult: of weights and bias.
        decay_mult: of weights and bias.
        relu: "", "in place" or "own top".
    """

    outputs: int
    bias: bool
    share: str = ""
    permissive: bool = False
    lr_mult: float = 1
    decay_mult: float = 1
    relu: str = ""


@dataclass(frozen=True)
class Form:
    """A net of the family: a chain of InnerProduct layers, with a loss at its end or without.

    Args:
        inputs: columns of the input.
        batch: rows.
        chain: the layers.
        loss: whether an EuclideanLoss ends it.
        force_backward: of the net.
        side: outputs of a layer on the input that no loss depends on; 0: there is none.
    """

    inputs: int
    batch: int
    chain: tuple[Inner, ...]
    loss: bool
    force_backward: bool
    side: int = 0

    def text(self) -> str:
        """The prototxt."""
        lines = ["name: 'random'", "force_backward: true" if self.force_backward else ""]
        lines.append(_input("x", (self.batch, self.inputs)))
        bottom = "x"
        for index, inner in enumerate(self.chain):
            lines.append(_inner(f"ip{index}", bottom, f"h{index}", inner, 0.25 * (index + 1)))
            bottom = f"h{index}"
            if inner.relu:
                top = bottom if inner.relu == "in place" else f"r{index}"
                lines.append(f"layer {{ name: 'relu{index}' type: 'ReLU' bottom: '{bottom}' top: '{top}' }}")
                bottom = top
        if self.side:
            lines.append(_inner("side", "x", "s", Inner(self.side, True), 0.5))
        if self.loss:
            lines.append(_input("label", (self.batch, self.chain[-1].outputs)))
            lines.append(
                f"layer {{ name: 'loss' type: 'EuclideanLoss' bottom: '{bottom}' bottom: 'label' top: 'loss' }}"
            )
        return "\n".join(lines)


def _input(name: str, shape: Sequence[int]) -> str:
    dims = " ".join(f"dim: {size}" for size in shape)
    return f"layer {{ name: '{name}' type: 'Input' top: '{name}' input_param {{ shape {{ {dims} }} }} }}"


def _inner(name: str, bottom: str, top: str, inner: Inner, value: float) -> str:
    rates = f"lr_mult: {inner.lr_mult} decay_mult: {inner.decay_mult}"
    shared = f"name: '{inner.share}'" * bool(inner.share) + " share_mode: PERMISSIVE" * inner.permissive
    specs = f"param {{ {shared} {rates} }}" + f" param {{ {rates} }}" * inner.bias
    return (
        f"layer {{ name: '{name}' type: 'InnerProduct' bottom: '{bottom}' top: '{top}' {specs} inner_product_param {{ "
        f"num_output: {inner.outputs} bias_term: {str(inner.bias).lower()} weight_filler {{ value: {value} }} "
        f"bias_filler {{ value: {-value} }} }} }}"
    )


@dataclass
class ModelLayer:
    """A layer of the model."""

    name: str
    type: str
    bottoms: list[str]
    tops: list[str]
    blobs: list[ModelBlob] = field(default_factory=list)
    learned: list[bool] = field(default_factory=list)
    """Whether the gradients of the parameters are computed (param_propagate_down)."""
    need_backward: bool = False
    propagate_down: list[bool] = field(default_factory=list)


@dataclass
class Learnable:
    """A parameter under its owner."""

    blob: ModelBlob
    lr_mult: float
    decay_mult: float


class ModelNet:
    """The model of a net."""

    def __init__(self, form: Form) -> None:
        self.form = form
        self.layers: list[ModelLayer] = []
        self.blobs: dict[str, ModelBlob] = {}
        self.learnable: list[Learnable] = []
        self.owned: dict[tuple[str, int], bool] = {}
        self._owners: dict[str, Learnable] = {}
        self.trained = False
        """Whether the parameters are no eighths any more, so that sums are rounded."""
        self.fragile = False
        """Whether rounding may have decided what a ReLU lets through."""
        self._build()
        self._plan_backward()

    def _build(self) -> None:
        form, bottom = self.form, "x"
        self._add(ModelLayer("x", "Input", [], ["x"]), (form.batch, form.inputs))
        width = form.inputs
        for index, inner in enumerate(form.chain):
            self._add_inner(f"ip{index}", bottom, f"h{index}", inner, width, 0.25 * (index + 1))
            bottom, width = f"h{index}", inner.outputs
            if inner.relu:
                top = bottom if inner.relu == "in place" else f"r{index}"
                self._add(ModelLayer(f"relu{index}", "ReLU", [bottom], [top]), (form.batch, width))
                bottom = top
        if form.side:
            self._add_inner("side", "x", "s", Inner(form.side, True), form.inputs, 0.5)
        if form.loss:
            self._add(ModelLayer("label", "Input", [], ["label"]), (form.batch, width))
            self._add(ModelLayer("loss", "EuclideanLoss", [bottom, "label"], ["loss"]), ())
            self.blobs["loss"].write("diff", 1)

    def _add(self, layer: ModelLayer, shape: Sequence[int]) -> None:
        self.layers.append(layer)
        for top in layer.tops:
            if top not in layer.bottoms:
                self.blobs[top] = ModelBlob(shape)

    def _add_inner(self, name: str, bottom: str, top: str, inner: Inner, width: int, value: float) -> None:
        layer = ModelLayer(name, "InnerProduct", [bottom], [top])
        self._add(layer, (self.form.batch, inner.outputs))
        for index, shape in enumerate([(inner.outputs, width), (inner.outputs,)][: 1 + inner.bias]):
            blob = ModelBlob(shape)
            blob.write("data", -value if index else value)
            layer.blobs.append(blob)
            layer.learned.append(inner.lr_mult != 0)
            share = inner.share if index == 0 else ""
            self.owned[name, index] = share not in self._owners
            if share in self._owners:
                blob.memory = dict(self._owners[share].blob.memory)
                blob.known = self._owners[share].blob.known
                continue
            learnable = Learnable(blob, inner.lr_mult, inner.decay_mult)
            self.learnable.append(learnable)
            if share:
                self._owners[share] = learnable

    def _plan_backward(self) -> None:
        """`Net::Init`: which layers run backward."""
        needed: dict[str, bool] = {}
        for layer in self.layers:
            layer.propagate_down = [needed[bottom] for bottom in layer.bottoms]
            layer.need_backward = any(layer.propagate_down) or any(layer.learned)
            needed.update(dict.fromkeys(layer.tops, layer.need_backward))
        under_loss: set[str] = set()
        for layer in reversed(self.layers):
            contributes = layer.type == "EuclideanLoss" or not under_loss.isdisjoint(layer.tops)
            if contributes:
                under_loss.update(layer.bottoms)
            else:
                layer.need_backward, layer.propagate_down = False, [False] * len(layer.bottoms)
        if self.form.force_backward:
            for layer in self.layers:
                layer.need_backward = True
                layer.propagate_down = [True] * len(layer.bottoms)
                layer.learned = [True] * len(layer.blobs)

    # -- what pycaffe shows --------------------------------------------------------------------------

    @property
    def inputs(self) -> list[str]:
        return [layer.tops[0] for layer in self.layers if layer.type == "Input"]

    @property
    def outputs(self) -> list[str]:
        read = {bottom for layer in self.layers for bottom in layer.bottoms if bottom not in layer.tops}
        return [name for name in self.blobs if name not in read]

    @property
    def params(self) -> dict[str, list[ModelBlob]]:
        return {layer.name: layer.blobs for layer in self.layers if layer.blobs}

    def index(self, name: str) -> int:
        return [layer.name for layer in self.layers].index(name)

    # -- running -------------------------------------------------------------------------------------

    def forward(self, start: int = 0, end: int | None = None) -> None:
        for layer in self.layers[start : None if end is None else end + 1]:
            self._reshape(layer)
            bottoms, tops = self._of(layer.bottoms), self._of(layer.tops)
            if layer.type == "Input":
                continue
            known = all(blob.known["data"] for blob in (*bottoms, *layer.blobs))
            x = bottoms[0].data
            if layer.type == "InnerProduct":
                result = x.astype(np.float64) @ layer.blobs[0].data.T.astype(np.float64)
                result = result + (layer.blobs[1].data if len(layer.blobs) > 1 else 0)
            elif layer.type == "ReLU":
                result = np.maximum(x, 0)
                self.fragile |= bool(((np.abs(x) < FRAGILE) & ((x != 0) | self.trained)).any())
            else:
                result = ((x - bottoms[1].data).astype(np.float64) ** 2).sum() / len(x) / 2
            tops[0].write("data", result)
            tops[0].known["data"] = known

    def _of(self, names: Sequence[str]) -> list[ModelBlob]:
        return [self.blobs[name] for name in names]

    def _reshape(self, layer: ModelLayer) -> None:
        bottoms, tops = self._of(layer.bottoms), self._of(layer.tops)
        if layer.type == "InnerProduct":
            tops[0].reshape((bottoms[0].shape[0], layer.blobs[0].shape[0]))
        elif layer.type == "ReLU":
            tops[0].reshape(bottoms[0].shape)

    def reshape(self) -> None:
        for layer in self.layers:
            self._reshape(layer)

    def backward(self, start: int | None = None, end: int = 0) -> None:
        for layer in reversed(self.layers[end : None if start is None else start + 1]):
            if layer.need_backward and layer.type != "Input":
                self._backward_layer(layer)

    def _backward_layer(self, layer: ModelLayer) -> None:
        bottoms, top = self._of(layer.bottoms), self.blobs[layer.tops[0]]
        known = top.known["diff"] and all(b.known["data"] for b in (*bottoms, *layer.blobs))
        dy, x = top.diff.copy(), bottoms[0].data
        results: list[Any] = []
        if layer.type == "InnerProduct":
            gradients = [dy.T.astype(np.float64) @ x, dy.sum(axis=0, dtype=np.float64)]
            for blob, gradient, learned in zip(layer.blobs, gradients, layer.learned, strict=False):
                if learned:
                    blob.diff[...] += gradient
                    blob.known["diff"] &= known
            results = [dy.astype(np.float64) @ layer.blobs[0].data]
        elif layer.type == "ReLU":
            results = [dy * (self.blobs[layer.tops[0]].data > 0)]
        else:
            difference = float(dy) / len(x) * (x - bottoms[1].data)
            results = [difference, -difference]
        for bottom, result, down in zip(bottoms, results, layer.propagate_down, strict=True):
            if down:
                bottom.write("diff", result)
                bottom.known["diff"] = known

    def clear_param_diffs(self) -> None:
        for learnable in self.learnable:
            learnable.blob.write("diff", 0)
        for blob in (blob for blobs in self.params.values() for blob in blobs):
            blob.known["diff"] = True

    # -- parameters ----------------------------------------------------------------------------------

    def share_with(self, other: ModelNet) -> None:
        theirs = other.params
        for name, blobs in self.params.items():
            for blob, source in zip(blobs, theirs.get(name, []), strict=False):
                blob.memory["data"] = source.memory["data"]

    def saved(self, owned_only: bool) -> dict[str, dict[int, Floats]]:
        """The contents of a file; one in HDF5 has no layers that own no parameter (Caffe has empty groups)."""
        stored = {
            name: {i: b.data.copy() for i, b in enumerate(blobs) if self.owned[name, i] or not owned_only}
            for name, blobs in self.params.items()
        }
        return {name: blobs for name, blobs in stored.items() if blobs}

    def fits(self, stored: dict[str, dict[int, Floats]]) -> bool:
        """Whether a file can be loaded: what it lacks an earlier layer owns."""
        params = self.params
        return all(
            index in blobs or not self.owned[name, index]
            for name, blobs in stored.items()
            for index in range(len(params.get(name, [])))
        )

    def load(self, stored: dict[str, dict[int, Floats]]) -> None:
        params = self.params
        for name, blobs in stored.items():
            for index, values in blobs.items():
                if name in params:
                    params[name][index].write("data", values)

    def largest(self) -> float:
        blobs = [*self.blobs.values(), *(blob for blobs in self.params.values() for blob in blobs)]
        return max(float(np.abs(blob.view(part)).max(initial=0)) for blob in blobs for part in ("data", "diff"))


class ModelSolver:
    """Caffe's SGDSolver."""

    def __init__(self, net: ModelNet, tests: list[ModelNet], settings: dict[str, float]) -> None:
        self.net, self.tests, self.settings = net, tests, settings
        self.iter = 0
        self.history = [np.zeros(each.blob.shape, np.float32) for each in net.learnable]
        for test in tests:
            test.share_with(net)

    def step(self) -> None:
        self.net.clear_param_diffs()
        if self.iter % 2 == 0 and (self.iter > 0 or self.settings["test_initialization"]):
            for test in self.tests:
                test.share_with(self.net)
                test.forward()
        self.net.forward()
        self.net.backward()
        self.apply_update()

    def apply_update(self) -> None:
        updates = []
        for each, history in zip(self.net.learnable, self.history, strict=True):
            decay = self.settings["weight_decay"] * each.decay_mult
            gradient = each.blob.diff + np.float32(decay) * each.blob.data
            history *= np.float32(self.settings["momentum"])
            history += np.float32(self.settings["base_lr"] * each.lr_mult) * gradient
            updates.append(history)
        for each, update in zip(self.net.learnable, updates, strict=True):
            each.blob.data[...] -= update
        self.iter += 1

    @property
    def known(self) -> bool:
        return all(each.blob.known["diff"] for each in self.net.learnable)


# -- programs ----------------------------------------------------------------------------------------


class DifferenceError(AssertionError):
    """caffepy and the model differ."""


@dataclass
class Pair:
    """A net of the program and its model."""

    name: str
    real: Any
    model: ModelNet
    phase: int
    solver: bool = False


@dataclass
class Held:
    """An array that the program holds, and the memory of the model that it shows."""

    name: str
    real: Floats
    model: Floats
    owner: ModelBlob
    part: str
    is_parameter: bool


@dataclass
class Training:
    """A solver of the program and its model."""

    name: str
    real: Any
    model: ModelSolver
    net: Pair
    tests: list[Pair]
    prefix: Path
    snapshots: list[tuple[str, int, list[Floats], dict[str, dict[int, Floats]]]] = field(default_factory=list)


class Program:
    """A random program.

    Args:
        seed: decides it.
        folder: for its files.
    """

    def __init__(self, seed: int, folder: Path) -> None:
        self.random = Random(seed)
        self._folder = folder
        self.lines: list[str] = []
        """What was done, as a script's lines."""
        self._pairs: list[Pair] = []
        self._held: list[Held] = []
        self._trainings: list[Training] = []
        self._files: list[tuple[Path, dict[str, dict[int, Floats]], bool]] = []
        self._made = 0
        self._trained = False
        base = _random_form(self.random)
        self._forms = [base, _variant(self.random, base)]
        self._paths = []
        for index, form in enumerate(self._forms):
            self._paths.append(folder / f"form{index}.prototxt")
            self._paths[-1].write_text(form.text())

    def run(self, steps: int) -> None:
        """Do some steps.

        Raises:
            DifferenceError: caffepy and the model differ.
        """
        self._new_net()
        actions = self._actions()
        for _ in range(steps):
            action = self.random.choices([each for _, each in actions], [weight for weight, _ in actions])[0]
            for pair in self._pairs:
                pair.model.trained = self._trained
            try:
                action()
            except DifferenceError:
                raise
            except Exception as error:
                raise DifferenceError(f"{type(error).__name__}: {error}\n{self.transcript()}") from error
            self._check_held()
            if any(pair.model.fragile or pair.model.largest() > LARGEST for pair in self._pairs):
                return
        for pair in self._pairs:
            self._check_net(pair)

    def transcript(self) -> str:
        """The program as a text, for a message."""
        forms = "\n".join(f"# {path.name}:\n{path.read_text()}" for path in self._paths)
        return f"{forms}\n" + "\n".join(self.lines)

    def _actions(self) -> list[tuple[float, Callable[[], None]]]:
        return [
            (10, self._forward),
            (4, self._forward_part),
            (6, self._backward),
            (2, self._backward_part),
            (6, self._write_inputs),
            (5, self._write_parameter),
            (2, self._write_parameter_diff),
            (2, self._write_blob),
            (4, self._hold),
            (6, self._write_held),
            (1, self._release),
            (3, self._share),
            (1.5, self._new_net),
            (0.7, self._delete),
            (2, self._save),
            (2, self._load),
            (2, self._reshape),
            (2, self._clear),
            (3, self._look),
            (1.5, self._new_solver),
            (6, self._step),
            (1, self._apply_update),
            (1, self._snapshot),
            (1, self._restore),
            (0.3, self._delete_solver),
        ]

    def _say(self, line: str) -> None:
        self.lines.append(line)

    def _choose(self, usable: Callable[[Pair], bool] = lambda pair: True) -> Pair | None:
        pairs = [pair for pair in self._pairs if usable(pair)]
        return self.random.choice(pairs) if pairs else None

    def _values(self, shape: Sequence[int]) -> Floats:
        """Eighths, whose sums are exact in float32."""
        count = int(np.prod(shape))
        return np.array([self.random.randint(-12, 12) / 8 for _ in range(count)], np.float32).reshape(shape)

    # -- nets ----------------------------------------------------------------------------------------

    def _new_net(self) -> None:
        if len(self._pairs) >= 5:
            return
        which, phase = self.random.randrange(2), self.random.choice([TRAIN, TEST])
        model, keywords, given = ModelNet(self._forms[which]), {}, ""
        binary = [(path, stored) for path, stored, hdf5 in self._files if not hdf5 and model.fits(stored)]
        if binary and self.random.random() < 0.5:
            path, stored = self.random.choice(binary)
            model.load(stored)
            keywords, given = {"weights": str(path)}, f", weights='{path.name}'"
        name = self._name("n")
        real = caffe.Net(str(self._paths[which]), phase, **keywords)
        self._say(f"{name} = caffe.Net('{self._paths[which].name}', {phase}{given})")
        self._pairs.append(Pair(name, real, model, phase))
        if model.form.side:
            self._pass(self._pairs[-1])

    def _pass(self, pair: Pair) -> None:
        """A pass; before the first one the tops of a Split are not its bottom's memory."""
        self._say(f"{pair.name}.forward()")
        pair.real.forward()
        pair.model.forward()

    def _name(self, letter: str) -> str:
        self._made += 1
        return f"{letter}{self._made}"

    def _delete(self) -> None:
        pair = self._choose(lambda pair: not pair.solver and len(self._pairs) > 1)
        if pair is not None:
            self._say(f"del {pair.name}")
            self._pairs.remove(pair)
            del pair
            gc.collect()

    # -- passes --------------------------------------------------------------------------------------

    def _write_inputs(self) -> None:
        if (pair := self._choose()) is not None:
            self._fill(pair)

    def _fill(self, pair: Pair) -> None:
        for name in pair.model.inputs:
            values = self._values(pair.model.blobs[name].shape)
            self._say(f"{pair.name}.blobs['{name}'].data[...] = {values.tolist()}")
            pair.real.blobs[name].data[...] = values
            pair.model.blobs[name].write("data", values)

    def _forward(self) -> None:
        pair = self._choose()
        if pair is None:
            return
        keywords = {}
        if self.random.random() < 0.4:
            keywords = {name: self._values(pair.model.blobs[name].shape) for name in pair.model.inputs}
            for name, values in keywords.items():
                pair.model.blobs[name].write("data", values)
        more = [self.random.choice(list(pair.model.blobs))] if self.random.random() < 0.1 else []
        shown = "".join(f", {name}={values.tolist()}" for name, values in keywords.items())
        self._say(f"{pair.name}.forward(blobs={more}{shown})")
        found = pair.real.forward(blobs=more, **keywords)
        pair.model.forward()
        for name in {*pair.model.outputs, *more}:
            self._compare(f"the output {name}", found[name], pair.model.blobs[name], "data")

    def _forward_part(self) -> None:
        pair = self._choose(lambda pair: not pair.model.form.side)
        if pair is None:
            return
        first, last = sorted(self.random.choices(range(len(pair.model.layers)), k=2))
        names = [pair.model.layers[index].name for index in (first, last)]
        self._say(f"{pair.name}.forward(start='{names[0]}', end='{names[1]}')")
        found = pair.real.forward(start=names[0], end=names[1])
        pair.model.forward(first, last)
        for name in pair.model.layers[last].tops:
            self._compare(f"the output {name}", found[name], pair.model.blobs[name], "data")

    def _backward(self) -> None:
        pair = self._choose()
        if pair is None:
            return
        keywords = {}
        if not pair.model.form.loss and self.random.random() < 0.7:
            keywords = {name: self._values(pair.model.blobs[name].shape) for name in pair.model.outputs}
            for name, values in keywords.items():
                pair.model.blobs[name].write("diff", values)
        shown = ", ".join(f"{name}={values.tolist()}" for name, values in keywords.items())
        self._say(f"{pair.name}.backward({shown})")
        found = pair.real.backward(**keywords)
        pair.model.backward()
        for name in pair.model.inputs:
            self._compare(f"the diff of {name}", found[name], pair.model.blobs[name], "diff")

    def _backward_part(self) -> None:
        pair = self._choose(lambda pair: not pair.model.form.side)
        if pair is None:
            return
        last, first = sorted(self.random.choices(range(len(pair.model.layers)), k=2))
        names = [pair.model.layers[index].name for index in (first, last)]
        self._say(f"{pair.name}.backward(start='{names[0]}', end='{names[1]}')")
        pair.real.backward(start=names[0], end=names[1])
        pair.model.backward(first, last)

    def _reshape(self) -> None:
        pair = self._choose(lambda pair: not pair.solver)
        if pair is None:
            return
        batch = self.random.randint(1, 4)
        for name in pair.model.inputs:
            blob = pair.model.blobs[name]
            shape = (batch, *blob.shape[1:])
            self._say(f"{pair.name}.blobs['{name}'].reshape{shape}")
            pair.real.blobs[name].reshape(*shape)
            blob.reshape(shape)
        if self.random.random() < 0.5:
            self._say(f"{pair.name}.reshape()")
            pair.real.reshape()
            pair.model.reshape()
        self._fill(pair)
        self._pass(pair)
        reshaped = [blob for blob in pair.model.blobs.values() if not blob.known["diff"]]
        self._held = [held for held in self._held if not any(held.owner is blob for blob in reshaped)]

    # -- numbers -------------------------------------------------------------------------------------

    def _parameter(self) -> tuple[str, Any, ModelBlob, str] | None:
        pair = self._choose()
        if pair is None:
            return None
        layer = self.random.choice(list(pair.model.params))
        index = self.random.randrange(len(pair.model.params[layer]))
        name = f"{pair.name}.params['{layer}'][{index}]"
        return name, pair.real.params[layer][index], pair.model.params[layer][index], layer

    def _write(self, name: str, real: Floats, model: Floats) -> None:
        """Write into an array of the program and the model's."""
        kind = self.random.choice(["all", "row", "times"])
        if kind == "times":
            self._say(f"{name}[...] *= 0.5")
            real[...] *= 0.5
            model[...] *= np.float32(0.5)
        elif kind == "row" and model.ndim:
            values, row = self._values(model.shape[1:]), self.random.randrange(len(model))
            self._say(f"{name}[{row}] = {values.tolist()}")
            real[row] = values
            model[row] = values
        else:
            values = self._values(model.shape)
            self._say(f"{name}[...] = {values.tolist()}")
            real[...] = values
            model[...] = values

    def _write_parameter(self) -> None:
        if (found := self._parameter()) is not None:
            self._write(f"{found[0]}.data", found[1].data, found[2].data)

    def _write_parameter_diff(self) -> None:
        if (found := self._parameter()) is not None:
            self._write(f"{found[0]}.diff", found[1].diff, found[2].diff)

    def _write_blob(self) -> None:
        """A diff, or the data of a hidden blob or an output."""
        pair = self._choose()
        if pair is None:
            return
        name, part = self.random.choice(list(pair.model.blobs)), self.random.choice(["data", "diff"])
        blob = pair.model.blobs[name]
        self._write(f"{pair.name}.blobs['{name}'].{part}", getattr(pair.real.blobs[name], part), blob.view(part))

    def _hold(self) -> None:
        if self.random.random() < 0.6:
            if (found := self._parameter()) is None:
                return
            place, real, model, is_parameter = found[0], found[1], found[2], True
        else:
            pair = self._choose()
            if pair is None:
                return
            name, is_parameter = self.random.choice(list(pair.model.blobs)), False
            place, real, model = f"{pair.name}.blobs['{name}']", pair.real.blobs[name], pair.model.blobs[name]
        part, name = self.random.choice(["data", "data", "diff"]), self._name("a")
        self._say(f"{name} = {place}.{part}")
        array = getattr(real, part)
        self._held.append(Held(name, array, model.view(part), model, part, is_parameter))

    def _write_held(self) -> None:
        if self._held:
            held = self.random.choice(self._held)
            self._write(held.name, held.real, held.model)

    def _release(self) -> None:
        if self._held:
            held = self._held.pop(self.random.randrange(len(self._held)))
            self._say(f"del {held.name}")

    def _clear(self) -> None:
        if (pair := self._choose()) is not None:
            self._say(f"{pair.name}.clear_param_diffs()")
            pair.real.clear_param_diffs()
            pair.model.clear_param_diffs()

    # -- parameters of other nets and files --------------------------------------------------------------

    def _share(self) -> None:
        one, other = self._choose(), self._choose()
        if one is None or other is None:
            return
        training = next((each for each in self._trainings if each.net is other), None)
        if training is not None and self.random.random() < 0.5:
            self._say(f"{training.name}.share_weights({one.name})")
            training.real.share_weights(one.real)
        else:
            self._say(f"{one.name}.share_with({other.name})")
            one.real.share_with(other.real)
        one.model.share_with(other.model)

    def _save(self) -> None:
        if (pair := self._choose()) is None:
            return
        hdf5 = self.random.random() < 0.5
        path = self._folder / f"{self._name('f')}{'.h5' if hdf5 else '.caffemodel'}"
        self._say(f"{pair.name}.save{'_hdf5' * hdf5}('{path.name}')")
        (pair.real.save_hdf5 if hdf5 else pair.real.save)(str(path))
        self._files.append((path, pair.model.saved(owned_only=hdf5), hdf5))

    def _load(self) -> None:
        pair = self._choose()
        if pair is None or not self._files:
            return
        path, stored, hdf5 = self.random.choice(self._files)
        method = "load_hdf5" if hdf5 and self.random.random() < 0.5 else "copy_from"
        self._say(f"{pair.name}.{method}('{path.name}')")
        if pair.model.fits(stored):
            getattr(pair.real, method)(str(path))
            pair.model.load(stored)
            return
        try:
            getattr(pair.real, method)(str(path))
        except SnapshotError:
            return
        raise DifferenceError(f"{path.name} lacks parameters and was loaded\n{self.transcript()}")

    # -- solvers -------------------------------------------------------------------------------------

    def _new_solver(self) -> None:
        if len(self._trainings) >= 2:
            return
        train, test = self.random.randrange(2), self.random.randrange(2)
        tests = self.random.random() < 0.7
        settings = {
            "base_lr": self.random.choice([0.03125, 0.0625]),
            "momentum": self.random.choice([0, 0.5, 0.875]),
            "weight_decay": self.random.choice([0, 0.125]),
            "test_initialization": self.random.randrange(2),
        }
        name = self._name("s")
        text = f"train_net: '{self._paths[train]}' lr_policy: 'fixed' max_iter: 1000 snapshot_after_train: false\n"
        text += f"snapshot_prefix: '{self._folder / name}' "
        if tests:
            text += f"test_net: '{self._paths[test]}' test_iter: 1 test_interval: 2 "
            text += f"test_initialization: {['false', 'true'][settings['test_initialization']]}\n"
        text += " ".join(f"{key}: {settings[key]}" for key in ("base_lr", "momentum", "weight_decay"))
        path = self._folder / f"{name}.prototxt"
        path.write_text(text)
        self._say(f"{name} = caffe.SGDSolver('{path.name}')  # {text!r}")
        real = caffe.SGDSolver(str(path))
        net = Pair(f"{name}.net", real.net, ModelNet(self._forms[train]), TRAIN, solver=True)
        test_pairs = [
            Pair(f"{name}.test_nets[{i}]", each, ModelNet(self._forms[test]), TEST, solver=True)
            for i, each in enumerate(real.test_nets)
        ]
        model = ModelSolver(net.model, [pair.model for pair in test_pairs], settings)
        self._trainings.append(Training(name, real, model, net, test_pairs, self._folder / name))
        self._pairs += [net, *test_pairs]
        for pair in (net, *test_pairs):
            if self.random.random() < 0.7:
                self._fill(pair)
            if pair.model.form.side:
                self._pass(pair)

    def _training(self) -> Training | None:
        return self.random.choice(self._trainings) if self._trainings else None

    def _step(self) -> None:
        if (training := self._training()) is None:
            return
        number = self.random.randint(1, 3)
        self._say(f"{training.name}.step({number})")
        training.real.step(number)
        for _ in range(number):
            training.model.step()
        self._trained = True
        assert training.real.iter == training.model.iter

    def _apply_update(self) -> None:
        training = self._training()
        if training is not None and training.model.known:
            self._say(f"{training.name}.apply_update()")
            training.real.apply_update()
            training.model.apply_update()

    def _snapshot(self) -> None:
        if (training := self._training()) is None:
            return
        self._say(f"{training.name}.snapshot()")
        training.real.snapshot()
        model = training.model
        file = f"{training.prefix}_iter_{model.iter}.solverstate"
        training.snapshots = [each for each in training.snapshots if each[0] != file]
        history = [values.copy() for values in model.history]
        training.snapshots.append((file, model.iter, history, model.net.saved(owned_only=False)))

    def _restore(self) -> None:
        training = self._training()
        if training is None or not training.snapshots:
            return
        file, iteration, history, weights = self.random.choice(training.snapshots)
        self._say(f"{training.name}.restore('{Path(file).name}')")
        training.real.restore(file)
        training.model.iter = iteration
        for values, stored in zip(training.model.history, history, strict=True):
            values[...] = stored
        training.model.net.load(weights)

    def _delete_solver(self) -> None:
        if (training := self._training()) is None:
            return
        self._say(f"keep the nets of {training.name}; del {training.name}")
        self._trainings.remove(training)
        for pair in (training.net, *training.tests):
            pair.solver = False
        del training
        gc.collect()

    # -- comparing -----------------------------------------------------------------------------------

    def _look(self) -> None:
        """Compare some numbers: looking must change nothing."""
        if (pair := self._choose()) is None:
            return
        if self.random.random() < 0.5:
            name, part = self.random.choice(list(pair.model.blobs)), self.random.choice(["data", "diff"])
            self._say(f"look at {pair.name}.blobs['{name}'].{part}")
            self._compare(name, getattr(pair.real.blobs[name], part), pair.model.blobs[name], part)
        elif (found := self._parameter()) is not None:
            part = self.random.choice(["data", "diff"])
            self._say(f"look at {found[0]}.{part}")
            self._compare(found[0], getattr(found[1], part), found[2], part)

    def _check_net(self, pair: Pair) -> None:
        for name, blob in pair.model.blobs.items():
            for part in ("data", "diff"):
                self._compare(f"{pair.name}.blobs['{name}'].{part}", getattr(pair.real.blobs[name], part), blob, part)
        for name, blobs in pair.model.params.items():
            for index, blob in enumerate(blobs):
                for part in ("data", "diff"):
                    real = getattr(pair.real.params[name][index], part)
                    self._compare(f"{pair.name}.params['{name}'][{index}].{part}", real, blob, part)

    def _check_held(self) -> None:
        for held in self._held:
            if held.owner.known[held.part]:
                self._equal(f"{held.name} (held)", held.real, held.model)

    def _compare(self, what: str, real: Floats, blob: ModelBlob, part: str) -> None:
        if real.shape != blob.shape:
            raise DifferenceError(f"{what}: shape {real.shape}, Caffe's is {blob.shape}\n{self.transcript()}")
        if blob.known[part]:
            self._equal(what, real, blob.view(part))

    def _equal(self, what: str, real: Floats, model: Floats) -> None:
        scale = 1 + float(np.abs(model).max(initial=0))
        error = float(np.abs(real - model).max(initial=0))
        if not error <= TOLERANCE * scale:
            raise DifferenceError(
                f"{what} is off by {error:.3g} of {scale - 1:.3g}: {real.tolist()}, in Caffe {model.tolist()}\n"
                f"{self.transcript()}"
            )


def _random_form(random: Random) -> Form:
    """A net; widths are such that weights can be shared in many of them."""
    inputs, count = random.randint(1, 4), random.randint(1, 3)
    other = random.choice([inputs, random.randint(1, 4)])
    chain = []
    for index in range(count):
        outputs = other if index % 2 == 0 else inputs
        chain.append(
            Inner(
                outputs,
                random.random() < 0.7,
                lr_mult=random.choice([0, 1, 1, 1, 2]),
                decay_mult=random.choice([0, 1]),
                relu=random.choice(["", "", "in place", "own top"]),
            )
        )
    form = Form(inputs, random.randint(1, 3), tuple(chain), random.random() < 0.8, random.random() < 0.3)
    return _shared(random, _with_side(random, form))


def _with_side(random: Random, form: Form) -> Form:
    return replace(form, side=0 if form.force_backward or random.random() < 0.8 else 2)


def _shared(random: Random, form: Form) -> Form:
    """Let layers of the chain share their weights, or not."""
    if random.random() < 0.5:
        return form
    first = form.chain[0]
    chain = [
        replace(inner, share="w", permissive=True, lr_mult=first.lr_mult, decay_mult=first.decay_mult)
        for inner in form.chain
    ]
    return replace(form, chain=tuple(chain))


def _variant(random: Random, form: Form) -> Form:
    """A net with the same parameters that shares, rectifies and learns otherwise."""
    chain = tuple(
        replace(
            inner,
            share="",
            permissive=False,
            relu=random.choice(["", inner.relu, "in place", "own top"]),
            lr_mult=random.choice([0, 1, inner.lr_mult]),
        )
        for inner in form.chain
    )
    loss, forced = random.random() < 0.8, random.random() < 0.3
    varied = replace(form, chain=chain, loss=loss, force_backward=forced, batch=random.randint(1, 3))
    return _shared(random, _with_side(random, varied))


def run_program(seed: int, steps: int = STEPS, kind: type[Any] = Program) -> None:
    """A program of this seed and kind.

    Raises:
        DifferenceError: caffepy and the model differ.
    """
    with tempfile.TemporaryDirectory() as folder:
        kind(seed, Path(folder)).run(steps)


def main(description: str, kind: type[Any] = Program) -> int:
    """Run programs of a kind and print those that fail; the exit status says whether one did."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="how many programs")
    parser.add_argument("--seed", type=int, default=1, help="of the first program; the next ones follow")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of a program")
    parser.add_argument("--gpu", action="store_true", help="on the first GPU, in float32")
    parser.add_argument("--failures", type=int, default=5, help="after so many the run ends")
    options = parser.parse_args()
    if options.gpu:
        caffe.set_device(0)
        caffe.set_mode_gpu()
        caffe.set_math("fp32")
    started, failed = time.monotonic(), 0
    for seed in range(options.seed, options.seed + options.count):
        try:
            run_program(seed, options.steps, kind)
        except DifferenceError as error:
            failed += 1
            print(f"--- seed {seed}: {error}\n", flush=True)
            if failed >= options.failures:
                break
    print(f"{seed - options.seed + 1} programs in {time.monotonic() - started:.0f} s, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(str(__doc__)))
