"""How CPU kernels are compiled, cached and run by several threads at once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import backend_arrays as arrays
import numpy as np
import pytest
from numba import types
from primitive_checks.convolution import check_convolution

from caffepy.backend import Geometry
from caffepy.backend.cpu.backend import CpuBackend
from caffepy.backend.cpu.jit import compiler as cpu_cache
from caffepy.backend.cpu.jit.compiler import PartDispatcher
from caffepy.backend.cpu.jit.deferred import cpu_count
from caffepy.backend.cpu.jit.kernel import (
    Float,
    Floats,
    Int,
    Words,
    device_function,
    exact_function,
    kernel,
)
from caffepy.backend.types import host_address

ROOT = Path(__file__).resolve().parents[5]

TRAIN = """
import sys, threading
for name in {blocked}:
    sys.modules[name] = None
import numpy as np
from caffepy.backend.cpu.backend import CpuBackend
from caffepy.layers.activation import relu
x = np.random.default_rng(0).standard_normal((300, 400), dtype=np.float32)
failures = []
def work():
    backend = CpuBackend(2)
    with backend.activate():
        for _ in range(20):
            y, product = backend.zeros(x.shape), backend.zeros((300, 300))
            backend.apply(relu, (x, 0.0), (y,))
            backend.gemm(x, x, product, transpose_b=True)
            if not (np.array_equal(y, np.maximum(x, 0)) and np.allclose(product, x @ x.T, atol=1e-2)):
                failures.append(1)
workers = [threading.Thread(target=work) for _ in range(3)]
for worker in workers: worker.start()
for worker in workers: worker.join()
import numba
print(numba.threading_layer(), len(failures))
"""


FORK = """
import logging, os, sys, numpy as np
from caffepy.backend.cpu.backend import CpuBackend
from caffepy.backend.cpu.jit.kernel import KernelGraph
from caffepy.layers.activation import relu
x = np.random.default_rng(0).standard_normal((300, 400), dtype=np.float32)
backend = CpuBackend(2)
y, graph = backend.zeros(x.shape), None
def work():
    backend.apply(relu, (x, 0.0), (y,))
def right():
    y[...] = 7
    graph.launch()
    found = np.array_equal(y, np.maximum(x, 0))
    y[...] = 7
    work()
    return found and np.array_equal(y, np.maximum(x, 0))
with backend.activate():
    graph = KernelGraph([work])
    assert right()
    child = os.fork()
    if not child:
        logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
        found = all([right() for _ in range(30)])
        sys.stdout.flush()
        os._exit(0 if found else 3)
    print(os.waitpid(child, 0)[1], right())
"""


def run_python(code: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_solver_threads_share_numba() -> None:
    layer, failures = run_python(TRAIN.format(blocked=[])).split()
    assert layer in {"omp", "tbb"}
    assert failures == "0"


def test_threads_take_turns_where_numba_has_only_its_work_queue() -> None:
    blocked = ["numba.np.ufunc.omppool", "numba.np.ufunc.tbbpool"]
    assert run_python(TRAIN.format(blocked=blocked)).split() == ["workqueue", "0"]


def test_a_threading_layer_that_numba_lacks_is_the_users_mistake() -> None:
    code = "from caffepy.backend.cpu.jit.threads import THREADS\nfrom caffepy.errors import ConfigError\n"
    code += "try: THREADS.run(0, 0, 0, 2)\nexcept ConfigError as error: print(error)\n"
    said = run_python(code, NUMBA_THREADING_LAYER="fastest")
    assert said.startswith("NUMBA_THREADING_LAYER is 'fastest': ") and said.endswith("; unset it\n")


def test_a_forked_process_computes_by_one_thread() -> None:
    """The pool's threads are the parent's alone; GNU's OpenMP ends a child that asks for them."""
    said, ended = run_python(FORK).splitlines()
    assert "was forked from a multithreaded process and computes on one thread; start processes by" in said
    assert ended == "0 True"


def test_second_process_compiles_nothing(tmp_path: Path) -> None:
    code = TRAIN.format(blocked=[])
    run_python(code, XDG_CACHE_HOME=str(tmp_path))
    first = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nb?")}
    report = run_python(code, XDG_CACHE_HOME=str(tmp_path), NUMBA_DEBUG_CACHE="1")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nb?")} == first
    for name in ("relu_flat", "pack", "product_by_rows", "_parallel_loop"):
        assert any(name in path.name for path in first), name
    assert "data loaded" in report
    assert "saved" not in report


