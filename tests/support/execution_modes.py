"""Runs a random net of `wide_nets` in each execution mode, and compares what they give.

As a program it tries many nets on the CPU; from the repository's root:

    python tests/support/execution_modes.py --count 2000
    python tests/support/execution_modes.py --first 1234 --count 1 --show
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

import numpy as np
from caffe_programs import compare_programs
from compare_nets import Differences, compare_fused, differences, give_parameters
from fake_graph_backend import FakeGraphBackend
from training import solver_param
from wide_nets import Values, WideNet, fusible_net

from caffepy.backend import Backend, create_backend
from caffepy.errors import ConfigError, ShapeError, UserError
from caffepy.formats.proto import caffe_pb2
from caffepy.infer.model import Model
from caffepy.layers.layer import LayerContext
from caffepy.net import Net
from caffepy.training.solver import Solver, create_solver
from caffepy.utils.options import ExecutionOptions

TRAINED = 5e-4
"""`TOLERANCE` after some iterations of training."""
ATTEMPTS = 3
"""Inputs with which two modes have to differ: a rounding beside a kink or a tie makes a difference with one only."""


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
        backend: where all run; None: the CPU, the fast modes with several threads.
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


# -- training ----------------------------------------------------------------------------------------------

SOLVER = """
type: "%s" base_lr: 0.02 lr_policy: "step" stepsize: 2 gamma: 0.5 %s max_iter: 100 test_iter: 2 test_interval: 2
test_initialization: false snapshot_after_train: false display: 0 random_seed: 5 iter_size: %d %s
snapshot_prefix: "%s"
"""
RULES = [
    ("SGD", "momentum: 0.9"),
    ("SGD", ""),
    ("Nesterov", "momentum: 0.9"),
    ("Adam", "momentum: 0.9"),
    ("RMSProp", "rms_decay: 0.9 delta: 1e-2"),
    ("AdaGrad", "delta: 1e-2"),
    ("AdaDelta", "momentum: 0.9 delta: 1e-2"),
]
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
            batch = 2 if number == GROWN else 1
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
    size = {
        d: max((float(np.abs(a).max(initial=0)) for n, a in wanted.items() if n.startswith("d ") == d), default=0)
        for d in (True, False)
    }
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


def compare_captured(wide: WideNet, attempt: int = 0) -> Differences:
    """Tests and training as on a device that captures: with shared memory, and on one backend."""
    backend = FakeGraphBackend()
    found = compare_inference(wide, attempt, backend)
    if "Dropout" in wide.text:
        return found  # this backend counts the passes of a captured iteration as one
    return found | compare_training(wide, attempt, backend)


MODES: dict[str, Callable[..., Differences]] = {
    "inference": compare_inference,
    "programs": compare_programs,
    "training": compare_training,
    "onnxruntime": compare_runtime,
    "captured": compare_captured,
    "fused": compare_fused,
}


def net_for(mode: str, seed: int) -> WideNet:
    """The net that a mode is tried on."""
    return fusible_net(seed) if mode == "fused" else WideNet(seed)


def persistent(mode: Callable[..., Differences], wide: WideNet) -> Differences:
    """What differs with each of several inputs; the first inputs' differences."""
    first: Differences = {}
    for attempt in range(ATTEMPTS):
        found = mode(wide, attempt)
        first = first or found
        if not found:
            return {}
    return first


def main() -> int:
    """Try many nets; returns whether any differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="how many nets (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first net's seed (default: %(default)s)")
    parser.add_argument("--modes", default=",".join(MODES), help="which modes (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so long")
    parser.add_argument("--show", action="store_true", help="print the nets that differ")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    begin, differing, tried = time.monotonic(), Counter[str](), 0
    for seed in range(options.first, options.first + options.count):
        if time.monotonic() - begin > options.seconds:
            break
        tried += 1
        for name in options.modes.split(","):
            if said := _tried(name, net_for(name, seed)):
                differing[name] += 1
                print(f"net {seed}, {name}: {said}", flush=True)
                if options.show:
                    print(net_for(name, seed).text)
    print(f"{tried} nets, {dict(differing)} differ, {time.monotonic() - begin:.0f} s")
    return int(bool(differing))


def _tried(name: str, wide: WideNet) -> str:
    try:
        found = persistent(MODES[name], wide)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ", ".join(f"{what} by {e:.3g}" for what, e in list(found.items())[:4])


if __name__ == "__main__":
    sys.exit(main())
