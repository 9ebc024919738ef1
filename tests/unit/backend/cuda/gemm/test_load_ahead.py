"""cuBLAS is loaded by a product in a thread; what goes wrong there is nobody's concern."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest

from caffepy.errors import OutOfMemoryError, RunError


@pytest.fixture
def cublas(cupy_or_mock: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    module = importlib.import_module("caffepy.backend.cuda.gemm.cublas")
    monkeypatch.setattr(module, "cupy", MagicMock())
    monkeypatch.setattr(module, "allocate", MagicMock())
    monkeypatch.setattr(module, "Blas", MagicMock())
    module.load_ahead.cache_clear()
    yield module
    module.load_ahead.cache_clear()


def wait_for(thread: Any) -> None:
    thread.join(300)
    assert not thread.is_alive()


def test_each_device_has_one_product(cublas: Any) -> None:
    for device in (0, 1, 0):
        wait_for(cublas.load_ahead(device))
    assert cublas.Blas.return_value.library_gemm.call_count == 2
    assert cublas.Blas.return_value.close.call_count == 2
    assert cublas.cupy.get_default_memory_pool.return_value.free_all_blocks.call_count == 2


@pytest.mark.parametrize(
    "error", [RunError("cuBLAS failed"), OutOfMemoryError("no memory", "wait", 0), RuntimeError("CUDA")]
)
def test_a_failure_is_left_to_those_who_need_products(
    cublas: Any, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    cublas.Blas.return_value.library_gemm.side_effect = error
    with caplog.at_level(logging.DEBUG):
        wait_for(cublas.load_ahead(0))
    assert cublas.Blas.return_value.close.call_count == 1
    assert "cuBLAS is not loaded ahead on GPU 0" in caplog.text
