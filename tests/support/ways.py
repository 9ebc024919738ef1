"""Runs a random net of `wide_nets` in the ways that there are, and compares what they give.

As a program it tries many nets on the CPU; from the repository's root:

    python tests/support/ways.py --count 2000
    python tests/support/ways.py --first 1234 --count 1 --show
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from replaying import Replaying
from training import solver_param
from wide_nets import Values, WideNet

from caffepy import pycaffe as caffe
from caffepy.backend import Backend, create_backend
from caffepy.errors import ConfigError, ShapeError, UserError
from caffepy.inference.model import Model
from caffepy.layers.core.base import LayerContext
from caffepy.net import Net
from caffepy.proto import caffe_pb2
from caffepy.solvers import Solver, create_solver
from caffepy.solvers.execution_options import ExecutionOptions

Differences = dict[str, float]
"""How far one way is from another, by what and where, in proportion to the largest value."""

TOLERANCE = 2e-5
TRAINED = 5e-4
"""The same after some iterations of training."""
ATTEMPTS = 3
"""Inputs with which two ways have to differ: a rounding beside a kink or a tie makes a difference with one only."""


def give_parameters(net: Net, seed: int = 1) -> None:
    """Values such as training leaves: statistics that are not 0, variances that are not small."""
    generator = np.random.default_rng(seed)
    for layer in net.layers:
        for index, blob in enumerate(layer.blobs):
            values = blob.host_data()
            if layer.type == "BatchNorm" and index < 3:
                values = (
                    generator.normal(0, 0.3, blob.shape) if index == 0
                    else generator.uniform(0.5, 2, blob.shape) if index == 1 else np.ones(blob.shape)
                )  # fmt: skip
            elif net.owns(layer, index):
                values = values + generator.normal(0, 0.05, blob.shape)
            net.backend.from_host(values.astype(np.float32), blob.data)


def distance(found: Any, wanted: Any) -> float:
    """The largest difference in proportion to the largest value; infinite where shapes or NaNs differ."""
    if np.shape(found) != np.shape(wanted) or not np.array_equal(np.isfinite(found), np.isfinite(wanted)):
        return np.inf
    with np.errstate(invalid="ignore"):
        apart = np.abs(np.asarray(found, np.float64) - wanted)[np.isfinite(wanted)]
    return float(apart.max(initial=0) / max(np.abs(wanted[np.isfinite(wanted)]).max(initial=0), 1e-2))


def differences(found: Values, wanted: Values, where: str, limit: float | None = None) -> Differences:
    """Those beyond the limit, `TOLERANCE` by default; 0 wants the same bits."""
    limit = TOLERANCE if limit is None else limit
    apart = dict.fromkeys((f"{where}: {name}" for name in found.keys() ^ wanted.keys()), np.inf)
    for name in found.keys() & wanted.keys():
        same = np.array_equal(found[name], wanted[name], equal_nan=True)
        error = 0.0 if same else distance(np.asarray(found[name]), np.asarray(wanted[name]))
        if error > limit or (limit == 0 and not same):
            apart[f"{where}: {name}"] = error
    return apart


# -- TEST nets ---------------------------------------------------------------------------------------------


def outputs(net: Net, values: Values) -> Values:
    """What the net itself gives, layer by layer."""
    for name, array in values.items():
        net.blobs[name].reshape(array.shape)
        net.backend.from_host(array, net.blobs[name].data)
    net.forward()
    return {name: blob.host_data() for name, blob in net.outputs.items()}


VARIANTS = [(1, 0), (2, 0), (1, 1), (3, 0), (2, 2), (1, 3)]
"""How many times as many samples the inputs have, and how much longer their last axes are."""


def compare_inference(wide: WideNet, attempt: int = 0, backend: Backend | None = None) -> Differences:
    """Layer by layer, folded, and recorded or captured passes: new inputs, written parameters, other shapes.

    Args:
        wide: the net.
        attempt: chooses the inputs.
        backend: where all run; None: the CPU, the fast ways with several threads.
    """
    choose = Random(wide.seed)
    plain = Net(wide.param(), LayerContext(backend or create_backend(None, 1), phase=caffe_pb2.TEST, seed=1))
    give_parameters(plain)
    weights = [(plain.to_proto(), "the plain net")]
    other = LayerContext(backend or create_backend(None, choose.randint(1, 4)), phase=caffe_pb2.TEST, seed=1)
    models = [Model(wide.param(), other, weights, eager=eager) for eager in (False, True)]
    variants, variant = VARIANTS[: 1 if plain.state() else None], VARIANTS[0]
    found: Differences = {}
    for number in range(16):
        if number > 3 and choose.random() < 0.4:
            variant = choose.choice(variants)
        if number > 3 and choose.random() < 0.15:
            for net in (plain, *(model.net for model in models)):
                give_parameters(net, number)
            for model in models:
                model.parameters_changed()
        values = wide.values(100 * attempt + number, *variant)
        try:
            wanted = outputs(plain, values)
        except UserError as error:
            found.update(_refused(models[0], values, str(error)))
            variants = [one for one in variants if one != variant]
            variant = VARIANTS[0]
            continue
        got, same = (model(**values) for model in models)
        found.update(differences(got, wanted, f"pass {number} {variant}, folded"))
        found.update(differences(got, same, f"pass {number} {variant}, written down", limit=0))
    return found


def _refused(model: Model, values: Values, wanted: str) -> Differences:
    """A difference where a model takes what the net by itself refuses."""
    try:
        model(**values)
    except UserError:
        return {}
    return {f"taken by the folded net: {wanted}": np.inf}


def compare_runtime(wide: WideNet, attempt: int = 0) -> Differences:
    """caffepy's kernels and onnxruntime; nothing where a layer has no ONNX form."""
    context = LayerContext(create_backend(None, 1), phase=caffe_pb2.TEST, seed=1)
    plain = Net(wide.param(), context)
    give_parameters(plain)
    model = Model(wide.param(), context, [(plain.to_proto(), "the plain net")], by_runtime=True)
    found: Differences = {}
    for number in range(2):
        values = wide.values(100 * attempt + number)
        try:
            got = model(**values)
        except ConfigError:
            return {}
        found.update(differences(got, outputs(plain, values), f"pass {number}, onnxruntime", 1e-4))
    return found


