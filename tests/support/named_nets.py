"""Random nets whose layers have no names or equal ones and share parameters, trained on one device and on several.

As a program it tries many nets on the CPU, each on one device and on threads or ranks; from the repository's root:

    python tests/support/named_nets.py --count 2000
    python tests/support/named_nets.py --first 1234 --count 1 --show
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import h5py
import numpy as np
from process_groups import raise_first, run_local, run_tcp
from random_nets import NAMINGS, RandomNet, Shape, Stem
from training import CPU, solver_param

from caffepy.backend import create_backend
from caffepy.distributed import DistributedDataParallel, ProcessGroup
from caffepy.errors import SnapshotError
from caffepy.export.onnx.libraries import run_model
from caffepy.export.onnx.write import serialised, to_model
from caffepy.export.prepare import fold_batch_norms, with_parameters
from caffepy.formats.caffemodel import read_weights, write_caffemodel
from caffepy.formats.proto import caffe_pb2
from caffepy.infer.model import Model
from caffepy.layers.layer import LayerContext
from caffepy.net import Net
from caffepy.net.deploy import deploy_net, plan_deploy
from caffepy.net.memory_plan import plan_memory, sample_shapes
from caffepy.training.options import TrainOptions
from caffepy.training.p2p_manager import P2PManager
from caffepy.training.solver import Solver, create_solver

RECORDS = 60
BATCH = 12
"""Samples of all devices in one pass; 2 and 3 devices divide them evenly."""
CLASSES = 5
DATASETS: dict[str, Shape] = {"vector": (6,), "image": (3, 4, 4), "other": (8,), "target": (CLASSES,)}
SIZES = (4, 6, 8)
"""Outputs of InnerProduct layers; few, so that weights of one shape or count are frequent."""
ITERATIONS = 4
TOLERANCE = 1e-3
"""Largest difference of two parameters, relative to how far training has moved them."""
WAY_OF_TRAINING = """
base_lr: 0.02 lr_policy: "step" stepsize: 2 gamma: 0.5 display: 0 random_seed: 5 max_iter: %d test_iter: 5
test_interval: 2 test_initialization: false snapshot_after_train: false %s snapshot_prefix: "%s"
"""
RULES = ('type: "SGD" momentum: 0.9', 'type: "SGD" weight_decay: 0.01', 'type: "Nesterov" momentum: 0.9')

Arrays = list[np.ndarray]


def write_data(folder: Path) -> Path:
    """The list of an HDF5 file with the records of `DATASETS` and labels."""
    generator = np.random.default_rng(3)
    with h5py.File(folder / "data.h5", "w") as file:
        for name, shape in DATASETS.items():
            file[name] = generator.standard_normal((RECORDS, *shape)).astype(np.float32)
        file["label"] = generator.integers(0, CLASSES, RECORDS).astype(np.float32)
    (folder / "list.txt").write_text(f"{folder / 'data.h5'}\n")
    return folder / "list.txt"


class NamedNet(RandomNet):
    """A net to train and to test on the records of `write_data`, whose layers are named in a random way.

    Parameters are shared by name: of equal shapes (STRICT), of equal counts (PERMISSIVE), by two layers or many.

    Args:
        seed: of everything, the parameters' values not counted.
        source: the list of HDF5 files.
    """

    def __init__(self, seed: int, source: Path) -> None:
        super().__init__(seed, Random(seed).choice(NAMINGS[1:]))
        self.seed = seed
        self._shared: dict[str, bool] = {}
        self._sharing = self._random.choice((0.0, 0.3, 0.6))
        self._source = source
        self._batches: list[int] = []
        self._open: list[Stem] = []
        choose = self._random.choice
        self.solver = " ".join(
            (
                choose(RULES),
                choose(("", "", "iter_size: 2")),
                choose(("", "", "clip_gradients: 0.5")),
                choose(("", "layer_wise_reduce: true", "layer_wise_reduce: true", "layer_wise_reduce: false")),
            )
        )
        self.buckets = choose(("", "reduce_buckets: 0 ", "reduce_buckets: 2 ", "reduce_buckets: 5 "))
        self._build()

    def prototxt(self, read: int, drawn: int) -> str:
        """The net's text.

        Args:
            read: `batch_size` of layers that read records, which the threads of a process divide.
            drawn: samples of layers that draw numbers, which each device has for itself.
        """
        return self.buckets + self.text.replace("READ", str(read)).replace("DRAWN", str(drawn))

    # -- the course of things --------------------------------------------------------------------------

    def _build(self) -> None:
        pick = self._random.randint
        for name in self._random.sample(sorted(set(DATASETS) - {"target"}), pick(1, 3)):
            self._data(name)
        self._read(["target"])
        self._read(["label"])
        for _ in range(pick(3, 9)):
            stem = self._open.pop(pick(0, len(self._open) - 1))
            self._open += self._random.choice((self._learn, self._learn, self._change, self._branch, self._join))(stem)
        self._open = self._open[:3]
        for stem in self._open:
            self._loss(stem)

    def _data(self, name: str) -> None:
        shape = (BATCH, *DATASETS[name])
        if self._chance(0.3):
            dims = " ".join(f"dim: {size}" for size in shape[1:])
            filler = 'data_filler { type: "gaussian" std: 1 }'
            for phase, size in (("TRAIN", "DRAWN"), ("TEST", str(BATCH))):
                settings = f"dummy_data_param {{ shape {{ dim: {size} {dims} }} {filler} }}"
                self._layer("DummyData", [], [name], f"{settings} include {{ phase: {phase} }}")
        else:
            self._read([name])
        self._open.append(Stem(name, shape, free=False))

    def _read(self, tops: list[str]) -> None:
        for phase, size in (("TRAIN", "READ"), ("TEST", str(BATCH))):
            settings = f'hdf5_data_param {{ source: "{self._source}" batch_size: {size} }}'
            self._layer("HDF5Data", [], tops, f"{settings} include {{ phase: {phase} }}")

    def _learn(self, stem: Stem) -> list[Stem]:
        if len(stem.shape) == 4 and self._chance(0.7):
            return [self._convolution(stem)]
        return [self._inner_product(stem, self._random.choice(SIZES))]

    def _change(self, stem: Stem) -> list[Stem]:
        """A layer by elements or channels, often in place."""
        channels = stem.shape[1]
        kind, settings, shapes = self._random.choice(
            (
                ("TanH", "", ()),
                ("Sigmoid", "", ()),
                ("ReLU", "relu_param { negative_slope: 0.3 }", ()),
                ("Dropout", "dropout_param { dropout_ratio: 0.3 }", ()),
                ("Scale", 'scale_param { bias_term: true filler { type: "uniform" min: 0.5 max: 1.5 } }', 2),
                ("Bias", "bias_param { filler { value: 0.1 } }", 1),
                ("PReLU", "", 1),
                ("BatchNorm", "", ()),
            )
        )
        params = self._params([(channels,)] * shapes) if shapes else ""
        in_place = stem.free and kind != "Scale" and self._chance(0.5)
        top = Stem(stem.name if in_place else self._new(f"{kind}_"), stem.shape)
        self._layer(kind, [stem.name], [top.name], f"{params} {settings}")
        return [top]

    def _branch(self, stem: Stem) -> list[Stem]:
        """Two or three readers of a blob."""
        stem.free = False
        return [one for _ in range(self._random.randint(2, 3)) for one in self._learn(stem)][: 4 - len(self._open)] or [
            stem
        ]

    def _join(self, stem: Stem) -> list[Stem]:
        """The sum with another blob of the same shape, or both in one."""
        for other in self._open:
            if other.shape[2:] == stem.shape[2:]:
                self._open.remove(other)
                top = self._new("joined")
                if other.shape == stem.shape and self._chance(0.5):
                    self._layer("Eltwise", [stem.name, other.name], [top])
                    return [Stem(top, stem.shape)]
                self._layer("Concat", [stem.name, other.name], [top])
                return [Stem(top, (BATCH, stem.shape[1] + other.shape[1], *stem.shape[2:]))]
        return self._learn(stem)

    def _loss(self, stem: Stem) -> None:
        scores = self._inner_product(stem, CLASSES)
        weight = self._random.choice(("", "loss_weight: 0.5"))
        if self._chance(0.5):
            self._layer("EuclideanLoss", [scores.name, "target"], [self._new("loss")], weight)
        else:
            self._layer("SoftmaxWithLoss", [scores.name, "label"], [self._new("loss")], weight)
            if self._chance(0.3):
                only = "include { phase: TEST }"
                self._layer("Accuracy", [scores.name, "label"], [self._new("accuracy")], only)

    # -- layers that learn -----------------------------------------------------------------------------

    def _inner_product(self, stem: Stem, outputs: int) -> Stem:
        inputs = int(np.prod(stem.shape[1:]))
        bias, transposed = self._chance(0.7), self._chance(0.2)
        weights = (inputs, outputs) if transposed else (outputs, inputs)
        params = self._params([weights, (outputs,)] if bias else [weights])
        settings = f"num_output: {outputs} bias_term: {str(bias).lower()} transpose: {str(transposed).lower()}"
        top = Stem(self._new("ip"), (BATCH, outputs))
        filled = f'{settings} weight_filler {{ type: "xavier" }}'
        self._layer("InnerProduct", [stem.name], [top.name], f"{params} inner_product_param {{ {filled} }}")
        return top

    def _convolution(self, stem: Stem) -> Stem:
        outputs = self._random.choice((2, 3))
        params = self._params([(outputs, stem.shape[1], 3, 3), (outputs,)])
        settings = f'num_output: {outputs} kernel_size: 3 pad: 1 weight_filler {{ type: "xavier" }}'
        top = Stem(self._new("conv"), (BATCH, outputs, *stem.shape[2:]))
        self._layer("Convolution", [stem.name], [top.name], f"{params} convolution_param {{ {settings} }}")
        return top

    def _params(self, shapes: list[Shape]) -> str:
        """The ParamSpecs of parameters of these shapes, some of which are shared or frozen."""
        return " ".join(f"param {{ {self._param(shape)} }}" for shape in shapes)

    def _param(self, shape: Shape) -> str:
        if not self._chance(self._sharing):
            return self._random.choice(("", "", "", "lr_mult: 2 decay_mult: 0", "lr_mult: 0"))
        permissive = len(shape) == 2 and self._chance(0.5)
        name = f"count {np.prod(shape)}" if permissive else f"shape {'x'.join(map(str, shape))}"
        own = "" if name in self._shared else self._random.choice(("", "lr_mult: 0.5"))
        self._shared[name] = permissive
        return f'name: "{name}" {own} {"share_mode: PERMISSIVE" if permissive else ""}'


# -- modes of training -----------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What a training has made.

    Args:
        parameters: in the order of the layers, running statistics not among them.
        scores: of all tests, in their order.
    """

    parameters: Arrays
    scores: Arrays


