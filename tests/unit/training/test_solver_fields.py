"""Fields of SolverParameter that act: another value gives other weights, another net, other tests or other files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from training import CPU, weights_of

from caffepy.formats.fields import NO_MEANING, REFUSED
from caffepy.formats.load import read_solver
from caffepy.formats.paths import PathResolver
from caffepy.formats.proto import caffe_pb2
from caffepy.formats.upgrade import upgrade_solver
from caffepy.training.solver import Solver, create_solver

NET = """
layer { name: "data" type: "DummyData" top: "data" top: "goal" dummy_data_param {
  shape { dim: 4 dim: 3 } data_filler { type: "gaussian" std: 1 } } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" include { STATE }
  inner_product_param { num_output: OUTPUTS weight_filler { type: "gaussian" std: 1 } } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" exclude { STATE }
  inner_product_param { num_output: 3 bias_term: false weight_filler { type: "gaussian" std: 1 } } }
layer { name: "loss" type: "EuclideanLoss" bottom: "ip" bottom: "goal" top: "loss" }
"""
COMMON = 'base_lr: 0.05 lr_policy: "fixed" random_seed: 3 max_iter: 4 '
STEPS = 'lr_policy: "step" gamma: 0.5 stepsize: 2'
RAMP = "rampup_interval: 3 rampup_lr: 0.01"
POLY = 'momentum: 0.5 momentum_policy: "poly" max_momentum: 0.9 momentum_power: 2'
DECAY = 'weight_decay: 0.1 weight_decay_policy: "poly" max_weight_decay: 0.9 weight_decay_power: 2'
LARC = 'larc: true larc_policy: "scale" larc_eta: 0.5'
STAGES = 'lr_policy: "multifixed" stagelr: 0.01 stagelr: 0.02 stageiter: 1 stageiter: 3'
WARM = "warmup_iter: 3 warmup_start_lr: 0.01"
LARS = "local_lr_auto: true local_gw_ratio: 0.25 weight_decay: 0.1"

WEIGHTS = [
    ("", "base_lr: 0.1"),
    ("", "random_seed: 4"),
    ("", "momentum: 0.9"),
    ("", "weight_decay: 0.2"),
    ("", "clip_gradients: 0.1"),
    ("", "iter_size: 2"),
    ("", 'type: "Nesterov" momentum: 0.9'),
    ("weight_decay: 0.2", 'regularization_type: "L1"'),
    (STEPS, "gamma: 0.1"),
    (STEPS, "stepsize: 1"),
    (STEPS, 'lr_policy: "exp"'),
    ('lr_policy: "inv" gamma: 0.5 power: 1', "power: 2"),
    ('lr_policy: "multistep" gamma: 0.5 stepvalue: 1', "stepvalue: 2"),
    (STEPS, "min_lr: 0.04"),
    (RAMP, "rampup_interval: 2"),
    (RAMP, "rampup_lr: 0.02"),
    (POLY, "max_momentum: 0.95"),
    (POLY, "momentum_power: 1"),
    (POLY, 'momentum_policy: "fixed"'),
    (DECAY, "max_weight_decay: 0.5"),
    (DECAY, "weight_decay_power: 1"),
    (DECAY, 'weight_decay_policy: "fixed"'),
    (LARC, "larc: false"),
    (LARC, 'larc_policy: "clip"'),
    (LARC, "larc_eta: 0.25"),
    (LARC + " momentum: 0.9", "larc_turbo: true"),
    (STAGES, "stagelr: 0.01 stagelr: 0.03"),
    (STAGES, "stageiter: 2 stageiter: 3"),
    (WARM, "warmup_iter: 2"),
    (WARM, "warmup_start_lr: 0.02"),
    (LARS, "local_lr_auto: false"),
    (LARS, "local_gw_ratio: 0.5"),
    ('type: "Adam"', "momentum2: 0.9"),
    ('type: "Adam"', "delta: 0.1"),
    ('type: "RMSProp"', "rms_decay: 0.5"),
    ("solver_type: ADAGRAD", "solver_type: RMSPROP"),
]
"""Settings, and the value that changes what is learned."""


def net_text(state: str = "phase: TRAIN", outputs: int = 3) -> str:
    return NET.replace("STATE", state).replace("OUTPUTS", str(outputs))


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nets of the same data, in the working directory: with a bias, and without one."""
    monkeypatch.chdir(tmp_path)
    Path("net.prototxt").write_text(net_text())
    Path("other.prototxt").write_text(net_text("phase: TEST"))
    Path("stage.prototxt").write_text(net_text('stage: "deep"'))
    Path("stated.prototxt").write_text('state { stage: "deep" }' + net_text('stage: "deep"'))


