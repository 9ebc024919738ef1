"""What is asked of the hardware for the first lines of the log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from caffepy.training import run_summary as run_log
from caffepy.training.run_summary import Device


@pytest.mark.parametrize(("gpus", "asked"), [(1, 0), (2, 1)])
def test_nvml_is_loaded_only_where_there_are_links(gpus: int, asked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    @contextmanager
    def open_nvml() -> Iterator[None]:
        opened.append(True)
        yield None

    monkeypatch.setattr(run_log, "open_nvml", open_nvml)
    world: Any = SimpleNamespace(rank=0, local_rank=0, machines=["a"])
    devices = [Device(0, "host", "a", f"0000:0{number}:00.0", f"GPU {number}") for number in range(gpus)]
    run_log._own_links(world, devices)
    assert len(opened) == asked
