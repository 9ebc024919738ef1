"""The CUDA backend's kernels compile under CUDA 12 and 13 and take what they are launched with; needs no GPU."""

from __future__ import annotations

import importlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import kernel_compiler
import pytest
from kernel_compiler import Nvrtc, RecordedKernel

COMPILERS = kernel_compiler.installed()
WITHOUT = "no NVRTC: pip install nvidia-cuda-nvrtc-cu12 nvidia-cuda-nvrtc"


@pytest.fixture(scope="module")
def kernels() -> list[RecordedKernel]:
    """Every kernel that a run of the whole backend asked for."""
    return kernel_compiler.record()


def kind_of(kernel: RecordedKernel) -> str:
    """The kernel's name, and of a formula's kernel the formula: its text is the kernel's own."""
    begin = kernel.text.find("void formula_(")
    return f"{kernel.name} {kernel.text[begin : kernel.text.find('}', begin)] if begin >= 0 else ''}"


def some_of_each(kernels: list[RecordedKernel]) -> list[RecordedKernel]:
    """Of each kernel the variants with the shortest and the longest text; one of each formula, fewer of its sums."""
    kinds: dict[str, list[RecordedKernel]] = {}
    for kernel in sorted(kernels, key=lambda kernel: (len(kernel.text), kernel.text)):
        kinds.setdefault(kind_of(kernel), []).append(kernel)
    chosen = []
    for number, (kind, variants) in enumerate(sorted(kinds.items())):
        if kind.startswith("apply_ ") or (kind.startswith("reduce_ ") and number % 4 == 0):
            chosen.append(variants[number % len(variants)])
        elif not kind.startswith("reduce_ "):
            chosen += variants[:1] if len(variants) == 1 else [variants[0], variants[-1]]
    return chosen


def test_every_kernel_was_asked_for(kernels: list[RecordedKernel]) -> None:
    """A kernel that is new must be run by cuda_runs.py, or nothing would compile it here."""
    declared = kernel_compiler.file_kernels()
    assert len(declared) > 40
    assert declared <= {(file, kernel.name) for kernel in kernels for file in kernel_compiler.files_of(kernel)}


@pytest.mark.parametrize(("net", "most"), [("resnet50", 62), ("efficientnet_b0", 122)])
def test_a_net_needs_few_kernels(net: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the first iteration may compile, with every candidate of every convolution.

    Each text takes NVRTC 0.05 to 1.5 s: sizes of a net belong into arguments.
    """
    monkeypatch.syspath_prepend(kernel_compiler.ROOT / "benchmarks")
    start = importlib.import_module("start")
    start.write_solver(tmp_path, net, 8, start.HALF)
    texts = {kernel.text for kernel in kernel_compiler.record(tmp_path / "net.prototxt")}
    assert most - 20 < len(texts) <= most


@pytest.mark.skipif(not COMPILERS, reason=WITHOUT)
@pytest.mark.parametrize("nvrtc", COMPILERS, ids=lambda nvrtc: f"CUDA {nvrtc.major}")
def test_kernels_compile_and_take_what_they_are_launched_with(nvrtc: Nvrtc, kernels: list[RecordedKernel]) -> None:
    texts: dict[str, list[RecordedKernel]] = {}
    for kernel in some_of_each(kernels):
        texts.setdefault(kernel.text, []).append(kernel)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(lambda same: kernel_compiler.check(nvrtc, same, "compute_80"), texts.values()))


@pytest.mark.skipif(not COMPILERS, reason=WITHOUT)
@pytest.mark.parametrize("nvrtc", COMPILERS, ids=lambda nvrtc: f"CUDA {nvrtc.major}")
def test_machine_code_for_every_supported_gpu(nvrtc: Nvrtc, kernels: list[RecordedKernel]) -> None:
    """Inline assembly is read and shared memory is counted only here; kernels with either are compiled."""
    names = ("gather", "product", "softmax_rows", "normalise_sums", "small_k_wgrad", "large_windows")
    names += ("large_depthwise", "large_depthwise_weights", "few_channels", "all_reduce")
    assembled = [kernel for kernel in some_of_each(kernels) if kernel.name in names]
    assert {kernel.name for kernel in assembled} == set(names)
    for kernel in assembled:
        for architecture in filter(kernel.runs_on, kernel_compiler.architectures(nvrtc)):
            assert nvrtc.compile(kernel.text, architecture, kernel.name)


@pytest.mark.skipif(not COMPILERS, reason=WITHOUT)
def test_what_is_wrong_is_found() -> None:
    nvrtc = COMPILERS[0]
    text = 'extern "C" __global__ void f(float *x, float y, int n, unsigned long long m) { *x = y + n + m; }'
    kernel_compiler.check(nvrtc, [RecordedKernel(text, "f", ((8, 4, 4, 8),))], "compute_80")
    with pytest.raises(AssertionError, match=r"f takes \(8, 4, 4, 8\), was launched with \(8, 4, 4\)"):
        kernel_compiler.check(nvrtc, [RecordedKernel(text, "f", ((8, 4, 4),))], "compute_80")
    with pytest.raises(ValueError, match=r"(?s)g for compute_80 under NVRTC .*identifier \"undefined\" is undefined"):
        nvrtc.compile('extern "C" __global__ void g() { undefined(); }', "compute_80", "g")
