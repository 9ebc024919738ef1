"""What is logged during a training."""

from __future__ import annotations

import logging
from typing import Any

import pytest


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    """What was logged since the last call."""
    caplog.set_level(logging.INFO, "caffepy")

    def take() -> list[str]:
        taken = [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]
        caplog.clear()
        return taken

    return take
