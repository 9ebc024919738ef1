"""What a net's training asks for was foreseen; arrays without memory lie as NumPy's do."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SUPPORT = Path(__file__).parents[4] / "support"
ROOT = SUPPORT.parents[1]
LAST_RESORTS = ("void im2col(", "#define A_DEPTH_FIRST")
"""Unrolling and, in halves, the small products behind it, for what cuDNN has no plan for: here it has none."""
FOR_CUDNN = ("o0_ = v_x;", "void measure_sums(")
"""What cuDNN's plans need beside themselves."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `foreseen_runs.py` saw."""
    out = tmp_path_factory.mktemp("foreseen") / "runs.json"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(out.parent)}
    command = [sys.executable, str(SUPPORT / "foreseen_runs.py"), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize("kind", ["FLOAT", "FLOAT16", "BFLOAT16"])
def test_every_kernel_of_the_first_iteration_is_foreseen(runs: dict[str, Any], kind: str) -> None:
    run = runs[kind]
    missed = set(run["asked"]) - set(run["foreseen"])
    assert len(run["asked"]) > 40
    assert not [text for text in missed if not any(name in text for name in LAST_RESORTS)]


@pytest.mark.parametrize("kind", ["FLOAT", "FLOAT16", "BFLOAT16"])
def test_nothing_else_is_foreseen(runs: dict[str, Any], kind: str) -> None:
    run = runs[kind]
    needless = set(run["foreseen"]) - set(run["asked"]) - set(run["built"])
    assert not [text for text in needless if not any(name in text for name in FOR_CUDNN)]


@pytest.fixture
def flat(cupy_or_mock: None) -> Any:
    """Makes flat arrays without memory."""
    return importlib.import_module("caffepy.backend.cuda.compilation.foreseen_array").ForeseenArray.flat


def same(array: Any, expected: Any, begin: int, base: Any) -> None:
    """Both lie alike, each behind its own first element."""
    offset = expected.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    assert (array.shape, array.strides, array.dtype) == (expected.shape, expected.strides, expected.dtype)
    assert array.data.ptr - begin == offset
    assert array.flags.c_contiguous == expected.flags.c_contiguous
    assert (array.size, array.ndim, array.nbytes) == (expected.size, expected.ndim, expected.nbytes)


SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(shape=SHAPES, data=st.data())
def test_views_lie_as_those_of_numpy(flat: Any, shape: list[int], data: st.DataObject) -> None:
    base, array = np.zeros(math.prod(shape), np.float16), flat(math.prod(shape), "float16")
    order = data.draw(st.permutations(range(len(shape))))
    key = tuple(slice(data.draw(st.integers(0, size - 1)), size) for size in (shape[axis] for axis in order))
    turned, expected = array.reshape(shape).transpose(*order), base.reshape(shape).transpose(order)
    for result, wanted in ((turned, expected), (turned[key], expected[key]), (turned[0], expected[0, ...])):
        same(result, wanted, array.data.ptr, base)


def test_reshaping_what_has_gaps_gives_another_array(flat: Any) -> None:
    array = flat(24, "float32")
    turned = array.reshape(4, 6).T
    other = turned.reshape(24)
    assert other.strides == (4,)
    assert abs(other.data.ptr - array.data.ptr) > 24 * 4
    assert array[20:].reshape(-1, 2).data.ptr == array.data.ptr + 80
    assert array[4:8].view("uint8").shape == (16,)
    assert array.get().shape == (24,)
