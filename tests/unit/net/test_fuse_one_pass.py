"""Convolutions that compute both gradients and the sums of the normalisation below in one pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fusion_nets import CPU, DATA, LOSS, build, convolution, norm, relu, run

from caffepy.backend.types import NormalisedBottom
from caffepy.net.fused_layers import FusedNormalisation


class GradientsInOnePass:
    """A convolution that computes both gradients and a normalisation's sums at once, by the parts that there are.

    Args:
        plan: the convolution.
    """

    def __init__(self, plan: Any) -> None:
        self._plan = plan
        self.calls = self.forward_calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)

    def forward_normalised(self, bottom: NormalisedBottom, weights: Any, y: Any, sums: Any) -> None:
        assert sums is None
        self.forward_calls += 1
        x = CPU.zeros(bottom.x.shape)
        CPU.batch_norm_forward(bottom.x, bottom.n, x, None, bottom.relu, None)
        self._plan.forward(x, weights, None, y)

    def backward_normalised(
        self, bottom: NormalisedBottom, dy: Any, weights: Any, dx: Any, dweights: Any, accumulate: bool
    ) -> None:
        self.calls += 1
        y = CPU.zeros(bottom.x.shape)
        CPU.batch_norm_forward(bottom.x, bottom.n, y, None, bottom.relu, None)
        self._plan.backward_weights(y, dy, dweights, accumulate)
        self._plan.backward_data(dy, weights, dx)
        CPU.batch_norm_backward_sums(bottom.x, [dx], bottom.n, bottom.sums, bottom.relu)


SEPARABLE = (
    DATA
    + convolution("a", "data", "a")
    + norm("na", "a", "a")
    + "%s"
    + convolution("b", "a", "b").replace("pad: 1", "pad: 1 group: 8")
    + norm("nb", "b", "b")
    + relu("b")
    + LOSS % "b"
)


@pytest.fixture
def in_one_pass(monkeypatch: pytest.MonkeyPatch) -> list[GradientsInOnePass]:
    """The convolutions that were planned, all of which can compute both gradients at once."""
    planned: list[GradientsInOnePass] = []
    plan = CPU.plan_convolution

    def wrapped(*arguments: Any) -> GradientsInOnePass:
        planned.append(GradientsInOnePass(plan(*arguments)))
        return planned[-1]

    monkeypatch.setattr(CPU, "plan_convolution", wrapped)
    return planned


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("between", [relu("a"), ""])
def test_gradients_in_one_pass_are_those_of_the_single_layers(
    in_one_pass: list[GradientsInOnePass], between: str, passes: int
) -> None:
    ours = run(build(SEPARABLE % between, True), passes)
    assert [(plan.calls, plan.forward_calls) for plan in in_one_pass] == [(0, 0), (passes, passes)]
    for key, values in run(build(SEPARABLE % between, False), passes).items():
        np.testing.assert_allclose(ours[key], values, rtol=2e-4, atol=2e-5, err_msg=key)


def test_a_bottom_that_is_normalised_while_it_is_loaded_is_not_written(in_one_pass: list[GradientsInOnePass]) -> None:
    net = build(SEPARABLE % relu("a"), True)
    written = []
    for node in net.schedule:
        if isinstance(node.layer, FusedNormalisation):
            net.backend.fill(node.tops[0].data, 7.0)
            net.forward()
            written.append(bool((node.tops[0].data != 7.0).any()))
    assert written == [False, True]


@pytest.mark.parametrize(
    "change",
    [
        (convolution("b", "a", "b"), convolution("c", "a", "c") + convolution("b", "a", "b")),  # another reader
        ('name: "b" type', 'name: "b" propagate_down: false type'),
        ('name: "b" type', 'name: "b" param { lr_mult: 0 } type'),
        (relu("a"), relu("a").replace('"ReLU"', '"TanH"')),
        ("bias_term: false", "bias_term: true"),
    ],
)
def test_gradients_are_computed_by_themselves_where_more_is_asked_for(
    in_one_pass: list[GradientsInOnePass], change: tuple[str, str]
) -> None:
    text = (SEPARABLE % relu("a")).replace("pad: 1 group: 8", "pad: 1").replace(*change)
    ours = run(build(text, True), 1)
    assert not any(plan.calls or plan.forward_calls for plan in in_one_pass)
    for key, values in run(build(text, False), 1).items():
        np.testing.assert_allclose(ours[key], values, rtol=2e-4, atol=2e-5, err_msg=key)
