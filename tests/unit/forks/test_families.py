"""The families of forks are clients: no part needs one, and each can be taken out by deleting its folder."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import import_graph
import pytest

from caffepy.layers.known_types import layer_modules

ROOT = import_graph.ROOT
FORKS = "caffepy.forks"
FAMILIES = sorted(path.parent.name for path in (ROOT / "forks").glob("*/__init__.py"))
SHARED_NAMES = {("yolo", "rcnn")}
"""Families of which one imports another in a function: DetectionLoss is a layer of YOLO and of MS-CNN."""

NET = """
name: "small"
layer { name: "data" type: "DummyData" top: "data" top: "label" dummy_data_param {
  shape { dim: 4 dim: 1 dim: 12 dim: 12 } shape { dim: 4 } data_filler { type: "gaussian" }
  data_filler { type: "constant" value: 1 } } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 4 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "pool" type: "Pooling" bottom: "conv" top: "pool" pooling_param { kernel_size: 2 stride: 2 } }
layer { name: "relu" type: "ReLU" bottom: "pool" top: "pool" }
layer { name: "ip" type: "InnerProduct" bottom: "pool" top: "ip"
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
layer { name: "accuracy" type: "Accuracy" bottom: "ip" bottom: "label" top: "accuracy" include { phase: TEST } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""
DEPLOY = NET.replace(
    NET[NET.index("layer") : NET.index('layer { name: "conv"')],
    'layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 4 dim: 1 dim: 12 dim: 12 } } }\n',
)[: -len(NET[NET.index('layer { name: "accuracy"') :])]

PROGRAM = """
import sys
from importlib.util import find_spec
from pathlib import Path

import caffepy
from caffepy.backend.meta import MetaBackend
from caffepy.errors import ConfigError
from caffepy.export.prepare import Settings, build, inference_net
from caffepy.export.torch.write import to_torch
from caffepy.formats.proto import caffe_pb2
from caffepy.layers import LayerContext
from caffepy.layers.export_rules import ONNX, import_families
from google.protobuf import text_format

family, folder, net, deploy, *types = sys.argv[1:]
assert Path(caffepy.__file__).parents[1] == Path(folder), caffepy.__file__
assert not (Path(folder) / "caffepy" / "forks" / family).exists()

def parse(text):
    return text_format.Parse(text, caffe_pb2.NetParameter())

backend = caffepy.create_backend(None, 1)
solver = caffe_pb2.SolverParameter(
    net_param=parse(net), base_lr=0.1, lr_policy="fixed", max_iter=3, test_iter=[1], test_interval=2, snapshot=0)
with backend.activate():
    solver = caffepy.create_solver(solver, backend)
    solver.step(3)
    assert {"accuracy", "loss"} <= set(solver.test_all()[0])
half = parse("default_forward_type: FLOAT16 default_backward_type: FLOAT16" + net)
half = caffepy.Net(half, LayerContext(MetaBackend(), phase=caffe_pb2.TRAIN))
assert "Cast" in [layer.type for layer in half.layers]
exported = build(inference_net(parse(deploy), Settings()), backend)
to_torch(exported)
if find_spec("onnx"):
    from caffepy.export.onnx.write import serialised, to_model
    assert serialised(to_model(exported))
assert not [name for name in sys.modules if name.startswith("caffepy.forks")]

for kind in types:
    text = deploy + f'layer {{ name: "fork" type: "{kind}" bottom: "ip" top: "fork" }}'
    try:
        build(parse(text), backend)
    except ConfigError as error:
        assert f"'{kind}'" in str(error) and "'fork'" in str(error), error
    else:
        raise AssertionError(f"{kind} is there")
if family == "rcnn":
    loss = 'layer { type: "DetectionLoss" name: "both" bottom: "ip" top: "l" detection_loss_param { cls_num: 2 } }'
    try:
        build(parse(deploy + loss), backend)
    except ConfigError as error:
        assert "'both'" in str(error) and "caffepy.forks.rcnn" in str(error), error
    else:
        raise AssertionError("MS-CNN's loss is there")
import_families()
assert "Mish" in ONNX.functions or family == "mobile"
"""


def family_of(module: str) -> str:
    """`yolo` for caffepy.forks.yolo.boxes; empty outside of the families."""
    parts = module.split(".")
    return parts[2] if module.startswith(f"{FORKS}.") else ""


def importers_of_forks(imports: Iterable[import_graph.Import]) -> list[str]:
    """The modules outside of the families that import one, or the folder of all."""
    return sorted(
        {
            one.importer
            for one in imports
            if f"{one.imported}.".startswith(f"{FORKS}.") and not f"{one.importer}.".startswith(f"{FORKS}.")
        }
    )


def between_families(imports: Iterable[import_graph.Import]) -> list[import_graph.Import]:
    """The imports of one family by another."""
    pairs = ((one, family_of(one.importer), family_of(one.imported)) for one in imports)
    return [one for one, importer, imported in pairs if importer and imported and importer != imported]


def is_in_function(source: str, line: int) -> bool:
    """Whether a line stands in a function."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return any(node.lineno < line <= (node.end_lineno or 0) for node in functions)


def test_nothing_below_or_above_imports_a_family():
    assert not importers_of_forks(import_graph.imports())


def test_families_do_not_import_each_other():
    paths, found = import_graph.module_paths(), between_families(import_graph.imports())
    assert not [one for one in found if not is_in_function(paths[one.importer].read_text(), one.line)]
    assert {(family_of(one.importer), family_of(one.imported)) for one in found} == SHARED_NAMES


def test_the_checks_see_what_they_are_for():
    core = import_graph.Import("caffepy.net.net", "caffepy.forks.yolo.boxes", 1, False)
    within = import_graph.Import("caffepy.forks.yolo.output", "caffepy.forks.yolo.boxes", 1, False)
    across = import_graph.Import("caffepy.forks.yolo.output", "caffepy.forks.rcnn.anchors", 1, False)
    assert importers_of_forks([core, within, across]) == ["caffepy.net.net"]
    assert between_families([core, within, across]) == [across]
    source = "import a\ndef f():\n    import b\n"
    assert [is_in_function(source, line) for line in (1, 3)] == [False, True]


def python(code: str, *arguments: str, folder: Path = ROOT.parent) -> subprocess.CompletedProcess[str]:
    """Run code with the package of a folder; compiled kernels are those of the user's cache."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder, env=environment)


def test_a_net_of_caffe_imports_no_module_of_a_family_but_upgrade():
    code = (
        "import sys, caffepy\n"
        "from caffepy.layers import LayerContext\n"
        "backend = caffepy.create_backend(None, 1)\n"
        "with backend.activate():\n"
        "    net = caffepy.Net(caffepy.read_net(sys.argv[1]), LayerContext(backend, phase=1))\n"
        "assert 'conv1' in net.blobs\n"
        "names = [name.split('.') for name in sys.modules if name.startswith('caffepy.forks.')]\n"
        "print(*{name[3] for name in names if len(name) > 3})"
    )
    result = python(code, str(ROOT.parent / "models" / "lenet" / "deploy.prototxt"))
    assert (result.returncode, result.stdout.strip()) == (0, "upgrade"), result.stderr


def copy_without(family: str, folder: Path) -> Path:
    """Copy the package without a family, by links where the file system has them; return the folder of the copy."""

    def link(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)

    def ignored(where: str, names: list[str]) -> list[str]:
        return [family] if Path(where) == ROOT / "forks" else []

    shutil.copytree(ROOT, folder / ROOT.name, copy_function=link, ignore=ignored)
    return folder


def run_without(family: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Train and export a net of Caffe, and ask for each type of the family, with a copy of the package."""
    types = [kind for kind, module in layer_modules().items() if family_of(module) == family]
    assert types
    return python(PROGRAM, family, str(folder), NET, DEPLOY, *types, folder=folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_can_be_deleted(family: str, tmp_path: Path):
    result = run_without(family, copy_without(family, tmp_path))
    assert result.returncode == 0, result.stderr


def test_a_core_that_needs_a_family_is_found(tmp_path: Path):
    module = copy_without("tensor", tmp_path) / "caffepy" / "layers" / "pooling.py"
    text = module.read_text()
    module.unlink()  # which is a link to the package's own
    module.write_text(f"{text}\nimport caffepy.forks.tensor.rearrange\n")
    result = run_without("tensor", tmp_path)
    assert result.returncode == 1
    assert "No module named 'caffepy.forks.tensor'" in result.stderr