class Noting:
    """A callback that keeps the parameters after the last iteration, and all scores."""

    def __init__(self) -> None:
        self.outcome = Outcome([], [])

    def after_iteration(self, solver: Solver) -> None:
        if solver.iteration == solver.param.max_iter:
            self.outcome.parameters = parameters_of(solver.net)

    def after_test(self, solver: Solver, scores: list[dict[str, np.ndarray]]) -> None:
        self.outcome.scores += [np.array(values) for net in scores for values in net.values()]


def parameters_of(net: Net) -> Arrays:
    """Copies of the learned parameters."""
    return [one.blob.host_data() for one in net.parameters.parameters if one.layer.type != "BatchNorm"]


def solver_for(net: NamedNet, folder: Path, read: int, drawn: int, **fields: Any) -> caffe_pb2.SolverParameter:
    """The solver of a net for devices that have so many samples."""
    text = WAY_OF_TRAINING % (ITERATIONS, net.solver, folder / f"s{net.seed}")
    param = solver_param(text, net.prototxt(read, drawn))
    for name, value in fields.items():
        setattr(param, name, value)
    return param


def train_alone(net: NamedNet, folder: Path) -> Outcome:
    """One device."""
    note = Noting()
    with CPU.activate():
        solver = create_solver(solver_for(net, folder, BATCH, BATCH), CPU)
        solver.add_callback(note)
        try:
            solver.solve()
        finally:
            solver.close()
    return note.outcome


