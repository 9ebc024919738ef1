"""Plans of cuDNN outlive the process that built them; what is on disk is never trusted and never a reason to fail."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from caffepy.backend.types import Geometry
from caffepy.utils import caches

PACKAGE = "caffepy.backend.cuda.convolution"


@pytest.fixture
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    caches.version_folder.cache_clear()
    yield tmp_path / "caffepy"
    caches.version_folder.cache_clear()


def new_store(device: str = "fake GPU") -> Any:
    return importlib.import_module(f"{PACKAGE}.cache").PlanCache(device)


def the_file(cache_home: Path) -> Path:
    (path,) = cache_home.glob("plans-*/*")
    return path


def test_a_plan_outlives_the_process(cache_home: Path) -> None:
    new_store().write("task a", b"a plan")
    assert new_store().read("task a") == b"a plan"
    assert new_store().read("task b") is None
    assert new_store("another GPU").read("task a") is None
    assert [path.name.startswith(".") for path in cache_home.glob("plans-*/*")] == [False], "no temporary file is left"


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content[:20],
        lambda content: b"",
        lambda content: content + b"x",
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
        lambda content: content.replace(b"1\n", b"2\n"),
    ],
)
def test_a_damaged_file_is_not_used_and_is_replaced(cache_home: Path, damage: Callable[[bytes], bytes]) -> None:
    new_store().write("task", b"a plan")
    path = the_file(cache_home)
    path.write_bytes(damage(path.read_bytes()))
    assert new_store().read("task") is None
    new_store().write("task", b"a plan")
    assert new_store().read("task") == b"a plan"


def test_another_tasks_file_is_not_used(cache_home: Path) -> None:
    new_store().write("task a", b"a plan")
    content = the_file(cache_home).read_bytes()
    new_store().write("task b", b"another plan")
    for path in cache_home.glob("plans-*/*"):
        path.write_bytes(content)
    assert new_store().read("task a") == b"a plan"
    assert new_store().read("task b") is None


def test_a_file_that_is_too_large_is_neither_read_nor_written(
    cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module(f"{PACKAGE}.cache"), "MAX_BYTES", 4)
    new_store().write("task", b"12345")
    assert not list(cache_home.glob("plans-*/*"))
    new_store().write("task", b"1234")
    path = the_file(cache_home)
    path.write_bytes(path.read_bytes() + b"5")
    assert new_store().read("task") is None


def test_a_folder_that_cannot_be_made_is_no_reason_to_stop(cache_home: Path) -> None:
    cache_home.write_text("a file where the folder should be")
    new_store().write("task", b"a plan")
    assert new_store().read("task") is None


class Process:
    """What a process has of its own: a tuner and cuDNN. Candidates' times are those of `times`.

    Args:
        times: microseconds of each engine.
        frontend: cuDNN's.
    """

    def __init__(self, times: dict[str, float], frontend: Any) -> None:
        modules = SimpleNamespace(
            **{n: importlib.import_module(f"{PACKAGE}.{n}") for n in ("autotune", "cache", "plan", "problem")}
        )
        modules.cache._decisions.clear()
        self.frontend = frontend
        self._modules = modules
        scratch = MagicMock()
        self.resources = SimpleNamespace(
            cudnn=frontend, handle=1, scratch=scratch, tf32=False, deterministic=True, plans=new_store()
        )
        self._times = times

    def choose(self, name: str = "cuDNN", width: int = 8, relu: bool = False) -> Any:
        """The candidate for a small forward convolution."""
        problem = self._modules.problem
        shapes = problem.Problem((2, 16, width, width), (16, 16, 3, 3), Geometry((3, 3), (1, 1), (1, 1), (1, 1)))
        task = problem.Task(shapes, problem.Direction.FORWARD, relu=relu)
        every = self._modules.plan.algorithm_families(task, MagicMock(), MagicMock(), self.resources)
        families = [family for family in every if family.name == "cuDNN"]
        tuner = self._modules.autotune.Autotuner(True, "fake GPU")
        return tuner.choose(task, families, None, self.resources)


@pytest.fixture
def process(cupy_or_mock: None, cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Process]:
    """Makes a process; all share the cache folder."""
    from fake_cudnn import Frontend

    # Engines without a time are slow.
    autotune = importlib.import_module(f"{PACKAGE}.autotune")
    times = {"eng0": 3.0, "eng1": 1.0, "eng2": 2.0}

    def attempt(candidate: Any, operands: Any, best: float) -> Any:
        if not candidate.prepare():
            return None
        return autotune.Contender(candidate, times.get(candidate.name.split()[-1], 9.0), MagicMock())

    monkeypatch.setattr(autotune, "_attempt", attempt)
    monkeypatch.setattr(autotune, "measure", lambda contenders: None)
    monkeypatch.setattr(autotune, "operands_for", lambda task, operands: None)
    monkeypatch.setattr(autotune, "is_capturing", lambda: False)

    def new(**frontend: Any) -> Process:
        return Process(times, Frontend(**frontend))

    return new


def chosen_engine(candidate: Any) -> str:
    return str(candidate._graph.graph.executed(candidate.index))


def test_a_later_process_neither_asks_heuristics_nor_builds(process: Callable[..., Process]) -> None:
    first = process()
    assert first.choose().name == "cuDNN eng1"
    assert first.frontend.counts["heuristics"] == 1, "the chosen plan is read, not looked for once more"
    second = process()
    chosen = second.choose()
    assert (chosen.name, chosen_engine(chosen)) == ("cuDNN eng1", "eng1")
    assert second.frontend.counts == {"read": 1}


def test_each_task_has_its_own_plan(process: Callable[..., Process], cache_home: Path) -> None:
    first = process()
    first.choose(width=8)
    first.choose(width=9)
    assert len(list(cache_home.glob("plans-*/*"))) == 2
    second = process()
    second.choose(width=9)
    assert second.frontend.counts == {"read": 1}


def test_a_plan_with_a_relu_is_built_in_each_process(process: Callable[..., Process], cache_home: Path) -> None:
    process().choose(relu=True)
    assert not list(cache_home.glob("plans-*/*")), "read again it would hide NaN"
    second = process()
    assert second.choose(relu=True).name == "cuDNN eng1"
    assert second.frontend.counts["heuristics"] == 1 and "read" not in second.frontend.counts


def test_a_decision_without_a_plan_gets_one(process: Callable[..., Process], cache_home: Path) -> None:
    process().choose()
    the_file(cache_home).unlink()
    second = process()
    assert chosen_engine(second.choose()) == "eng1"
    assert second.frontend.counts == {"heuristics": 1, "builds": 1, "serialised": 1}
    third = process()
    third.choose()
    assert third.frontend.counts == {"read": 1}


def test_what_cudnn_refuses_is_built_anew(process: Callable[..., Process], cache_home: Path) -> None:
    first = process()
    chosen = first.choose()
    first.resources.plans.write(chosen._graph.kept_as(chosen.name), b"not what cuDNN wrote")
    second = process()
    assert chosen_engine(second.choose()) == "eng1"
    assert second.frontend.counts["heuristics"] == 1
    third = process()
    third.choose()
    assert third.frontend.counts == {"read": 1}, "it was replaced"


@pytest.mark.parametrize("field", ["dim", "stride", "data_type", "uid"])
def test_a_plan_of_other_tensors_is_not_used(process: Callable[..., Process], field: str) -> None:
    first = process()
    chosen = first.choose()
    graph = chosen._graph
    tensor = graph.graph.query_tensor_attributes_of_uid(2)
    tensor.values[field] = {"dim": [1], "stride": [1], "data_type": "HALF", "uid": 9}[field]
    first.resources.plans.write(graph.kept_as(chosen.name), bytes(graph.graph.serialize()))
    second = process()
    assert chosen_engine(second.choose()) == "eng1"
    assert second.frontend.counts["heuristics"] == 1


def test_a_plan_that_wants_too_much_memory_is_not_used(process: Callable[..., Process]) -> None:
    process().choose()
    second = process()
    second.frontend.workspace = 2**40
    second.choose()
    assert second.frontend.counts["heuristics"] == 1


def test_plans_that_cudnn_cannot_write_are_built_as_before(process: Callable[..., Process], cache_home: Path) -> None:
    for _ in range(2):
        one = process(serialises=False)
        assert chosen_engine(one.choose()) == "eng1"
        assert one.frontend.counts["read"] == 0
    assert not list(cache_home.glob("plans-*/*"))
