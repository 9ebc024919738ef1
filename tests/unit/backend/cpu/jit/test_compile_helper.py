"""A second process compiles kernels of a pass from its end, and executes none."""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from caffepy.backend.cpu.jit import compile_helper as helper
from caffepy.backend.cpu.jit import compiler
from caffepy.backend.cpu.jit.compile_helper import compile_helper
from caffepy.backend.cpu.jit.kernel import Floats, Int, Kernel

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="no helper is forked there")


def first(begin: Int, end: Int, x: Floats) -> None:
    for i in range(begin, end):
        x[i] = 1


def last(begin: Int, end: Int, x: Floats) -> None:
    for i in range(begin, end):
        x[i] = 2


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of cached kernels."""
    monkeypatch.setattr(compiler, "kernels_folder", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def x() -> np.ndarray:
    """An array whose memory a forked process shares."""
    return np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.float32)


def run(function: Callable[..., None], x: np.ndarray) -> None:
    Kernel(function).run(1, 8, 1, x)


def is_cached(function: Callable[..., None], folder: Path) -> bool:
    return any(function.__name__ in path.name for path in folder.glob("*.nbi"))


def wait_for(what: Callable[[], bool]) -> bool:
    limit = time.monotonic() + 60
    while not what() and time.monotonic() < limit:
        time.sleep(0.01)
    return what()


def test_the_helper_compiles_what_the_pass_has_not_reached_and_executes_nothing(folder: Path, x: np.ndarray):
    with compile_helper(lambda: [partial(run, last, x)]):
        assert not is_cached(last, folder)
        run(first, x)
        assert wait_for(lambda: is_cached(last, folder))
    assert set(x[:8]) == {1}
    assert not helper.compiles_only


def test_a_work_that_fails_or_prints_is_no_reason_to_stop(
    folder: Path, x: np.ndarray, capfd: pytest.CaptureFixture[str]
):
    works = [partial(print, "printed", flush=True), partial(run, None, x), partial(run, last, x)]
    with compile_helper(lambda: works):  # type: ignore[arg-type,return-value]
        run(first, x)
        assert wait_for(lambda: is_cached(last, folder))
    assert capfd.readouterr() == ("", "")


def test_the_helper_ends_with_the_block_or_where_memory_runs_out(x: np.ndarray):
    with compile_helper(lambda: [partial(time.sleep, 600)]):
        run(first, x)
        process = helper._HELPER.process
        assert wait_for(lambda: Path(f"/proc/{process}/oom_score_adj").read_text() == "1000\n")
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_a_program_may_wait_for_its_children(x: np.ndarray):
    with compile_helper(list):
        run(first, x)
        os.waitpid(helper._HELPER.process, 0)


def test_a_pass_whose_kernels_are_cached_starts_no_helper(x: np.ndarray):
    run(first, x)
    with compile_helper(lambda: [partial(run, last, x)]):
        run(first, x)
        assert helper._HELPER.process == 0


def test_kernels_that_cannot_be_cached_start_no_helper(x: np.ndarray, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiler, "kernels_folder", lambda: None)
    with compile_helper(lambda: [partial(run, last, x)]):
        run(first, x)
        assert helper._HELPER.process == 0
