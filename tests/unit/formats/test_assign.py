"""`--set`: which fields it changes, and that its errors are those of a prototxt."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caffepy.errors import ConfigError
from caffepy.formats.assign import assign
from caffepy.formats.load import read_solver
from caffepy.formats.paths import PathResolver
from caffepy.formats.proto.caffe_pb2 import FLOAT16, LayerParameter, SolverParameter
from caffepy.formats.prototxt import parse_text

NET = """
layer { name: "data" type: "Data" top: "data" include { phase: TRAIN } data_param { source: "train" batch_size: 8 } }
layer { name: "data" type: "Data" top: "data" include { phase: TEST } data_param { source: "test" batch_size: 8 } }
layer { name: "conv1.a" type: "Convolution" bottom: "data" top: "conv1" convolution_param { num_output: 4 } }
"""
SOLVER = 'base_lr: 0.1 lr_policy: "fixed" max_iter: 5 snapshot_prefix: "x"'


def assigned(*assignments: str, net: str = NET, solver: str = SOLVER) -> SolverParameter:
    param = parse_text(solver, SolverParameter(), "solver")
    parse_text(net, param.net_param, "net")
    assign(param, assignments, PathResolver(None))
    return param


def layers(*assignments: str) -> list[LayerParameter]:
    return list(assigned(*assignments).net_param.layer)


@pytest.mark.parametrize(
    ("assignment", "text"),
    [
        ("base_lr=0.01", "base_lr: 0.01"),
        ("max_iter = 7", "max_iter: 7"),
        ("stepvalue=10,20", "stepvalue: [10, 20]"),
        ("stepvalue=[10, 20]", "stepvalue: [10, 20]"),
        ("stepvalue[1]=30", "stepvalue: 30"),
        ("snapshot_format=HDF5", "snapshot_format: HDF5"),
        ("test_initialization=false", "test_initialization: false"),
        ("lr_policy=step", 'lr_policy: "step"'),
        ('lr_policy="step"', 'lr_policy: "step"'),
        ("weights=a.caffemodel,b=c", 'weights: "a.caffemodel,b=c"'),
        ("snapshot_prefix=wär\"'\\", 'snapshot_prefix: "wär\\"\\\'\\\\"'),
        ("train_state.stage=deep", 'train_state { stage: "deep" }'),
        ("train_state={level: 2}", "train_state { level: 2 }"),
        ("test_state[0].level=3", "test_state { level: 3 }"),
    ],
)
def test_a_field_becomes_what_a_prototxt_would_make_it(assignment: str, text: str) -> None:
    start = "stepvalue: 5 " if "stepvalue[" in assignment else ""
    param = SolverParameter()
    parse_text(start, param, "solver")
    assign(param, [assignment], PathResolver(None))
    assert param == parse_text(start + text, SolverParameter(), "solver")


@given(st.floats(-(2.0**100), 2.0**100, width=32))
def test_numbers_are_read_exactly(number: float) -> None:
    assert assigned(f"base_lr={number!r}").base_lr == number


def test_layers_are_found_by_name_phase_and_index(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "caffepy")
    assert layers("net.layer[conv1.a].convolution_param.num_output=64")[2].convolution_param.num_output == 64
    assert caplog.messages == []
    assert [one.data_param.batch_size for one in layers("net.layer[data].data_param.batch_size=2")] == [2, 2, 0]
    assert "2 fields" in caplog.messages[-1]
    train = layers("net.layer[data,TRAIN].data_param.batch_size=2")
    assert [one.data_param.batch_size for one in train[:2]] == [2, 8]
    assert layers("net.layer[1].data_param.source=other")[1].data_param.source == "other"
    assert [spec.lr_mult for spec in layers("net.layer[2].param[0].lr_mult=0")[2].param] == [0]
    assert assigned("net.default_forward_type=FLOAT16").net_param.default_forward_type == FLOAT16


def test_the_last_of_two_assignments_holds() -> None:
    assert assigned("max_iter=2", "max_iter=3").max_iter == 3


@pytest.mark.parametrize(
    ("assignment", "text"),
    [
        ("base_lr=abc", "found abc where a number is expected"),
        ("base_lrr=1", "unknown field 'base_lrr'.*did you mean 'base_lr'"),
        ("snapshot_format=HDF6", "did you mean 'HDF5'"),
        ("base_lr=1 max_iter: 3", "give one value"),
        ("train_state.level=1 } test_state { level: 2", "give one value"),
        ("base_lr.x=1", "found a block where 'base_lr' takes a value"),
        ("base_lr[0]=1", r"base_lr is no list; leave \[0\] out"),
        ("train_state[0].level=1", r"train_state is no list"),
        ("test_state.level=1", r"test_state is a list; say which one"),
        ("test_state[1].level=1", r"there is no test_state\[1\]"),
        ("stepvalue[2]=1", "stepvalue has 0 elements"),
        ("net.layer[conv].type=x", r"no layer \[conv\]; .*conv1\.a"),
        ("net.layer[3].type=x", r"no layer \[3\]"),
        (f"net.layer[{'9' * 5001}].type=x", r"no layer \[9+"),
        ("net.layer[²].type=x", r"no layer \[²\]"),
        (f"stepvalue[{'9' * 5001}]=1", "stepvalue has 0 elements"),
        ("net.layer[data,TRIAN].type=x", "'TRIAN' is no phase"),
        ("net.layer.type=x", r"layer is a list; say which one, such as layer\[NAME\]"),
        ("net.layer[data].data_param.batch_sise=2", "unknown field 'batch_sise' of DataParameter"),
        ("net.base_lr=2", "'base_lr' is a field of a solver, and a net was expected"),
        ("net.layer[conv1.a]={}", r"replaces the whole layer; set .* layer\[conv1\.a\]\.type, or .*, layer\[2\]"),
        ("net.layer[data,TEST]={}", r"replaces the whole layer; .*, layer\[1\]"),
        ("net.layer[conv]={}", r"no layer \[conv\]; .*conv1\.a"),
        ("net.layer[conv1.a].param[x]={}", r"\[x\] is no number; param has 0 elements, give one from 0 to 0"),
        ("=2", "write a field"),
    ],
)
def test_a_mistake_is_that_of_a_file(assignment: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        assigned(assignment)
    assert str(caught.value).startswith(f"--set {assignment}: ")


def test_nets_in_files_become_part_of_the_solver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "net.prototxt").write_text(NET)
    (folder / "train").mkdir()
    path = folder / "solver.prototxt"
    path.write_text(f'train_net: "net.prototxt" test_net: "net.prototxt" {SOLVER}')
    monkeypatch.chdir(tmp_path)
    param = read_solver(path)
    assign(param, ["net.layer[data].data_param.batch_size=3"], PathResolver(path))
    assert not param.HasField("train_net")
    assert not param.test_net
    for net in (param.train_net_param, *param.test_net_param):
        assert [one.data_param.batch_size for one in net.layer] == [3, 3, 0]
        # A file beside the net's prototxt is found although the net is now part of the solver.
        assert [one.data_param.source for one in net.layer] == [f"{folder}/train", "test", ""]


def test_a_solver_without_net_has_no_fields_of_nets() -> None:
    with pytest.raises(ConfigError, match="names no net"):
        assign(SolverParameter(base_lr=1), ["net.name=x"], PathResolver(None))


def test_a_folder_as_prefix_is_completed(tmp_path: Path) -> None:
    param = parse_text(SOLVER, SolverParameter(), "solver")
    assign(param, [f"snapshot_prefix={tmp_path}"], PathResolver(Path("a/solver.prototxt")))
    assert param.snapshot_prefix == f"{tmp_path}/solver"
