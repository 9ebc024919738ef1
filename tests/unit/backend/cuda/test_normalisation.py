"""Which kernels the gradients of a batch normalisation are added up by; needs no GPU."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from caffepy.backend.types import BatchNormState


class Placed(np.ndarray):
    """A NumPy array that says where it lies as CuPy's arrays do."""

    @property
    def data(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(ptr=self.ctypes.data)


def placed(values: Any) -> Any:
    return np.ascontiguousarray(values, np.float32).transpose(0, 3, 1, 2).view(Placed)


@dataclass
class FakePlan:
    """Does on the host what the kernel of this name does with the gradients.

    Args:
        file: the kernel's name.
        sources: the constant SOURCES that it is compiled with.
    """

    file: str
    sources: int

    def between_blocks(self, scratch: Any) -> tuple[None, None]:
        return None, None

    def launch(self, *arguments: Any) -> None:
        pointers = {"add_n": 8, "normalise_sums": 4}[self.file]
        assert self.sources <= pointers, f"{self.file} takes {pointers} sources, is launched with {self.sources}"
        if self.file == "add_n":
            sources, destination = arguments[: self.sources], arguments[8]
            assert len(arguments) == 9
        else:
            sources, destination = arguments[1 : 1 + self.sources], arguments[10]
            assert len(arguments) == 15
        destination[...] = sum(np.array(source) for source in sources)


@pytest.fixture
def kernels(cupy_or_mock: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Any]]:
    """`CudaNormalisation`, whose kernels are `FakePlan`s; CuPy need not be installed."""
    before = set(sys.modules)
    found = {name: importlib.import_module(f"caffepy.backend.cuda.{name}") for name in ("normalisation", "elementwise")}
    monkeypatch.setattr(found["normalisation"], "find_layout", lambda *_: None)
    monkeypatch.setattr(found["elementwise"], "flat_layout", lambda *_: None)
    for one in found.values():
        monkeypatch.setattr(one, "make_plan", lambda file, *_, **settings: FakePlan(file, settings["SOURCES"]))

    class Kernels(found["normalisation"].CudaNormalisation, found["elementwise"].CudaElementwise):  # type: ignore[misc]
        _scratch = MagicMock()

    Kernels.__abstractmethods__ = frozenset()
    yield Kernels
    for name in set(sys.modules) - before:
        if name.startswith("caffepy.backend.cuda.backend"):
            del sys.modules[name]


@pytest.mark.parametrize("at", ["own", 0, 1, -1])
@pytest.mark.parametrize("sources", [2, 4, 5, 6, 7, 8, 9, 12, 17])
def test_any_number_of_gradients_are_added_up(kernels: type[Any], sources: int, at: str | int) -> None:
    generator = np.random.default_rng(sources)
    dys = [placed(generator.integers(-9, 9, (2, 4, 5, 3))) for _ in range(sources)]
    wanted = sum(np.array(dy) for dy in dys)
    total = placed(np.full((2, 4, 5, 3), np.nan)) if isinstance(at, str) else dys[at]
    per_channel = [np.zeros(3, np.float32).view(Placed) for _ in range(9)]
    n = BatchNormState(*per_channel[:7], epsilon=1e-5, fraction=0.9)
    x = placed(np.zeros((2, 4, 5, 3)))
    kernels().batch_norm_backward_sums(x, dys, n, per_channel[7:], True, None, total)
    np.testing.assert_array_equal(np.array(total), wanted)


def test_up_to_four_gradients_take_one_launch(kernels: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    normalisation = kernels()
    monkeypatch.setattr(normalisation, "add_n", MagicMock(side_effect=AssertionError("a launch more")))
    arrays = [placed(np.zeros((2, 4, 5, 3))) for _ in range(6)]
    per_channel = [np.zeros(3, np.float32).view(Placed) for _ in range(9)]
    n = BatchNormState(*per_channel[:7], epsilon=1e-5, fraction=0.9)
    normalisation.batch_norm_backward_sums(arrays[0], arrays[1:5], n, per_channel[7:], False, None, arrays[5])
