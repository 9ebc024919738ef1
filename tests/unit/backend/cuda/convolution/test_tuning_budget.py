"""How long trying ways to compute convolutions may take."""

from __future__ import annotations

import logging

import pytest

from caffepy.backend.cuda.convolution.autotune_cache import BUDGET, BUDGET_VARIABLE, HASTY, Budget, budget_seconds
from caffepy.errors import ConfigError


def test_few_candidates_are_tried_once_the_budget_is_spent(caplog: pytest.LogCaptureFixture) -> None:
    budget = Budget(3.0)
    with caplog.at_level(logging.INFO):
        budget.spend(2.0)
        assert budget.candidates() is None
        assert not caplog.records
        budget.spend(1.5)
        budget.spend(1.0)
    assert budget.candidates() == HASTY
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "Trying ways to compute convolutions has taken long enough"
    ]


def test_a_budget_of_nothing_is_hasty_from_the_start() -> None:
    assert Budget(0.0).candidates() == HASTY


def test_the_environment_sets_the_seconds() -> None:
    assert budget_seconds({}) == BUDGET
    assert budget_seconds({BUDGET_VARIABLE: "2.5"}) == 2.5
    assert budget_seconds({BUDGET_VARIABLE: "inf"}) == float("inf")


@pytest.mark.parametrize("text", ["soon", "-1", "nan"])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"CAFFEPY_TUNING_SECONDS is '{text}'; set it to the seconds"):
        budget_seconds({BUDGET_VARIABLE: text})
