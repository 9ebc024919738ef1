"""CuPy compiles kernels and keeps them; what is said of it, and what happens where it fails."""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from caffepy.errors import RunError


class CompileError(Exception):
    """CuPy's CompileException."""


@pytest.fixture
def compiler(cupy_or_mock: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, of a process that has compiled nothing."""
    module = importlib.import_module("caffepy.backend.cuda.compiler")
    caches = (module._module, module._function, module.log_first_use)
    monkeypatch.setattr(module._BuildTime, "seconds", 0.0)
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "0")
    for cache in caches:
        cache.cache_clear()
    yield module
    for cache in caches:
        cache.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, compiler: Any, get_function: Callable[[str], Any]) -> None:
    """Let CuPy's modules give kernels by this function."""
    cuda = SimpleNamespace(
        runtime=SimpleNamespace(getDevice=lambda: 0), compiler=SimpleNamespace(CompileException=CompileError)
    )
    cuda.Device = lambda number: nullcontext()
    raw_module = SimpleNamespace(get_function=get_function)
    monkeypatch.setattr(compiler, "cupy", SimpleNamespace(cuda=cuda, RawModule=lambda code, options: raw_module))


def test_a_kernel_that_does_not_compile_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch, compiler: Any) -> None:
    def refuse(name: str) -> Any:
        raise CompileError("kernel.cu(1): error:\n identifier is undefined")

    install(monkeypatch, compiler, refuse)
    with pytest.raises(RunError, match=r"NVRTC cannot compile .*: kernel.cu\(1\): error: identifier is undefined$"):
        compiler.compiled("text", "f")


def test_kernels_that_cannot_be_kept_are_compiled_in_memory(
    monkeypatch: pytest.MonkeyPatch, compiler: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def get_function(name: str) -> str:
        if os.environ["CUPY_CACHE_IN_MEMORY"] == "0":
            raise PermissionError(13, "Permission denied", "/home/user/.cupy")
        return f"kernel {name}"

    install(monkeypatch, compiler, get_function)
    with caplog.at_level(logging.INFO):
        assert compiler.compiled("text", "f") == "kernel f"
        assert compiler.compiled("text", "g") == "kernel g"
    (record,) = caplog.records
    assert "/home/user/.cupy" in record.getMessage()


def test_kernels_are_compiled_at_the_same_time(monkeypatch: pytest.MonkeyPatch, compiler: Any) -> None:
    """Each kernel waits for the other; a third that fails is left to its user."""
    both = threading.Barrier(2, timeout=60)

    def get_function(name: str) -> str:
        if name == "wrong":
            raise CompileError("an error")
        both.wait()
        return name

    install(monkeypatch, compiler, get_function)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(3))
    works = [partial(compiler.compiled, f"text of {name}", name) for name in ("wrong", "first", "second")]
    compiler.compile_side_by_side(works)
    assert [compiler.compiled(f"text of {name}", name) for name in ("first", "second")] == ["first", "second"]
    with pytest.raises(RunError, match="an error"):
        works[0]()


@pytest.mark.parametrize(("seconds", "said"), [(0.001, 0), (0.4, 1)])
def test_only_compiling_is_announced_and_once(
    monkeypatch: pytest.MonkeyPatch, compiler: Any, caplog: pytest.LogCaptureFixture, seconds: float, said: int
) -> None:
    clock = [0.0]

    def get_function(name: str) -> str:
        clock[0] += seconds
        return name

    install(monkeypatch, compiler, get_function)
    monkeypatch.setattr(compiler.time, "monotonic", lambda: clock[0])
    monkeypatch.setenv("CUPY_CACHE_DIR", "/cupys/own")
    with caplog.at_level(logging.INFO):
        for number in range(10):
            compiler.compiled("text", f"kernel{number}")
    assert [record.getMessage().count("/cupys/own") for record in caplog.records] == [1] * said
