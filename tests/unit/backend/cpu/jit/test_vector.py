"""Kernels hold for every vector width, also those of other processors: the compiler splits what this one lacks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from caffepy.backend.cpu.jit.vector import WIDTH

PROGRAM = """
import llvmlite.binding as binding
import numba

real = binding.get_host_cpu_features
binding.get_host_cpu_features = lambda: {features!r}
from caffepy.backend.cpu.jit import vector as cpu_vector
binding.get_host_cpu_features = real
assert cpu_vector.WIDTH == {width}

from primitive_checks.convolution import check_convolution
from primitive_checks.dense import check_gemm
from caffepy.backend import Geometry, create_backend

backend = create_backend(None, 2)
check_gemm(backend, (10, 1003, 700), (False, False))
check_gemm(backend, (70, 33, 40), (True, False), sliced=True)
geometry = Geometry((3, 3), (2, 1), (1, 0), (1, 1))
check_convolution(backend, (2, 3, 9, 8), 21, geometry)
print("held")
"""


OTHERS = [
    pytest.param(features, width, id=str(width))
    for features, width in (({}, 4), ({"avx": True}, 8), ({"avx": True, "avx512f": True}, 16))
    if width != WIDTH
]
"""This machine's own is what all other tests use."""


@pytest.mark.parametrize("features, width", OTHERS)
def test_other_vector_widths(features: dict[str, bool], width: int, tmp_path: Path) -> None:
    pytest.importorskip("hypothesis")  # of the checks that the program calls
    tests = next(path for path in Path(__file__).parents if path.name == "tests")
    # A cache of its own: the folder's name knows the processor, not what we pretend that it can do.
    environment = os.environ | {
        "XDG_CACHE_HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(tests / "support"), str(tests.parent), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-c", PROGRAM.format(features=features, width=width)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.stdout == "held\n", result.stderr[-3000:]
