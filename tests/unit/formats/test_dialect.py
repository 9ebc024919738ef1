"""The net's dialect: what decides it, what overrides it, and that its table is the schemas'."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from training import build_net, build_solver

from caffepy.errors import ConfigError
from caffepy.formats.dialect import NVIDIA_FIELDS, Dialect, choose_dialect, nvidia_field, parse_dialect
from caffepy.formats.proto import caffe_pb2
from caffepy.formats.prototxt import parse_text

WIRE = Path(__file__).parents[2] / "golden" / "wire.json"
PLAIN = 'layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 2 dim: 3 } } }'


def net(text: str) -> caffe_pb2.NetParameter:
    return parse_text(text, caffe_pb2.NetParameter(), "net.prototxt")


@pytest.mark.parametrize(
    "text, field",
    [
        (PLAIN, ""),
        ("default_forward_type: FLOAT16 " + PLAIN, "NetParameter.default_forward_type"),
        (
            PLAIN + 'layer { name: "d" type: "Dropout" dropout_param { random_seed: 1 } }',
            "DropoutParameter.random_seed",
        ),
        (PLAIN + 'layer { name: "p" type: "Permute" permute_param { order: 0 } }', ""),
        ("layer { batch_norm_param { bias_filler { value: 1 } } }", "BatchNormParameter.bias_filler"),
        ("layer { batch_norm_param { bias_filler { value: 1 } filler { value: 1 } } }", ""),
        ("layer { batch_norm_param { engine: MKL2017 } }", ""),
    ],
)
def test_first_field_that_only_nvidia_has(text: str, field: str):
    assert nvidia_field(net(text)) == field


def test_solver_decides_as_well():
    solver = parse_text("larc: true", caffe_pb2.SolverParameter(), "s")
    lines: list[str] = []
    assert choose_dialect([solver, net(PLAIN)], lambda line, *values: lines.append(line % values)) is Dialect.NVIDIA
    assert lines == [
        "Dialect: nvidia, because of SolverParameter.larc, which only NVIDIA Caffe has (--dialect bvlc overrides)"
    ]
    assert choose_dialect([net(PLAIN)]) is Dialect.BVLC


def test_variable_overrides(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CAFFEPY_DIALECT", "NVIDIA")
    assert build_net(PLAIN).context.nvidia
    monkeypatch.setenv("CAFFEPY_DIALECT", "bvlc")
    assert not build_net("default_forward_type: FLOAT " + PLAIN).context.nvidia


def test_unknown_name():
    with pytest.raises(ConfigError, match="CAFFEPY_DIALECT: unknown dialect 'caffe2'; give bvlc or nvidia"):
        parse_dialect("caffe2")


def test_all_nets_of_a_solver_have_one_dialect():
    text = """base_lr: 0.1 lr_policy: "fixed" max_iter: 1 snapshot_after_train: false min_lr: 0.01
        test_iter: 1 test_interval: 1"""
    layers = (
        PLAIN
        + """
        layer { name: "ip" type: "InnerProduct" bottom: "x" top: "ip" inner_product_param { num_output: 2 } }
        layer { name: "loss" type: "EuclideanLoss" bottom: "ip" bottom: "ip" top: "loss" }"""
    )
    with build_solver(text, layers) as solver:
        assert solver.net.context.nvidia
        assert [test.context.nvidia for test in solver.test_nets] == [True]


def test_table_lists_fields_that_nvidia_has_and_bvlc_has_not():
    wire = json.loads(WIRE.read_text())
    bvlc, nvidia = wire["bvlc"]["messages"], wire["nvcaffe"]["messages"]
    for message, fields in NVIDIA_FIELDS.items():
        assert fields <= set(nvidia[message]), message
        assert not fields & set(bvlc.get(message, {})), message
