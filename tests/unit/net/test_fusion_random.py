"""Random nets compute the same fused and layer by layer; `execution_modes.py --modes fused` tries more of them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from compare_nets import FUSED, build, compare_fused, errors, fusible_param, groups
from execution_modes import persistent
from layer_templates import IN_PLACE
from training import CPU
from wide_layers import FUSIBLE
from wide_nets import fusible_net

from caffepy.net.fused_layers import FusedSum, RectifiedPooling

NETS, PARTS = 200, 8


@pytest.mark.parametrize("part", range(PARTS))
def test_fused_nets_give_what_plain_ones_give(part: int) -> None:
    found: Counter[str] = Counter()
    for seed in range(part, NETS, PARTS):
        wide = fusible_net(seed)
        found.update(groups(build(*fusible_param(wide), CPU, True)))
        worst = persistent(compare_fused, wide)
        assert not worst, (
            f"net {seed} differs: {worst}; see it with: "
            f"python tests/support/execution_modes.py --modes fused --first {seed} --count 1 --show"
        )
    assert sum(found.values()) >= NETS // PARTS // 2, "hardly anything was fused"


def test_the_nets_hold_what_they_are_to_try() -> None:
    kinds: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    for seed in range(NETS):
        param, phase = fusible_param(fusible_net(seed))
        schedule = build(param, phase, CPU, True).schedule
        reading = Counter(bottom for layer in param.layer for bottom in layer.bottom if bottom not in layer.top)
        in_place = Counter(top for layer in param.layer for top in layer.top if top in layer.bottom)
        kinds.update(layer.type for layer in param.layer)
        kinds.update(layer.type + " in place" for layer in param.layer if set(layer.top) & set(layer.bottom))
        names = Counter(spec.name for layer in param.layer for spec in layer.param if spec.name)
        seen["five readers"] += max(reading.values()) >= 5
        seen["chains of four"] += max(in_place.values(), default=0) >= 4
        seen["shared parameters"] += max(names.values(), default=0) >= 2
        seen["propagate_down"] += any(layer.propagate_down for layer in param.layer)
        seen["frozen"] += any(spec.HasField("lr_mult") for layer in param.layer for spec in layer.param)
        seen["force_backward"] += param.force_backward
        seen["sums"] += any(isinstance(node.layer, FusedSum) for node in schedule)
        seen["maxima"] += any(isinstance(node.layer, RectifiedPooling) for node in schedule)
    for kind in IN_PLACE & {*FUSIBLE} - {"Softmax"}:
        assert kinds[kind + " in place"] > 2, kind
    assert min(seen.values()) > 5, seen
    assert kinds["Convolution"] > 100
    assert kinds["InnerProduct"] > 100


def test_errors_are_relative_and_see_what_is_missing() -> None:
    one, nan = np.ones(3), np.array([1.0, np.nan])
    assert errors({"a": one}, {"a": one * 2}) == {"a": 0.5}
    assert errors({"a": one, "b": one}, {"a": one}) == {"a": 0.0, "b": np.inf}
    assert errors({"a": nan}, {"a": nan}) == {"a": 0.0}
    assert errors({"a": nan}, {"a": np.ones(2)}) == {"a": np.inf}
    small = errors({"d a": one * 0, "d b": one}, {"d a": one * FUSED / 200, "d b": one})
    assert small["d a"] < FUSED  # beside a gradient of 1