# -- caffe.Net ---------------------------------------------------------------------------------------------


class Programs:
    """The same random program on two `caffe.Net`, one of which runs layer by layer."""

    def __init__(self, wide: WideNet, folder: Path, attempt: int = 0) -> None:
        self._wide = wide
        self._random = Random(wide.seed)  # other inputs, the same program: a fault must show in each attempt
        self._attempt = attempt
        path = folder / "net.prototxt"
        path.write_text(wide.text)
        self._folder = folder
        self.nets = []
        for plain in (False, True):
            caffe.set_random_seed(3)
            caffe.set_layer_by_layer(plain)
            self.nets.append(caffe.Net(str(path), caffe.TEST))
        caffe.set_layer_by_layer(False)
        caffe.set_random_seed(4)
        self._other = caffe.Net(str(path), caffe.TEST)
        self._other.save(str(folder / "other.caffemodel"))
        for net in self.nets:
            give_parameters(net._core)
        self._held: list[tuple[Any, Any]] = []
        self._number = 0
        self.batch = 1
        self.folded = 0
        self.done: list[str] = []

    def run(self, steps: int) -> Differences:
        """Do some steps; the first differences."""
        names = list(self._steps())
        for _ in range(steps):
            what = self._random.choices(names, [self._steps()[name][0] for name in names])[0]
            self.done.append(what)
            found = self._steps()[what][1]()
            found.update(self._outputs(what))
            self.folded += self.nets[0]._inference._last is not None
            if found:
                return found
        return self._compare_all("the end")

    def _steps(self) -> dict[str, tuple[float, Callable[[], Differences]]]:
        return {
            "pass": (12, self._pass), "pass on written inputs": (3, self._pass_on_written), "look": (0.4, self._look),
            "hold": (0.3, self._hold), "write parameter": (1, self._write_parameter), "save": (0.5, self._save),
            "read parameter": (0.5, self._read_parameter), "reshape": (1, self._reshape), "copy": (0.5, self._copy),
            "share": (0.2, self._share), "part": (0.2, self._part), "shapes": (0.5, self._shapes),
            "back": (0.1, self._backward), "pass again": (1, self._again), "release": (0.5, self._release),
            "write held": (0.5, self._write_held), "hold parameter": (0.4, self._hold_parameter),
            "hdf5": (0.4, self._hdf5), "names": (1, self._names),
            "reshape one": (0.5, self._reshape_alone), "write output": (0.5, self._write_output),
        }  # fmt: skip

    def _pass(self) -> Differences:
        values = self._values()
        pair = [{n: a.copy() for n, a in net.forward(**values).items()} for net in self.nets]
        return differences(*pair, where=f"step {len(self.done)}, pass")

    def _values(self) -> Values:
        self._number += 1
        return self._wide.values(1000 * self._attempt + self._number, self.batch)

    def _pass_on_written(self) -> Differences:
        values = self._values()
        for net in self.nets:
            for name, array in values.items():
                net.blobs[name].data[...] = array
            net.forward()
        return {}

    def _again(self) -> Differences:
        for net in self.nets:
            net.forward()
        return {}

    def _look(self) -> Differences:
        name = self._random.choice(list(self.nets[0].blobs))
        pair = [{name: net.blobs[name].data.copy()} for net in self.nets]
        return differences(*pair, where=f"step {len(self.done)}, look")

    def _hold(self) -> Differences:
        name = self._random.choice(list(self.nets[0].blobs))
        first, second = (net.blobs[name].data for net in self.nets)
        self._held.append((first, second))
        return {}

    def _parameter(self) -> tuple[str, int] | None:
        names = [(name, i) for name, blobs in self.nets[0].params.items() for i in range(len(blobs))]
        return self._random.choice(names) if names else None

    def _write_parameter(self) -> Differences:
        if chosen := self._parameter():
            for net in self.nets:
                net.params[chosen[0]][chosen[1]].data[...] *= 1.5
            if self._random.random() < 0.7:
                self._pass()
        return {}

    def _read_parameter(self) -> Differences:
        if not (chosen := self._parameter()):
            return {}
        pair = [{"p": net.params[chosen[0]][chosen[1]].data.copy()} for net in self.nets]
        return differences(*pair, where=f"step {len(self.done)}, parameter {chosen}", limit=0)

    def _save(self) -> Differences:
        files = []
        for index, net in enumerate(self.nets):
            net.save(str(self._folder / f"{index}.caffemodel"))
            files.append((self._folder / f"{index}.caffemodel").read_bytes())
        return {} if files[0] == files[1] else {"saved files": np.inf}

    def _copy(self) -> Differences:
        for net in self.nets:
            net.copy_from(str(self._folder / "other.caffemodel"))
        return {}

    def _share(self) -> Differences:
        for net in self.nets:
            net.share_with(self._other)
        return {}

    def _reshape(self) -> Differences:
        before, self.batch = self.batch, self._random.choice([1, 2])
        shapes = {name: array.shape for name, array in self._values().items()}
        errors = [self._reshape_one(net, shapes) for net in self.nets]
        if any(errors):
            self.batch = before
            shapes = {name: array.shape for name, array in self._values().items()}
            errors += [self._reshape_one(net, shapes) for net in self.nets]
        return {} if errors[0] == errors[1] else {f"reshape: {errors}": np.inf}

    def _reshape_one(self, net: caffe.Net, shapes: dict[str, tuple[int, ...]]) -> str:
        try:
            for name, shape in shapes.items():
                net.blobs[name].reshape(*shape)
            net.reshape()
        except UserError as error:
            return str(error)
        return ""

    def _release(self) -> Differences:
        self._held.clear()
        return {}

    def _write_held(self) -> Differences:
        for pair in self._held[-1:]:
            for array in pair:
                array[...] *= 0.5
        return {}

    def _hold_parameter(self) -> Differences:
        if chosen := self._parameter():
            first, second = (net.params[chosen[0]][chosen[1]].data for net in self.nets)
            self._held.append((first, second))
        return {}

    def _hdf5(self) -> Differences:
        for net in self.nets:
            net.save_hdf5(str(self._folder / "net.h5"))
            net.load_hdf5(str(self._folder / "net.h5"))
        return {}

    def _reshape_alone(self) -> Differences:
        """The program reshapes an input and lets `forward` reshape the rest."""
        if self.batch != 1:
            return {}
        for net in self.nets:
            net.blobs["data"].reshape(*self._wide.inputs["data"][0])
        return {}

    def _names(self) -> Differences:
        """A pass that returns a hidden blob as well."""
        name, values = self._random.choice(list(self.nets[0].blobs)), self._values()
        pair = [{n: a.copy() for n, a in net.forward(blobs=[name], **values).items()} for net in self.nets]
        return differences(*pair, where=f"step {len(self.done)}, pass with {name}")

    def _write_output(self) -> Differences:
        name = self._random.choice(list(self.nets[0].outputs))
        for net in self.nets:
            net.blobs[name].data[...] = 0.25
        return {}

    def _shapes(self) -> Differences:
        shapes = [{name: np.array(blob.shape) for name, blob in net.blobs.items()} for net in self.nets]
        return differences(*shapes, where=f"step {len(self.done)}, shapes", limit=0)

    def _part(self) -> Differences:
        layers = list(self.nets[0]._layer_names)
        start = self._random.choice(layers)
        for net in self.nets:
            net.forward(start=start)
        return {}

    def _backward(self) -> Differences:
        for net in self.nets:
            net.forward()
            net.backward()
        found: Differences = {}
        for name, blobs in self.nets[0].params.items():
            pairs = zip(blobs, self.nets[1].params[name], strict=True)
            for index, (mine, theirs) in enumerate(pairs):
                pair = {"d": mine.diff}, {"d": theirs.diff}
                found.update(differences(*pair, where=f"step {len(self.done)}, {name}[{index}]"))
        return found

    def _outputs(self, what: str) -> Differences:
        where = f"step {len(self.done)} ({what})"
        pair = [{name: net.blobs[name].data.copy() for name in net.outputs} for net in self.nets]
        found = differences(*pair, where=where)
        for index, (mine, theirs) in enumerate(self._held):
            found.update(differences({"held": mine.copy()}, {"held": theirs.copy()}, f"{where}, array {index}"))
        return found

    def _compare_all(self, where: str) -> Differences:
        pair = [{name: blob.data.copy() for name, blob in net.blobs.items()} for net in self.nets]
        return differences(*pair, where=where)


