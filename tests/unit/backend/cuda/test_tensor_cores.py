"""Which GPUs are taken to have the tensor cores that own kernels need."""

from __future__ import annotations

import importlib
from unittest.mock import MagicMock

import pytest


@pytest.mark.parametrize(("capability", "expected"), [("75", False), ("80", True), ("90", True), ("100", True)])
def test_tensor_cores_are_those_of_compute_capability_8_and_later(
    cupy_or_mock: None, monkeypatch: pytest.MonkeyPatch, capability: str, expected: bool
) -> None:
    device = importlib.import_module("caffepy.backend.cuda.device")
    cupy = MagicMock()
    cupy.cuda.Device.return_value.compute_capability = capability
    monkeypatch.setattr(device, "cupy", cupy)
    assert device.has_tensor_cores() is expected
