"""Reading nets and solvers, and the layers of a state."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st

from caffepy.errors import ConfigError
from caffepy.formats import load
from caffepy.formats.caffemodel import read_weights
from caffepy.formats.load import filter_net, is_included, meets_rule, net_state, read_net, read_solver
from caffepy.formats.proto.caffe_pb2 import (
    TEST,
    TRAIN,
    BlobProto,
    BlobShape,
    LayerParameter,
    NetParameter,
    NetState,
    NetStateRule,
)


def write(path: Path, data: bytes | str) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def test_a_net_is_read_and_upgraded(tmp_path: Path) -> None:
    path = write(tmp_path / "n.prototxt", 'layers { name: "r" type: RELU }')
    assert read_net(path) == NetParameter(layer=[LayerParameter(name="r", type="ReLU")])


def test_errors_in_a_net_name_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "n.prototxt", "layer {\n  nam: 'x'\n}")
    with pytest.raises(
        ConfigError, match=rf"^{path}:2:3: unknown field 'nam' of LayerParameter; did you mean 'name'\?$"
    ):
        read_net(path)


@pytest.mark.parametrize(("reader", "kind"), [(read_net, "net"), (read_solver, "solver")])
def test_an_absent_prototxt(tmp_path: Path, reader: object, kind: str) -> None:
    with pytest.raises(ConfigError, match=f"absent: no such {kind}; check the path .working directory: "):
        reader(tmp_path / "absent")  # type: ignore[operator]


def test_a_folder_is_not_a_net(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this is a folder; name a net in it"):
        read_net(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permission(tmp_path: Path) -> None:
    path = write(tmp_path / "n", "")
    path.chmod(0)
    with pytest.raises(ConfigError, match="cannot read: Permission denied"):
        read_net(path)


def test_weights_are_not_a_prototxt(tmp_path: Path) -> None:
    blob = BlobProto(shape=BlobShape(dim=[2]), data=[0, 0])
    path = write(tmp_path / "w", NetParameter(layer=[LayerParameter(blobs=[blob])]).SerializeToString())
    with pytest.raises(ConfigError, match="this is a binary file, not a prototxt; give the text definition"):
        read_net(path)


@pytest.mark.parametrize(
    ("written", "expected"),
    [("", "solver"), ('snapshot_prefix: "p/q"', "p/q"), ('snapshot_prefix: "dir"', "dir/solver")],
)
def test_the_snapshot_prefix_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dir").mkdir()
    write(tmp_path / "solver.prototxt", written)
    assert read_solver("solver.prototxt").snapshot_prefix == expected


def test_a_prefix_that_is_not_given_is_beside_the_solver(tmp_path: Path) -> None:
    assert read_solver(write(tmp_path / "s.prototxt", "")).snapshot_prefix == str(tmp_path / "s")


def test_a_net_is_parsed_once_and_each_reader_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    inner = load.parse_text
    monkeypatch.setattr(load, "parse_text", lambda text, *rest: (parsed.append(text), inner(text, *rest))[1])
    path = tmp_path / "net.prototxt"
    path.write_text('name: "once" layer { name: "a" type: "Input" top: "x" }')
    first, second = load.read_net(path), load.read_net(path)
    assert first == second
    first.layer[0].name = "changed"
    assert load.read_net(path) == second
    assert len(parsed) == 1
    path.write_text('name: "twice"')
    assert load.read_net(path).name == "twice"


# -- layers of a state -----------------------------------------------------------------------------------


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


START = 'net: "n" max_iter: 10 base_lr: 0.1 '


def test_a_folder_that_has_been_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(
        ConfigError, match="no such net; check the path .working directory: a folder that has been removed"
    ):
        read_net("net.prototxt")


def test_a_prototxt_of_that_size_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "MAX_TEXT_BYTES", 10)
    (tmp_path / "n").write_text("name: 'longer than that'")
    with pytest.raises(ConfigError, match="more than the 10 that are read; a net's prototxt is shorter"):
        read_net(tmp_path / "n")


def test_a_solver_whose_own_path_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff.prototxt")
    path.write_text(START)
    with pytest.raises(ConfigError, match="this path is not UTF-8; rename the file, or give snapshot_prefix"):
        read_solver(path)


@pytest.mark.parametrize(
    "net",
    [
        NetParameter(layer=[{"name": "d", "type": "Data", "data_param": {"source": "path"}}]),
        NetParameter(layers=[{"name": "d", "type": "DATA", "transform_param": {"mean_file": "path"}}]),
        NetParameter(layers=[{"layer": {"name": "d", "type": "data", "meanfile": "path"}}]),
    ],
    ids=["layer", "V1", "V0"],
)
def test_weights_with_a_path_in_another_encoding(tmp_path: Path, net: NetParameter) -> None:
    (tmp_path / "w").write_bytes(net.SerializeToString().replace(b"path", b"\xd6\xd0\xce\xc4"))
    (layer,) = read_weights(tmp_path / "w").layer
    assert layer.data_param.source + layer.transform_param.mean_file == r"\xd6\xd0\xce\xc4"
