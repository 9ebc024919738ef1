"""Random nets of all layer types give the same in all execution modes; tests/support/execution_modes.py tries more."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from caffe_programs import Programs
from compare_nets import differences
from execution_modes import MODES, net_for, persistent
from wide_layers import LOSSES, PAIRS, SINGLE
from wide_nets import WideNet, try_layer

NETS = {"inference": 8, "programs": 8, "training": 8, "onnxruntime": 6, "captured": 6}
"""How many nets of a mode; those of "fused" are in test_fusion_random."""


@pytest.mark.parametrize("mode", NETS)
def test_execution_modes_give_the_same(mode: str) -> None:
    for seed in range(NETS[mode]):
        found = persistent(MODES[mode], WideNet(seed))
        assert not found, (
            f"net {seed} differs: {found}; see it with: "
            f"python tests/support/execution_modes.py --first {seed} --count 1 --modes {mode} --show"
        )


def test_the_nets_hold_every_layer_type() -> None:
    kinds: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    for seed in range(250):
        wide = WideNet(seed)
        param = wide.param()
        kinds.update(layer.type for layer in param.layer)
        seen["in place"] += any(set(layer.top) & set(layer.bottom) for layer in param.layer)
        seen["on inputs"] += wide.overwrites_inputs
        names = Counter(spec.name for layer in param.layer for spec in layer.param if spec.name)
        seen["shared parameters"] += max(names.values(), default=0) > 1
        seen["frozen"] += any(spec.HasField("lr_mult") for layer in param.layer for spec in layer.param)
        seen["propagate_down"] += any(layer.propagate_down for layer in param.layer)
        seen["weighted"] += any(layer.loss_weight and not layer.type.endswith("Loss") for layer in param.layer)
        seen["three axes"] += len(wide.inputs["data"][0]) == 5
        seen["large"] += max(wide.inputs["data"][0]) > 17
    assert {*SINGLE, *PAIRS, *(kind for kind, *_ in LOSSES)} <= kinds.keys()
    assert min(seen.values()) >= 4, seen


def test_a_seed_stands_for_one_net_and_its_numbers() -> None:
    assert WideNet(5).text == WideNet(5).text != WideNet(6).text
    one, same, other = (WideNet(5).values(seed)["data"] for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other)


def test_layers_that_a_net_would_refuse_are_found_out() -> None:
    assert try_layer("type: 'Softmax' softmax_param { axis: 2 }", [(2, 3)], 1) is None
    tried = try_layer("type: 'InnerProduct' inner_product_param { num_output: 4 }", [(2, 3)], 1)
    assert tried is not None and (tried.tops, tried.parameters) == ([(2, 4)], 2)


FAULTS = {
    "inference": ("caffepy.net.executor.ForwardExecutor.parameters_changed", 8),
    "programs": ("caffepy.net.executor.ShapeExecutors.parameters_changed", 155),
    "training": ("caffepy.net.fused_layers.FusedNormalisation._add_to_parameters", 4),
    "fused": ("caffepy.net.fused_layers.FusedNormalisation._add_to_parameters", 0),
}
"""By mode a method, without which only the fast form's numbers are wrong, and a net soon before one that shows it."""


@pytest.mark.parametrize("mode", FAULTS)
def test_a_fault_of_a_fast_mode_is_noticed(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method, first = FAULTS[mode]
    monkeypatch.setattr(method, lambda *_: None)
    assert any(persistent(MODES[mode], net_for(mode, seed)) for seed in range(first, first + 40))


def test_programs_run_on_the_folded_form(tmp_path: Path) -> None:
    folded = 0
    for seed in range(6):
        folder = tmp_path / str(seed)
        folder.mkdir()
        programs = Programs(WideNet(seed), folder)
        assert not programs.run(10)
        folded += programs.folded
    assert folded > 10


def test_differences_see_what_is_missing_and_what_is_no_number() -> None:
    one = np.ones(3)
    assert differences({"a": one}, {"a": one}, "x", 0) == {}
    assert differences({"a": one * 2}, {"a": one}, "x") == {"x: a": 1.0}
    assert differences({"a": one}, {"b": one}, "x") == {"x: a": np.inf, "x: b": np.inf}
    assert differences({"a": one * np.nan}, {"a": one}, "x") == {"x: a": np.inf}
    assert differences({"a": one * (1 + 1e-7)}, {"a": one}, "x") == {}
