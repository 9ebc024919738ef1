"""Kernels that are compiled in other processes before a net needs them."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from caffepy.backend.cpu import pooling
from caffepy.backend.cpu.backend import CpuBackend, Rehearsal
from caffepy.backend.cpu.elementwise import _apply_flat
from caffepy.backend.cpu.jit import ahead as module
from caffepy.backend.cpu.jit.ahead import CompileAhead, entry_of, recorded_entries, worker_count
from caffepy.backend.types import Geometry
from caffepy.layers.activation.relu import relu


class Entry:
    """A kernel whose compilation is noted."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.recipe: dict[str, Any] | None = {"name": name}
        self._log = log

    @property
    def address(self) -> int:
        """Compiles nothing."""
        self._log.append(self.name)
        return 0


class Worker:
    """A process that compiles when it may."""

    def __init__(self, may: threading.Event, alive: bool = True) -> None:
        self.may, self.alive = may, alive
        self.compiled: list[str] = []
        self.begun = threading.Event()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends nothing."""

    def compile(self, entry: Entry) -> bool:
        """Waits until it may."""
        self.begun.set()
        assert self.may.wait(20)
        self.compiled.append(entry.name)
        return self.alive


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """An empty cache."""
    monkeypatch.setattr(module, "kernels_folder", lambda: tmp_path)


def foreseeing(monkeypatch: pytest.MonkeyPatch, worker: Worker, log: list[str]) -> tuple[CompileAhead, list[Entry]]:
    """Four kernels, of which the first missing one starts a rehearsal that names all."""
    monkeypatch.setattr(module, "_Worker", lambda: worker)
    entries = [Entry(name, log) for name in "abcd"]
    ahead = CompileAhead(lambda: 1)
    ahead.expect(lambda: module.recording.entries.extend(entries))  # type: ignore[union-attr]
    return ahead, entries


@pytest.mark.usefixtures("cold")
def test_a_worker_compiles_the_next_and_whoever_wants_that_helps_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    may, log = threading.Event(), list[str]()
    worker = Worker(may)
    ahead, (a, b, c, d) = foreseeing(monkeypatch, worker, log)
    ahead.wait_for(a)  # its own turn; the worker begins with b
    assert worker.begun.wait(20)
    assert ahead.total() == 4
    release = threading.Timer(0.2, may.set)
    release.start()
    ahead.wait_for(b)
    assert log == ["c", "d"]
    assert worker.compiled == ["b"]
    for entry in (c, d):
        ahead.wait_for(entry)


@pytest.mark.usefixtures("cold")
def test_a_kernel_whose_worker_died_is_compiled_here(monkeypatch: pytest.MonkeyPatch) -> None:
    may, log = threading.Event(), list[str]()
    may.set()
    ahead, entries = foreseeing(monkeypatch, Worker(may, alive=False), log)
    for entry in entries:
        ahead.wait_for(entry)  # returns, and the caller compiles


@pytest.mark.usefixtures("cold")
def test_a_rehearsal_that_fails_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_Worker", lambda: pytest.fail("nothing is to be compiled"))
    ahead = CompileAhead(lambda: 1)

    def rehearse() -> None:
        raise ValueError("a net that cannot be run")

    ahead.expect(rehearse)
    ahead.wait_for(Entry("a", []))
    assert ahead.total() == 1


def test_what_is_in_the_cache_starts_no_rehearsal(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "pooling.a_1234abcd-1.py311.nbi").touch()
    monkeypatch.setattr(module, "kernels_folder", lambda: tmp_path)
    ahead = CompileAhead(lambda: 1)
    ahead.expect(lambda: pytest.fail("rehearsed"))
    ahead.wait_for(Entry("a_1234abcd", []))


def test_the_number_of_processes_can_be_chosen() -> None:
    assert worker_count({module.WORKERS: "0"}) == 0
    assert worker_count({module.WORKERS: "3"}) == 3
    assert 0 <= worker_count({module.WORKERS: "many"}) <= 8


def test_recipes_lead_back_to_the_same_kernels() -> None:
    flat = _apply_flat(relu, (0,))
    for entry in (flat, pooling.max_forward):
        assert entry.recipe is not None
        assert entry_of(entry.recipe) is entry


def test_a_rehearsal_notes_the_kernels_that_a_backend_runs() -> None:
    geometry = Geometry((2, 2), (2, 2), (0, 0), (1, 1))

    def pool(backend: CpuBackend) -> None:
        x, y, mask = (backend.zeros(shape) for shape in ((1, 2, 4, 4), (1, 2, 2, 2), (1, 2, 2, 2)))
        backend.pool_max_forward(x, y, mask.view(np.int32), geometry)
        backend.apply(relu, (y, 0.0), (y,))

    with recorded_entries() as noted:
        pool(Rehearsal(1))
    assert len(noted) == 2
    assert noted[1] is _apply_flat(relu, (0,))
    assert module.recording.entries is None
