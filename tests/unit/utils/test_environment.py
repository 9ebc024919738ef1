"""Environment variables within a block."""

from __future__ import annotations

import os

import pytest

from caffepy.utils.environment import environment_variable


@pytest.mark.parametrize("before", [None, "", "other"])
def test_the_earlier_value_returns_after_an_error_too(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    monkeypatch.delenv("CAFFEPY_TEST", raising=False)
    if before is not None:
        monkeypatch.setenv("CAFFEPY_TEST", before)
    with pytest.raises(ValueError, match="within"), environment_variable("CAFFEPY_TEST", "inner"):
        assert os.environ["CAFFEPY_TEST"] == "inner"
        raise ValueError("within")
    assert os.environ.get("CAFFEPY_TEST") == before
