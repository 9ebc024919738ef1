from __future__ import annotations

import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st

from caffepy.errors import ConfigError
from caffepy.formats.load import filter_net, is_included, meets_rule, net_state
from caffepy.formats.proto.caffe_pb2 import TEST, TRAIN, LayerParameter, NetParameter, NetState, NetStateRule

NET = text_format.Parse(
    """
    name: "n" force_backward: true
    layer { name: "train" include { phase: TRAIN } }
    layer { name: "test" include { phase: TEST } }
    layer { name: "not_test" exclude { phase: TEST } }
    layer { name: "level" include { min_level: 1 max_level: 2 } }
    layer { name: "stage" include { stage: "a" stage: "b" not_stage: "c" } }
    layer { name: "either" include { stage: "a" } include { phase: TEST } }
    layer { name: "own" phase: TEST }
    layer { name: "always" }
    """,
    NetParameter(),
)


@pytest.mark.parametrize(
    ("state", "kept"),
    [
        (NetState(phase=TRAIN), ["train", "not_test", "own", "always"]),
        (NetState(phase=TEST), ["test", "either", "own", "always"]),
        (NetState(phase=TRAIN, level=1), ["train", "not_test", "level", "own", "always"]),
        (NetState(phase=TRAIN, level=2), ["train", "not_test", "level", "own", "always"]),
        (NetState(phase=TRAIN, level=3), ["train", "not_test", "own", "always"]),
        (NetState(phase=TRAIN, stage=["a"]), ["train", "not_test", "either", "own", "always"]),
        (NetState(phase=TRAIN, stage=["b", "a"]), ["train", "not_test", "stage", "either", "own", "always"]),
        (NetState(phase=TRAIN, stage=["a", "b", "c"]), ["train", "not_test", "either", "own", "always"]),
    ],
)
def test_layers_follow_their_rules(state: NetState, kept: list[str]) -> None:
    assert [layer.name for layer in filter_net(NET, state).layer] == kept


def test_the_rest_of_the_net_is_kept_and_the_original_untouched() -> None:
    before = NetParameter.FromString(NET.SerializeToString())
    filtered = filter_net(NET, NetState(phase=TRAIN, stage=["s"]))
    assert (filtered.name, filtered.force_backward, filtered.state) == ("n", True, NetState(phase=TRAIN, stage=["s"]))
    assert before == NET


def test_layers_get_the_phase_of_the_net_unless_they_have_one() -> None:
    phases = {layer.name: layer.phase for layer in filter_net(NET, NetState(phase=TRAIN)).layer}
    assert phases == {"train": TRAIN, "not_test": TRAIN, "own": TEST, "always": TRAIN}


def test_both_kinds_of_rules_in_one_layer_are_refused() -> None:
    layer = LayerParameter(name="x", include=[NetStateRule()], exclude=[NetStateRule()])
    with pytest.raises(ConfigError, match="layer 'x' has both include and exclude rules; keep one kind"):
        is_included(layer, NetState())


states = st.builds(
    NetState, phase=st.sampled_from([TRAIN, TEST]), level=st.integers(-2, 2), stage=st.lists(st.sampled_from("abc"))
)
rules = st.builds(
    NetStateRule,
    phase=st.sampled_from([TRAIN, TEST]),
    min_level=st.integers(-2, 2),
    stage=st.lists(st.sampled_from("abc"), max_size=2),
    not_stage=st.lists(st.sampled_from("abc"), max_size=2),
)


@given(states, rules)
def test_excluding_is_the_opposite_of_including(state: NetState, rule: NetStateRule) -> None:
    included = is_included(LayerParameter(include=[rule]), state)
    assert included == meets_rule(state, rule)
    assert is_included(LayerParameter(exclude=[rule]), state) != included


@given(states)
def test_an_empty_rule_always_holds(state: NetState) -> None:
    assert meets_rule(state, NetStateRule())


def test_later_states_override_and_stages_add_up() -> None:
    state = net_state(TRAIN, NetState(level=1, stage=["a"]), NetState(level=2, stage=["b"]))
    assert state == NetState(phase=TRAIN, level=2, stage=["a", "b"])