def compare_programs(wide: WideNet, attempt: int = 0) -> Differences:
    """`caffe.Net` as it runs by itself, and layer by layer."""
    with tempfile.TemporaryDirectory() as folder:
        programs = Programs(wide, Path(folder), attempt)
        found = programs.run(20)
        return {f"{name} after {', '.join(programs.done)}": error for name, error in found.items()}


# -- training ----------------------------------------------------------------------------------------------

SOLVER = """
type: "%s" base_lr: 0.02 lr_policy: "step" stepsize: 2 gamma: 0.5 %s max_iter: 100 test_iter: 2 test_interval: 2
test_initialization: false snapshot_after_train: false display: 0 random_seed: 5 iter_size: %d %s
snapshot_prefix: "%s"
"""
RULES = [("SGD", "momentum: 0.9"), ("SGD", ""), ("Nesterov", "momentum: 0.9"), ("Adam", "momentum: 0.9"),
         ("RMSProp", "rms_decay: 0.9 delta: 1e-2"), ("AdaGrad", "delta: 1e-2"),
         ("AdaDelta", "momentum: 0.9 delta: 1e-2")]  # fmt: skip
ITERATIONS = 5
GROWN = 3
"""The iteration of twice as many samples, which some nets refuse."""


@contextmanager
def solver_of(wide: WideNet, folder: Path, backend: Backend, **engine: bool) -> Iterator[Solver]:
    """A solver of the net; the same with each call but for how it runs."""
    choose = Random(wide.seed).choice
    more = choose(["", "weight_decay: 0.01", "clip_gradients: 1"])
    text = SOLVER % (*choose(RULES), choose([1, 1, 2]), more, folder / "snap")
    param = solver_param(text)
    param.net_param.CopyFrom(wide.param())
    with backend.activate():
        solver = create_solver(param, backend, keep_going=True, engine=ExecutionOptions(autotune=False, **engine))
        try:
            give_parameters(solver.net)
            yield solver
        finally:
            solver.close()


