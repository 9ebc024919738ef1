"""All formats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fuzz import configuration, data, jobs, snapshots

TARGETS: tuple[Callable[[Path], Any], ...] = (
    *configuration.TARGETS, *snapshots.TARGETS, *data.TARGETS, *jobs.TARGETS,
)  # fmt: skip