def run(text: str, observe: Callable[[Solver], Any], steps: int = 4) -> Any:
    """What is seen of a solver after some iterations."""
    Path("solver.prototxt").write_text(text)
    param = read_solver(Path("solver.prototxt"))
    with CPU.activate():
        solver = create_solver(param, CPU, resolve=PathResolver(Path("solver.prototxt")))
        try:
            solver.step(steps)
            return observe(solver)
        finally:
            solver.close()


def merged(base: str, change: str) -> str:
    """The settings with some of them replaced."""
    param = text_format.Parse(COMMON, caffe_pb2.SolverParameter())
    for text in (base, change):
        other = text_format.Parse(text, caffe_pb2.SolverParameter())
        for field, _ in other.ListFields():
            param.ClearField(field.name)
        param.MergeFrom(other)
    return text_format.MessageToString(param)


def learned(solver: Solver) -> dict[str, bytes]:
    return {name: values.tobytes() for name, values in weights_of(solver.net).items()}


@pytest.mark.parametrize(("base", "change"), WEIGHTS, ids=[change for _, change in WEIGHTS])
def test_another_value_teaches_other_weights(base: str, change: str) -> None:
    net = 'net: "net.prototxt" '
    assert run(net + merged(base, change), learned) != run(net + merged(base, ""), learned)
    field = next(iter(text_format.Parse(change, caffe_pb2.SolverParameter()).ListFields()))[0]
    assert f"SolverParameter.{field.name}" not in {**REFUSED, **NO_MEANING}


def parameters(solver: Solver) -> int:
    return len(solver.net.layers[solver.net.layer_names.index("ip")].blobs)


def blobs_of_test_nets(solver: Solver) -> list[int]:
    return [len(net.layers[net.layer_names.index("ip")].blobs) for net in solver.test_nets]


INLINE = " ".join(net_text().split())
INLINE_OTHER = " ".join(net_text("phase: TEST").split())


@pytest.mark.parametrize(
    ("text", "blobs"),
    [
        ('net: "net.prototxt"', 2),
        ('net: "other.prototxt"', 1),
        ('train_net: "other.prototxt"', 1),
        (f"net_param {{ {INLINE} }}", 2),
        (f"net_param {{ {INLINE_OTHER} }}", 1),
        (f"train_net_param {{ {INLINE_OTHER} }}", 1),
        ('net: "stage.prototxt"', 1),
        ('net: "stated.prototxt"', 2),
        ('net: "stage.prototxt" train_state { stage: "deep" }', 2),
    ],
)
def test_the_train_net_is_the_one_that_is_named(text: str, blobs: int) -> None:
    assert run(COMMON + text, parameters, 1) == blobs


@pytest.mark.parametrize(
    ("text", "blobs"),
    [
        ('net: "stage.prototxt" test_iter: 1', [1]),
        ('train_net: "other.prototxt" test_net: "net.prototxt" test_iter: 1', [1]),
        ('train_net: "other.prototxt" test_iter: 1 test_iter: 2' + 2 * ' test_net: "net.prototxt"', [1, 1]),
        (f'train_net: "other.prototxt" test_net_param {{ {INLINE} }} test_iter: 1', [1]),
        ('net: "stage.prototxt" train_state { stage: "deep" } test_iter: 1 test_state { stage: "deep" }', [2]),
    ],
)
def test_the_test_nets_are_those_that_are_named(text: str, blobs: list[int]) -> None:
    assert run(COMMON + "test_interval: 9 test_initialization: false " + text, blobs_of_test_nets, 1) == blobs


def test_weights_are_where_training_begins() -> None:
    text = COMMON + 'net: "net.prototxt" snapshot_prefix: "x" '
    run(text, lambda solver: solver.snapshot())
    begun = run(text + 'weights: "x_iter_4.caffemodel"', learned, 0)
    assert begun == run(text, learned)
    assert begun != run(text, learned, 0)


def test_the_old_enum_becomes_the_type() -> None:
    param = text_format.Parse("solver_type: ADAM", caffe_pb2.SolverParameter())
    upgrade_solver(param, "solver.prototxt")
    assert param.type == "Adam"