def train(wide: WideNet, solver: Solver, attempt: int, first: int = 0, snapshot_at: int = -1) -> Values:
    """Losses, test scores, parameters and their gradients of some iterations, each on other inputs."""
    found: Values = {}
    for number in range(first, ITERATIONS):
        for net in (solver.net, *solver.test_nets):
            batch = 2 if number == GROWN and net is solver.net else 1
            for name, array in wide.values(1000 * attempt + number, batch).items():
                net.blobs[name].reshape(array.shape)
                net.backend.from_host(array, net.blobs[name].data)
        try:
            solver.step(1)
        except ShapeError:
            return found | {"refused": np.array(number)}
        found[f"loss {number}"] = np.float32(solver.net.loss())
        for name, blob in solver.net.outputs.items():
            found[f"{name} {number}"] = blob.host_data()
        for scores in solver.test_all() if number % 2 else []:
            found.update({f"test {number} {name}": np.asarray(score) for name, score in scores.items()})
        for layer in solver.net.layers:
            for index, blob in enumerate(layer.blobs):
                found[f"{layer.name}[{index}] {number}"] = blob.host_data()
                if layer.propagate_to_params[index] and blob.gradient_started:
                    found[f"d {layer.name}[{index}] {number}"] = blob.host_diff()
        if number == snapshot_at:
            solver.snapshot()
    return found


