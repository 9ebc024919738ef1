"""Which families of cuDNN's plans there are, and which of them are asked for a decision that is known."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from caffepy.backend.types import Geometry


@pytest.fixture
def modules(cupy_or_mock: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Modules of caffepy.backend.cuda.convolution; CuPy need not be installed. Graphs are only noted."""
    names = ("autotune", "cudnn", "problem", "plan")
    found = {name: importlib.import_module(f"caffepy.backend.cuda.convolution.{name}") for name in names}
    graphs: list[bool] = []

    def plans(graph: Any, kind: Any, prefix: str, kept: str | None = None) -> Any:
        if kept is not None:
            return
        graphs.append(graph.rounded_bias)
        yield SimpleNamespace(name=f"{prefix}engine", prepare=lambda: True)

    monkeypatch.setattr(found["cudnn"], "_plans", plans)
    return SimpleNamespace(**found, graphs=graphs)


def families(modules: Any, dtype: str, **task: bool) -> list[Any]:
    problem = modules.problem.Problem((4, 16, 8, 8), (16, 16, 3, 3), Geometry((3, 3), (1, 1), (1, 1), (1, 1)), dtype)
    wanted = modules.problem.Task(problem, modules.problem.Direction.FORWARD, **task)
    every = modules.plan.algorithm_families(wanted, MagicMock(), MagicMock(), MagicMock())
    return [family for family in every if family.name in ("cuDNN", "cuDNN rounded bias")]


def test_plans_with_a_rounded_bias_are_a_family_of_their_own(modules: Any) -> None:
    both = families(modules, "float16", bias=True)
    assert [[plan.name for plan in family.candidates()] for family in both] == [
        ["cuDNN rounded bias engine"],
        ["cuDNN engine"],
    ]
    assert [family.name for family in both] == ["cuDNN rounded bias", "cuDNN"]
    assert modules.graphs == [True, False]


@pytest.mark.parametrize(("dtype", "bias"), [("float32", True), ("float16", False)])
def test_there_is_one_family_where_there_is_nothing_to_round(modules: Any, dtype: str, bias: bool) -> None:
    (family,) = families(modules, dtype, bias=bias)
    assert [plan.name for plan in family.candidates()] == ["cuDNN engine"]


@pytest.mark.parametrize(("name", "graphs"), [("cuDNN engine", [False]), ("cuDNN rounded bias engine", [True])])
def test_a_known_decision_needs_one_graph(modules: Any, name: str, graphs: list[bool]) -> None:
    found = modules.autotune._find(name, families(modules, "bfloat16", bias=True))
    assert found.name == name
    assert modules.graphs == graphs


def test_plain_depthwise_kernels_are_not_compiled_or_timed_beside_those_with_sums(
    modules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task with sums is compared with cuDNN's first plan."""
    geometry = Geometry((3, 3), (1, 1), (1, 1), (1, 1), 16)
    problem = modules.problem.Problem((4, 16, 8, 8), (16, 1, 3, 3), geometry, "float16")
    task = modules.problem.Task(problem, modules.problem.Direction.FORWARD, sums=True)
    compiled, timed, ran = [], [], []
    resources = MagicMock(compiled=set())

    def choose(wanted: Any, families: Any, *_: Any) -> Any:
        timed.append(wanted)
        return next(family for family in families if family.name == "unfused").candidates()[0]

    resources.tuner.choose = choose
    engine = SimpleNamespace(name="cuDNN engine", prepare=lambda: True, run=ran.append)
    monkeypatch.setattr(modules.plan, "cudnn_candidates", lambda *_, **__: [engine])
    monkeypatch.setattr(modules.plan, "depthwise_candidates", lambda wanted, _: [SimpleNamespace(prepare=wanted)])
    monkeypatch.setattr(modules.plan, "compile_side_by_side", compiled.extend)
    monkeypatch.setattr(modules.plan, "reduce", MagicMock())
    tuned = modules.plan.TunedConvolution(problem, resources, [problem])
    operands = modules.plan.Operands(*(MagicMock() for _ in "xwy"), sums=MagicMock())
    tuned.run(task, operands)
    assert compiled == timed == [task]
    assert len(ran) == 1 and ran[0].sums is None


def test_own_kernels_of_both_gradients_are_compiled_once(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the other gradient with the first; one channel with several outputs is depthwise after a repetition."""
    directions = modules.problem.Direction
    geometry = Geometry((3, 3), (1, 1), (1, 1), (1, 1))
    problem = modules.problem.Problem((4, 1, 8, 8), (16, 1, 3, 3), geometry, "float32")
    compiled: list[Any] = []
    monkeypatch.setattr(modules.plan, "depthwise_candidates", lambda wanted, _: [SimpleNamespace(prepare=wanted)])
    for name in ("suits_small_kernels", "suits_small_k_wgrad", "suits_large_windows", "suits_few_channels"):
        monkeypatch.setattr(modules.plan, name, lambda *_: False)
    monkeypatch.setattr(modules.plan, "compile_side_by_side", compiled.extend)
    tuned = modules.plan.TunedConvolution(problem, MagicMock(compiled=set()), [problem])
    for direction in (directions.DATA, directions.WEIGHTS):
        tuned.candidate(modules.problem.Task(problem, direction), None)
    assert [task.direction for task in compiled] == [directions.DATA, directions.WEIGHTS]
    assert {task.problem.x for task in compiled} == {(4, 16, 8, 8)}
