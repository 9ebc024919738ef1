"""Tests of nets that detect objects: mean average precision, on one device and on several, and what is refused."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import pytest
from training import build_solver

from caffepy.data.sharding import Shard
from caffepy.errors import ConfigError
from caffepy.net.graph import Node
from caffepy.training.callback import Action, SingleDevice
from caffepy.training.evaluate import Evaluator
from caffepy.training.solver import Solver

NET = """
name: "detects"
layer { name: "data" type: "DummyData" top: "data" top: "label" include { phase: TRAIN }
  dummy_data_param { shape { dim: 2 dim: 3 } shape { dim: 2 } } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" include { phase: TRAIN }
  inner_product_param { num_output: 2 } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" include { phase: TRAIN } }
layer { name: "det" type: "Input" top: "det" include { phase: TEST }
  input_param { shape { dim: 1 dim: 1 dim: 3 dim: 7 } } }
layer { name: "gt" type: "Input" top: "gt" include { phase: TEST }
  input_param { shape { dim: 1 dim: 1 dim: 2 dim: 8 } } }
layer { name: "eval" type: "DetectionEvaluate" bottom: "det" bottom: "gt" top: "detection_eval"
  include { phase: TEST } detection_evaluate_param { num_classes: 3 } }
"""
PLAIN = 'base_lr: 0.1 lr_policy: "fixed" max_iter: 0 snapshot_after_train: false test_iter: 3 test_interval: 1 '
DETECTION = PLAIN + 'eval_type: "detection" '

FAR, NEAR = (0.6, 0.6, 0.9, 0.9), (0.1, 0.1, 0.5, 0.5)
DETECTIONS = [
    [(0, 1, 0.9, *NEAR), (0, 1, 0.8, *FAR), (0, 2, 0.7, *FAR)],
    [(0, 1, 0.5, *FAR), (0, 1, 0.9, *NEAR), (0, 2, 0.6, *NEAR)],
    [(0, 2, 0.6, *FAR), (0, 2, 0.65, *NEAR), (0, 1, 0.3, *NEAR)],
]
OBJECTS = [[(0, 1, 0, *NEAR, 0), (0, 2, 0, *FAR, 0)]] * 3
"""Class 1, in the order of the scores: hit, hit, miss, miss, hit of 3; class 2: hit, miss, then at 0.6 batch 1's miss
and batch 2's hit, of 3."""
FIRST = 1 / 3 + 1 / 3 + (3 / 5) / 3
SECOND = 1 / 3 + (2 / 4) / 3


def _play(solver: Solver, rank: int = 0, devices: int = 1) -> None:
    """Let the test net's data layers give the batches above, those of this device."""
    net = solver.test_nets[0]
    first, batch = net.schedule[0], iter(range(rank, 3, devices))

    def fill(node: Node) -> None:
        if node is first:
            number = next(batch)
            solver.backend.from_host(np.array(DETECTIONS[number])[None, None], net.blobs["det"].data)
            solver.backend.from_host(np.array(OBJECTS[number])[None, None], net.blobs["gt"].data)

    net.before_forward.append(fill)


def test_the_mean_over_all_classes_and_batches(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "caffepy")
    with build_solver(DETECTION + 'ap_version: "Integral" show_per_class_result: true', NET) as solver:
        _play(solver)
        scores = solver.test_all()
    assert float(scores[0]["detection_eval"]) == pytest.approx((FIRST + SECOND) / 2)
    lines = [record.getMessage() for record in caplog.records]
    assert f"class AP 1: {FIRST:.6g}" in lines
    assert f"class AP 2: {SECOND:.6g}" in lines
    assert f"Test net output mAP #0: detection_eval = {(FIRST + SECOND) / 2:.6g}" in lines


def test_a_class_that_is_never_found_counts_as_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        f"{__name__}.DETECTIONS", [[row if row[1] == 1 else (-1,) * 7 for row in b] for b in DETECTIONS]
    )
    with build_solver(DETECTION, NET.replace("num_classes: 3", "num_classes: 4")) as solver:
        _play(solver)
        scores = solver.test_all()
    assert float(scores[0]["detection_eval"]) == pytest.approx(FIRST / 3)


class _Shared(SingleDevice):
    """Devices that add up what they hand in, as P2PSync's SharedScores do."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._barrier = Barrier(world_size, timeout=300)
        self._given: list[Any] = []

    def sum_over_devices(self, values: Any) -> Any:
        self._given.append(np.array(values))
        self._barrier.wait()
        total = sum(self._given)
        if self._barrier.wait() == 0:
            self._given.clear()
        self._barrier.wait()
        return total


def test_several_devices_give_the_same_score() -> None:
    devices = 2
    shared = _Shared(devices)

    def score(rank: int) -> float:
        shard = Shard(rank, devices)
        with build_solver(DETECTION, NET, shard=shard) as solver:
            _play(solver, rank, devices)
            evaluator = Evaluator(solver.param, solver.net, shard, shared, solver.log, lambda: False)
            scores = evaluator.run(solver.tests[0], solver.param.test_iter[0])
            assert scores is not None
            return float(scores["detection_eval"])

    with ThreadPoolExecutor(devices) as pool:
        found = list(pool.map(score, range(devices)))
    assert found == [pytest.approx((FIRST + SECOND) / 2)] * 2


def test_an_interrupted_test_has_no_score() -> None:
    with build_solver(DETECTION, NET, request=lambda: Action.STOP) as solver:
        assert solver.test_all() == []


def test_a_net_that_does_not_detect_is_refused() -> None:
    net = NET + 'layer { name: "e2" type: "Power" bottom: "data" top: "other" include { phase: TEST } }'
    net = net.replace('top: "label" include { phase: TRAIN }', 'top: "label"')
    with build_solver(DETECTION, net) as solver:
        error = r"the test net's output '\w+' is made by layer '\w+' \(\w+\), not by a DetectionEvaluate layer"
        with pytest.raises(ConfigError, match=error):
            solver.test_all()


def test_detections_have_no_mean() -> None:
    with (
        build_solver(PLAIN, NET) as solver,
        pytest.raises(ConfigError, match=r"layer 'eval' .*write eval_type: \"detection\" in the solver"),
    ):
        solver.test_all()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('eval_type: "detect"', "unknown eval_type 'detect'; known: classification, detection"),
        ('eval_type: "detection" ap_version: "11-point"', "unknown ap_version '11-point'; did you mean '11point'"),
    ],
)
def test_unknown_words(text: str, error: str) -> None:
    from google.protobuf import text_format

    from caffepy.formats.proto.caffe_pb2 import SolverParameter
    from caffepy.training.solver_check import check_solver

    with pytest.raises(ConfigError, match=error):
        check_solver(text_format.Parse(PLAIN + f'net: "n" {text}', SolverParameter()))