def train_in_threads(net: NamedNet, folder: Path, count: int) -> Outcome:
    """`caffepy train --cpu-solvers` with so many threads."""
    note = Noting()
    param = solver_for(net, folder, BATCH, BATCH // count)
    P2PManager(
        TrainOptions(param, cpu_solvers=count, threads=1, sync_bn=True, callbacks=[note], check_replicas=1)
    ).run()
    return note.outcome


def train_in_ranks(net: NamedNet, folder: Path, count: int, tcp: bool) -> Outcome:
    """Processes of `caffepy.distributed`, here threads."""

    def work(group: ProcessGroup) -> Outcome:
        note, backend = Noting(), create_backend(None, 1)
        with backend.activate():
            solver = create_solver(solver_for(net, folder, BATCH // count, BATCH // count), backend)
        solver.add_callback(note)
        try:
            DistributedDataParallel(solver, process_group=group, sync_bn=True)
            solver.solve()
        finally:
            solver.close()
        return note.outcome

    run = run_tcp if tcp else run_local
    outcomes = raise_first(run(count, work, timeout=300))
    for other in outcomes[1:]:
        for mine, theirs in zip(outcomes[0].parameters, other.parameters, strict=True):
            np.testing.assert_array_equal(mine, theirs)
    return outcomes[0]


MODES: Mapping[str, Callable[[NamedNet, Path], Outcome]] = {
    "2 threads": lambda net, folder: train_in_threads(net, folder, 2),
    "3 threads": lambda net, folder: train_in_threads(net, folder, 3),
    "2 ranks": lambda net, folder: train_in_ranks(net, folder, 2, tcp=False),
    "3 ranks over TCP": lambda net, folder: train_in_ranks(net, folder, 3, tcp=True),
}


def largest(found: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference of two arrays; numbers that are not finite in both alike count as equal."""
    with np.errstate(invalid="ignore"):
        gaps = np.where((found == wanted) | (np.isnan(found) & np.isnan(wanted)), 0, np.abs(found - wanted))
    return float(np.nan_to_num(gaps, nan=np.inf).max(initial=0))


def worst(found: Arrays, wanted: Arrays, before: Arrays) -> float:
    """The largest difference of parameters, relative to how far training has moved them.

    One that has hardly been moved, such as a bias before BatchNorm, counts as moved by 1% of the one moved farthest.
    """
    moved = [largest(theirs, start) for theirs, start in zip(wanted, before, strict=True)]
    least = max(0.01 * max(moved), 1e-6)
    errors = [largest(mine, theirs) for mine, theirs in zip(found, wanted, strict=True)]
    return max(error / max(way, least) for error, way in zip(errors, moved, strict=True))


def compare_devices(net: NamedNet, folder: Path) -> dict[str, float]:
    """How far each mode is from one device, where it is farther than `TOLERANCE`.

    Raises:
        NonFiniteError: the training diverges.
    """
    with CPU.activate():
        solver = create_solver(solver_for(net, folder, BATCH, BATCH), CPU)
        before = parameters_of(solver.net)
        solver.close()
    wanted = train_alone(net, folder)
    found = {}
    for mode, train in MODES.items():
        outcome = train(net, folder)
        found[mode] = worst(outcome.parameters, wanted.parameters, before)
        pairs = zip(outcome.scores, wanted.scores, strict=True)
        gaps = [largest(a, b) / max(float(np.nan_to_num(np.abs(b)).max()), 1) for a, b in pairs]
        found[f"{mode}, scores"] = max(gaps)
    return {mode: error for mode, error in found.items() if not error <= TOLERANCE}


# -- one device --------------------------------------------------------------------------------------------


def compare_files(net: NamedNet, folder: Path) -> dict[str, float]:
    """Resuming, the plan of memory, test nets, the deploy net, folding and ONNX beside the training itself."""
    found: dict[str, float] = {}
    param = solver_for(net, folder, BATCH, BATCH, snapshot=2)
    with CPU.activate():
        whole = create_solver(param, CPU)
        plan = plan_memory(
            param.net_param, LayerContext(CPU, sample_shapes=sample_shapes(whole.net)), fuse=True, backward=True
        )
        assert plan.arena >= 0
        whole.solve()
        wanted = parameters_of(whole.net)
        resumed = create_solver(solver_for(net, folder, BATCH, BATCH, random_seed=8, snapshot=0), CPU)
        resumed.solve(folder / f"s{net.seed}_iter_2.solverstate")
        found["resumed"] = max(largest(a, b) for a, b in zip(parameters_of(resumed.net), wanted, strict=True))
        found["test net"] = _compare_test_net(whole, folder, net)
        found |= _compare_deploy(whole, folder, net)
        for solver in (whole, resumed):
            solver.close()
    return {what: error for what, error in found.items() if not error <= TOLERANCE}


def _compare_test_net(solver: Solver, folder: Path, net: NamedNet) -> float:
    """Scores with the weights of a file, and those of the training's own test net."""
    path = folder / f"s{net.seed}_iter_{ITERATIONS}.caffemodel"
    param = caffe_pb2.NetParameter()
    param.CopyFrom(solver.param.net_param)
    alone = Net(param, LayerContext(CPU, phase=caffe_pb2.TEST, test_iter=5))
    alone.copy_trained_layers_from(read_weights(path), str(path))
    alone.forward()
    used = Net(param, LayerContext(CPU, phase=caffe_pb2.TEST, test_iter=5))
    used.share_trained_layers_with(solver.net)
    used.forward()
    gaps = [largest(alone.blobs[name].host_data(), blob.host_data()) for name, blob in used.outputs.items()]
    alone.close()
    used.close()
    return max(gaps)


def _compare_deploy(solver: Solver, folder: Path, net: NamedNet) -> dict[str, float]:
    """The deploy net with the file's weights, folded and by ONNX, and the test net's numbers for the same inputs."""
    param = solver.param.net_param
    deploy = plan_deploy(param, {name: DATASETS[name] for name in DATASETS}, BATCH)
    small = deploy_net(param, deploy)
    path = folder / f"deploy{net.seed}.caffemodel"
    write_caffemodel(path, solver.net.name, solver.net.layers)
    plain = Net(small, LayerContext(CPU, phase=caffe_pb2.TEST))
    if any(layer.type == "DummyData" for layer in small.layer):  # it stays, and needs no input
        return {}
    if _learned(small.layer) < _learned(param.layer):  # layers of one name may have no partners then
        try:
            plain.copy_trained_layers_from(read_weights(path), str(path))
        except SnapshotError:
            return {}
    plain.copy_trained_layers_from(read_weights(path), str(path))
    generator = np.random.default_rng(net.seed)
    inputs = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in deploy.inputs.items()}
    for name, values in inputs.items():
        plain.backend.from_host(values, plain.blobs[name].data)
    plain.forward()
    wanted = {name: blob.host_data() for name, blob in plain.outputs.items()}
    whole = Net(param, LayerContext(CPU, phase=caffe_pb2.TEST))
    whole.share_trained_layers_with(solver.net)
    found = {"deploy": _gap(_with_inputs(whole, inputs), {n: b.host_data() for n, b in plain.blobs.items()})}
    model = Model(small, LayerContext(CPU, phase=caffe_pb2.TEST), [(read_weights(path), str(path))])
    found["folded"] = _gap(model(**inputs), wanted)
    found["ONNX"] = _gap(run_model(serialised(to_model(plain)), inputs), wanted)
    merged = fold_batch_norms(with_parameters(small, plain))
    source = Net(merged, LayerContext(CPU, phase=caffe_pb2.TEST))
    source.copy_trained_layers_from(merged, "the folded net")
    found["ONNX, folded"] = _gap(run_model(serialised(to_model(source)), inputs), wanted)
    for one in (plain, whole, source, model):
        one.close()
    return found


def _learned(layers: Iterable[caffe_pb2.LayerParameter]) -> int:
    return sum(layer.type in ("InnerProduct", "Convolution", "Scale", "Bias", "PReLU", "BatchNorm") for layer in layers)


def _with_inputs(net: Net, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The blobs of a net with data layers for given data, behind these layers."""
    net.prepare()
    data = [node for node in net.nodes if not node.bottoms]
    net.forward()
    for name, values in inputs.items():
        net.backend.from_host(values, net.blobs[name].data)
    for node in net.nodes:
        if node not in data:
            net.forward_node(node)
    return {name: blob.host_data() for name, blob in net.blobs.items()}


def _gap(found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> float:
    """The largest difference of arrays of one name, relative to the largest number."""
    gaps = [0.0]
    for name in set(found) & set(wanted):
        size = max(float(np.abs(wanted[name]).max()), 1e-3)
        gaps.append(largest(found[name].reshape(wanted[name].shape), wanted[name]) / size)
    return max(gaps)


# -- the program -------------------------------------------------------------------------------------------


def main() -> int:
    """Try nets from --first on; the exit status is 1 if one of them is not the same in all modes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="how many nets")
    parser.add_argument("--first", type=int, default=0, help="the first one's seed")
    parser.add_argument("--files", type=int, default=4, help="every which net is also resumed, deployed and exported")
    parser.add_argument("--show", action="store_true", help="print each net")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    started, failed, namings = time.monotonic(), 0, Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        source = write_data(Path(name))
        for seed in range(args.first, args.first + args.count):
            net = NamedNet(seed, source)
            namings[net.naming] += 1
            if args.show:
                print(net.solver, net.prototxt(BATCH, BATCH), sep="\n", flush=True)
            try:
                found = compare_devices(net, Path(name))
                if seed % args.files == 0:
                    found |= compare_files(net, Path(name))
            except Exception as error:  # whatever happens belongs to the net's seed
                found = {f"{type(error).__name__}: {error}": np.inf}
            if found:
                failed += 1
                print(f"net {seed} ({net.naming}): {found}", flush=True)
            for path in Path(name).glob(f"*{seed}[._]*"):
                path.unlink()
    named = ", ".join(f"{count} {naming}" for naming, count in sorted(namings.items()))
    print(f"{args.count} nets ({named}), {failed} differ; {time.monotonic() - started:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