def test_works_where_nothing_can_be_cached(tmp_path: Path) -> None:
    code = "from caffepy.backend.cpu.jit.kernel import kernel\n" + (
        'exec(\'def double(begin: "Int", end: "Int", x: "Floats") -> None:\\n'
        "    for i in range(begin, end):\\n        x[i] *= 2\\n')\n"
    )
    code += (
        "import inspect, numpy as np\ninspect.getfile = lambda f: '/nowhere/at_all.py'\n"
        "x = np.ones(5, np.float32)\nkernel(double).run(1, 5, 1, x)\nprint(x.sum())\n"
    )
    assert run_python(code, XDG_CACHE_HOME="/dev/null").strip() == "10.0"


def test_backends_of_one_process_do_not_disturb_each_other() -> None:
    """Scratch memory belongs to one backend, so that solver threads may convolve at the same time."""
    geometry = Geometry((3, 3), (1, 1), (1, 1), (1, 1))
    errors: list[BaseException] = []

    def work(outputs: int) -> None:
        try:
            for _ in range(3):
                check_convolution(CpuBackend(2), (2, 3, 7, 7), outputs, geometry)
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=work, args=(outputs,)) for outputs in (5, 16, 33)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=300)
    assert not errors


@pytest.mark.parametrize("threads", [1, 2])
def test_same_input_same_bits(threads: int) -> None:
    """Also for another number of threads: no sum is divided by threads."""
    x, weights = arrays.normal(1, (5, 6, 19, 19)), arrays.normal(2, (20, 6, 3, 3))
    geometry = Geometry((3, 3), (1, 1), (1, 1), (1, 1))
    results = []
    for count in (1, threads):
        backend = CpuBackend(count)
        plan = backend.plan_convolution(x.shape, weights.shape, geometry)
        on_x, on_weights = arrays.to_device(backend, x), arrays.to_device(backend, weights)
        y, dx, dweights = backend.zeros((5, 20, 19, 19)), backend.zeros(x.shape), backend.zeros(weights.shape)
        plan.forward(on_x, on_weights, None, y)
        plan.backward_data(y, on_weights, dx)
        plan.backward_weights(on_x, y, dweights, accumulate=False)
        product = backend.zeros((361, 361))
        rows = backend.reshaped(y, (100, 361))
        backend.gemm(rows, rows, product, transpose_a=True)
        results.append([backend.to_host(a).tobytes() for a in (y, dx, dweights, product)])
    assert results[0] == results[1]


def test_addresses() -> None:
    for array in (np.zeros(3), np.zeros((4, 5), np.float32).T[1:, 2:], np.zeros((2, 3, 4, 5)).transpose(0, 3, 1, 2)):
        assert host_address(array) == array.__array_interface__["data"][0]


def test_threads_by_default_are_what_the_process_may_use() -> None:
    assert CpuBackend().threads == cpu_count()
    if hasattr(os, "sched_getaffinity"):
        assert cpu_count() == len(os.sched_getaffinity(0))


@exact_function
def _product_less(x: Float, y: Float, z: Float) -> Float:
    return x * y - z


@kernel
def _remainders(begin: Int, end: Int, x: Floats, y: Floats, z: Floats, out: Floats) -> None:
    for i in range(begin, end):
        out[i] = _product_less(x[i], y[i], z[i])


def test_exact_functions_round_the_product_before_they_subtract() -> None:
    rng = np.random.default_rng(0)
    x, y = (rng.uniform(1, 2, 1000).astype(np.float32) for _ in range(2))
    out = np.ones(1000, np.float32)
    _remainders.run(1, 1000, 1000, x, y, x * y, out)
    np.testing.assert_array_equal(out, 0)


@device_function
def _doubled(x: Int) -> Int:
    return 2 * x


@kernel
def _doubles_of(begin: Int, end: Int, x: Words, out: Words) -> None:
    for i in range(begin, end):
        out[i] = _doubled(x[i])


def test_a_kernel_pays_when_it_is_kept_or_has_been_asked_for_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_cache, "kernels_folder", lambda: tmp_path)
    cold, later = (kernel(_doubles_of._function) for _ in range(2))
    assert [cold.should_compile(items, 10) for items in (4, 6, 1)] == [False, False, True]
    x, out = np.arange(5), np.zeros(5, np.int64)
    assert not list(tmp_path.iterdir())
    cold.run(1, 5, 5, x, out)
    assert out.tolist() == [0, 2, 4, 6, 8]
    assert all(path.name.startswith(f"test_kernel.{cold.name}-") for path in tmp_path.iterdir())
    assert later.should_compile(1, 10), "it is in the cache"


def test_what_kernels_call_is_compiled_with_them_alone() -> None:
    """Neither machine code nor wrappers are made of it by itself."""
    assert isinstance(_doubled, PartDispatcher)
    assert all(part.library.get_pointer_to_function(part.fndesc.llvm_func_name) == 0 for part in _parts(_doubled))


def _parts(function: Any) -> list[Any]:
    function.compile((types.int64,))
    parts = list(function.overloads.values())
    assert parts
    return parts
