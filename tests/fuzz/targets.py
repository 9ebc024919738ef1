"""All formats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fuzz import configuration, data, jobs, onnx_models, snapshots

TARGETS: tuple[Callable[[Path], Any], ...] = (
    *configuration.TARGETS,
    *snapshots.TARGETS,
    *data.TARGETS,
    *jobs.TARGETS,
    *onnx_models.TARGETS,
)
