"""`caffepy.check_gradient`: right and wrong gradients of bottoms and parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from layer_harness import gaussian

import caffepy
from caffepy.errors import ConfigError, RunError


class Doubled:
    """y = 2 w x with a wrong factor in one gradient."""

    factors = 1.0, 1.0

    def parameters(self, x: Any) -> Any:
        return [((), 3.0)]

    def forward(self, x: Any, w: Any) -> Any:
        return 2 * w * x

    def backward(self, x: Any, w: Any, y: Any, dy: Any) -> Any:
        return 2 * w * dy * self.factors[0], (2 * x * dy).sum() * self.factors[1]


@pytest.mark.parametrize(
    ("text", "inputs"),
    [
        ("type: 'TanH'", [gaussian((2, 3))]),
        (
            "type: 'InnerProduct' inner_product_param { num_output: 4 weight_filler { type: 'xavier' } }",
            [gaussian((2, 3))],
        ),
        ("type: 'EuclideanLoss' loss_weight: 3", [gaussian((2, 3)), gaussian((2, 3), 1)]),
        ("type: 'SoftmaxWithLoss'", [gaussian((4, 3)), np.array([0, 2, 1, 1])]),
        ("type: 'Slice' top: 'a' top: 'b'", [gaussian((2, 4))]),
    ],
)
def test_own_layers_have_their_gradients(text: str, inputs: list[Any]) -> None:
    tops = caffepy.check_gradient(text, *inputs)
    assert all(np.isfinite(top).all() for top in tops)


@pytest.mark.parametrize(
    ("factors", "error"),
    [((1.1, 1.0), "bottom 0"), ((1.0, 0.9), "parameter 0"), ((np.nan, 1.0), "bottom 0 is wrong: nan")],
)
def test_a_wrong_gradient_is_named(factors: tuple[float, float], error: str) -> None:
    cls = type("Wrong", (Doubled,), {"factors": factors})
    caffepy.register_layer("GradientCheck1", cls)
    with pytest.raises(RunError, match=rf"layer 'GradientCheck1' \(GradientCheck1\): the gradient of {error}"):
        caffepy.check_gradient("type: 'GradientCheck1'", gaussian((2, 3)))
    caffepy.register_layer("GradientCheck1", Doubled)
    x = gaussian((2, 3))
    (y,) = caffepy.check_gradient("type: 'GradientCheck1'", x)
    assert np.allclose(y, 6 * x)


def test_layers_that_cannot_be_checked() -> None:
    with pytest.raises(ConfigError, match=r"layer 'ArgMax' \(ArgMax\): has no gradient"):
        caffepy.check_gradient("type: 'ArgMax'", gaussian((2, 3)))
    with pytest.raises(ConfigError, match=r"takes 2 bottom blobs, has 1"):
        caffepy.check_gradient("type: 'EuclideanLoss'", gaussian((2, 3)))
