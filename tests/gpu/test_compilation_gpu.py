"""Kernels from caffepy's own cache of machine code, those that are foreseen, and arrays filled with a number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from training import solver_param

from caffepy.backend import Backend
from caffepy.solvers import create_solver
from caffepy.solvers.execution_options import ExecutionOptions

SOLVER = 'base_lr: 0.1 lr_policy: "fixed" momentum: 0.9 weight_decay: 0.1 clip_gradients: 1 random_seed: 1'
NET = """
layer { name: "data" type: "DummyData" top: "data" top: "label" dummy_data_param {
  shape { dim: 8 dim: 3 dim: 32 dim: 32 } shape { dim: 8 }
  data_filler { type: "gaussian" } data_filler { type: "constant" value: 3 } } }
layer { name: "a" type: "Convolution" bottom: "data" top: "a"
  convolution_param { num_output: 24 kernel_size: 5 stride: 2 weight_filler { type: "xavier" } } }
layer { name: "a_n" type: "BatchNorm" bottom: "a" top: "a" }
layer { name: "a_s" type: "Scale" bottom: "a" top: "a" scale_param { bias_term: true } }
layer { name: "a_r" type: "ReLU" bottom: "a" top: "a" }
layer { name: "p" type: "Pooling" bottom: "a" top: "p" pooling_param { pool: MAX kernel_size: 3 stride: 2 } }
layer { name: "i" type: "InnerProduct" bottom: "p" top: "i"
  inner_product_param { num_output: 7 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "i" bottom: "label" top: "loss" }
"""


def train(backend: Backend, kind: str, iterations: int) -> tuple[Any, ...]:
    types = f"default_forward_type: {kind} default_backward_type: {kind}\n"
    solver = create_solver(solver_param(SOLVER, types + NET), backend, engine=ExecutionOptions())
    solver.step(iterations)
    result = tuple(backend.to_host(blob.data) for layer in solver.net.layers for blob in layer.blobs)
    solver.close()
    return result


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32", "uint8"])
@pytest.mark.parametrize("value", [1.0, 3.0])
def test_fill(backend: Backend, dtype: str, value: float) -> None:
    array = backend.zeros((3, 5, 7, 2), dtype)
    backend.fill(array, value)
    np.testing.assert_array_equal(backend.to_host(array), np.full((3, 5, 7, 2), value))


def test_fill_with_what_has_a_sign_and_what_is_no_number(backend: Backend) -> None:
    for dtype, value in (("int32", -1), ("float32", -0.5), ("float16", np.inf), ("bfloat16", np.nan)):
        array = backend.zeros((17,), dtype)
        backend.fill(array, value)
        np.testing.assert_array_equal(backend.to_host(array), np.full(17, value))
    part = backend.zeros((4, 6))
    backend.fill(part[:, 1:3], 2.0)
    assert backend.to_host(part).sum() == 16.0


def test_kernels_are_compiled_as_cupy_would(backend: Backend) -> None:
    from cupy.cuda import compiler as cupy_compiler

    from caffepy.backend.cuda.compilation.cubins import make_cubin
    from caffepy.backend.cuda.compilation.target import find_target
    from caffepy.backend.cuda.compiler import kernel_text

    target = find_target()
    assert target is not None, "NVRTC is not found"
    text = kernel_text("common") + kernel_text("split_k")
    theirs, _ = cupy_compiler.compile_using_nvrtc(text, ("--std=c++17", "-ftz=true"))
    ours = make_cubin(text, target).read_bytes()
    assert len(ours) == pytest.approx(len(theirs), abs=256)  # the source's name is in it


def test_damaged_machine_code_is_made_anew(backend: Backend) -> None:
    from caffepy.backend.cuda.compilation.cubins import find_cubin, make_cubin
    from caffepy.backend.cuda.compilation.target import find_target
    from caffepy.backend.cuda.compiler import compiled, launch

    target = find_target()
    text = 'extern "C" __global__ void damaged(float *x, int n) { if (threadIdx.x < n) x[threadIdx.x] = 5; }'
    make_cubin(text, target).write_bytes(b"damaged")
    assert find_cubin(text, target) is None
    array = backend.zeros((4,))
    launch(compiled(text, "damaged"), 4, (array, 4))
    assert backend.to_host(array).tolist() == [5.0] * 4


@pytest.mark.parametrize("kind", ["FLOAT", "FLOAT16"])
def test_kernels_of_training_are_foreseen(backend: Backend, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from caffepy.backend.cuda import compiler
    from caffepy.backend.cuda.compilation import foreseeing_backend
    from caffepy.backend.cuda.compilation.cubins import make_cubin

    foreseen: list[str] = []
    asked: list[str] = []
    monkeypatch.setattr(foreseeing_backend, "is_known", lambda *_: False)
    monkeypatch.setattr(compiler, "foresee", lambda text, target: foreseen.append(text))
    monkeypatch.setattr(compiler, "make_cubin", lambda text, target: asked.append(text) or make_cubin(text, target))
    train(backend, kind, 1)
    assert len(set(foreseen)) > 12, "foreseeing ended early: see the log at debug"
    missed = set(asked) - set(foreseen)
    assert len(missed) <= 4, sorted(text[:300] for text in missed)


def test_foreseeing_changes_no_number(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    from caffepy.backend.cuda.compilation import foreseeing_backend

    results = []
    for known in (True, False):
        monkeypatch.setattr(foreseeing_backend, "is_known", lambda *_, known=known: known)
        results.append(train(backend, "FLOAT16", 3))
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)