def compare_training(wide: WideNet, attempt: int = 0, backend: Backend | None = None) -> Differences:
    """Training layer by layer and fused, and going on from a snapshot.

    Args:
        wide: the net.
        attempt: chooses the inputs.
        backend: where; None: the CPU.
    """
    if wide.overwrites_inputs:
        return {}  # the tests' second passes would begin with what layer by layer the first ones leave
    plain, fast = backend or create_backend(None, 1), backend or create_backend(None, 2)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with solver_of(wide, folder, plain, fuse=False, share=False, eager=True) as solver:
            wanted = train(wide, solver, attempt)
        with solver_of(wide, folder, fast) as solver:
            got = train(wide, solver, attempt, snapshot_at=2)
        with solver_of(wide, folder, fast) as solver:  # NVIDIA's running statistics begin anew when training goes on
            solver.restore(folder / "snap_iter_3.solverstate")
            rest = {} if solver.net.context.nvidia else train(wide, solver, attempt, first=3)
    found = trained_differences(got, wanted)
    kept = {name: array for name, array in got.items() if name in rest}
    return found | differences(rest, kept, "resumed", limit=0)


def trained_differences(got: Values, wanted: Values) -> Differences:
    """As `differences`; no gradient is measured by less than a hundredth of the largest one: biases before a BatchNorm
    have gradients that are roundings."""
    size = {d: max((float(np.abs(a).max(initial=0)) for n, a in wanted.items() if n.startswith("d ") == d), default=0)
            for d in (True, False)}  # fmt: skip
    found = differences(got, wanted, "fused", TRAINED)
    for label in list(found):
        name = label.partition(": ")[2]
        if name in got and name in wanted and np.shape(got[name]) == np.shape(wanted[name]):
            least = 0.01 * size[True] if name.startswith("d ") else 1e-2
            apart = float(np.abs(np.asarray(got[name], np.float64) - wanted[name]).max(initial=0))
            if np.isfinite(apart) and apart <= TRAINED * max(least, float(np.abs(wanted[name]).max(initial=0))):
                del found[label]
    return found


# -- all of them -------------------------------------------------------------------------------------------


def compare_replayed(wide: WideNet, attempt: int = 0) -> Differences:
    """Tests and training as on a device that captures: with shared memory, and on one backend."""
    backend = Replaying()
    found = compare_inference(wide, attempt, backend)
    if "Dropout" in wide.text:
        return found  # this backend counts the passes of a captured iteration as one
    return found | compare_training(wide, attempt, backend)


WAYS: dict[str, Callable[..., Differences]] = {
    "inference": compare_inference,
    "programs": compare_programs,
    "training": compare_training,
    "onnxruntime": compare_runtime,
    "replayed": compare_replayed,
}


def persistent(way: Callable[..., Differences], wide: WideNet) -> Differences:
    """What differs with each of several inputs; the first inputs' differences."""
    first: Differences = {}
    for attempt in range(ATTEMPTS):
        found = way(wide, attempt)
        first = first or found
        if not found:
            return {}
    return first


def main() -> int:
    """Try many nets; returns whether any differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="how many nets (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first net's seed (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=9, help="most layers of a net (default: %(default)s)")
    parser.add_argument("--ways", default=",".join(WAYS), help="which ways (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so long")
    parser.add_argument("--show", action="store_true", help="print the nets that differ")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    begin, differing, tried = time.monotonic(), Counter[str](), 0
    for seed in range(options.first, options.first + options.count):
        if time.monotonic() - begin > options.seconds:
            break
        tried += 1
        for name in options.ways.split(","):
            if said := _tried(name, WideNet(seed, options.layers)):
                differing[name] += 1
                print(f"net {seed}, {name}: {said}", flush=True)
                if options.show:
                    print(WideNet(seed, options.layers).text)
    print(f"{tried} nets, {dict(differing)} differ, {time.monotonic() - begin:.0f} s")
    return int(bool(differing))


def _tried(name: str, wide: WideNet) -> str:
    try:
        found = persistent(WAYS[name], wide)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ", ".join(f"{what} by {e:.3g}" for what, e in list(found.items())[:4])


if __name__ == "__main__":
    sys.exit(main())
