"""How durations are shown."""

from __future__ import annotations

import pytest

from caffepy.training.display import duration


@pytest.mark.parametrize("seconds, text", [(0.2, "0s"), (61, "1m 1s"), (7325.4, "2h 2m 5s"), (3600, "1h 0m 0s")])
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text
