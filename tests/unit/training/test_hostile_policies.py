"""Policies whose numbers leave what a double can hold."""

from __future__ import annotations

import math

import pytest

from caffepy.errors import ConfigError
from caffepy.formats.proto.caffe_pb2 import SolverParameter
from caffepy.training import policies


@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        ("exp", {"gamma": 1e30}),
        ("step", {"gamma": 1e30, "stepsize": 1}),
        ("inv", {"gamma": 1e30, "power": -30}),
        ("poly", {"power": -1}),
    ],
)
def test_a_rate_beyond_the_largest_double_names_the_fields(policy: str, settings: dict[str, float]) -> None:
    param = SolverParameter(base_lr=0.1, max_iter=50, lr_policy=policy, **settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"lr_policy '{policy}' makes the learning rate of iteration 50 inf"):
        policies.learning_rate(param, 50, 0)


def test_power_is_that_of_c() -> None:
    assert policies.power(1e300, 2) == math.inf
    assert policies.power(0.0, -1) == math.inf
    assert policies.power(2.0, -1) == 0.5
