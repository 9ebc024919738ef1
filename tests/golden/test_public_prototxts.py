"""Every prototxt in the folder of CAFFEPY_PROTOTXTS, such as checkouts of BVLC/caffe and NVIDIA/caffe, is usable.

Each loads; each net builds, with Input layers in place of its data layers, and runs forward and backward without NaN;
each solver is accepted. They are other people's files, and so are not in this project.
"""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

import pytest
from public_nets import fill_inputs, non_finite_blobs, states_of, without_data

from caffepy.backend import create_backend
from caffepy.config.filter import filter_net, net_state
from caffepy.config.load import read_net, read_solver
from caffepy.config.solver_check import check_solver
from caffepy.config.text import parse_text
from caffepy.layers import LayerContext, layer_class
from caffepy.net import Net
from caffepy.proto import caffe_pb2
from caffepy.solvers.rules import RULES

VARIABLE = "CAFFEPY_PROTOTXTS"
FOLDER = Path(os.environ.get(VARIABLE, ""))
FILES = sorted(FOLDER.rglob("*.prototxt")) if os.environ.get(VARIABLE) else []
OUTSIDE = {"TRT": "runs TensorRT", "Python": "needs a module that is not in the folder"}
"""Layer types whose nets are read but not run, and why."""

pytestmark = pytest.mark.skipif(not FILES, reason=f"{VARIABLE} names no folder with prototxt files")


def kind_of(path: Path) -> str:
    """solver, net or label map."""
    text = path.read_text()
    if re.search(r"^\s*(base_lr|lr_policy)\s*:", text, re.MULTILINE):
        return "solver"
    return "labels" if re.search(r"^\s*item\s*{", text, re.MULTILINE) else "net"


def name_of(path: Path) -> str:
    return str(path.relative_to(FOLDER))


def of_kind(kind: str) -> list[Path]:
    return [path for path in FILES if kind_of(path) == kind]


@pytest.mark.parametrize("path", of_kind("labels"), ids=name_of)
def test_label_map_loads(path: Path):
    assert parse_text(path.read_text(), caffe_pb2.LabelMap(), str(path)).item


@pytest.mark.parametrize("path", of_kind("solver"), ids=name_of)
def test_solver_is_accepted(path: Path):
    param = read_solver(path)
    check_solver(param, str(path))
    RULES.get(param.type, "solver")


@pytest.mark.parametrize("path", of_kind("net"), ids=name_of)
def test_net_loads(path: Path):
    for layer in read_net(path).layer:
        if layer.type not in OUTSIDE:
            layer_class(layer.type)


@pytest.mark.parametrize("path", of_kind("net"), ids=name_of)
def test_net_runs(path: Path):
    param = without_data(path)
    seen, other = set[bytes](), set[str]()
    for phase, stages in states_of(param):
        state = net_state(phase, param.state, caffe_pb2.NetState(stage=stages))
        filtered = filter_net(param, state)
        if outside := {layer.type for layer in filtered.layer if not is_there(layer)}:
            other |= outside
            continue
        has_input = any(layer.type in ("Input", "DummyData") for layer in filtered.layer)
        if has_input and filtered.SerializeToString() not in seen:
            seen.add(filtered.SerializeToString())
            run(param, phase, state)
    if other and not seen:
        pytest.skip(f"{min(other)}: {OUTSIDE[min(other)]}")
    assert seen


def is_there(layer: caffe_pb2.LayerParameter) -> bool:
    """Whether a layer can be made with what is in the folder."""
    if layer.type == "Python":
        try:
            return importlib.util.find_spec(layer.python_param.module) is not None
        except ImportError:
            return False
    return layer.type not in OUTSIDE


def run(param: caffe_pb2.NetParameter, phase: int, state: caffe_pb2.NetState) -> None:
    backend = create_backend()
    with backend.activate():
        net = Net(param, LayerContext(backend, phase=phase), state)
        fill_inputs(net)
        net.clear_param_diffs()
        net.forward()
        net.raise_device_errors()
        net.backward()
        assert not non_finite_blobs(net)
        net.close()
    backend.close()
