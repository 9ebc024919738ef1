"""`caffepy net --survey`: a folder of nets that caffepy has, lacks and cannot run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from caffepy.cli import survey
from caffepy.cli.main import main
from caffepy.cli.survey import NET, OTHER, SOLVER, Missing, Surveyed, examine, kind_of, run_all

INPUT = 'layer { name: "i" type: "Input" top: "x" input_param { shape { dim: 2 dim: 4 } } }\n'
RELU = 'layer { name: "r" type: "ReLU" bottom: "x" top: "y" }\n'
FORK = INPUT + 'layer { name: "r" type: "ReLU" bottom: "x" top: "y" relu_param { steepness: 2 } }\n'
GLOWING = INPUT + 'layer { name: "g" type: "Glow" bottom: "x" top: "y" glow_param { rate: 2 } }\n'
PROTO = """syntax = "proto2";
message ReLUParameter { optional float negative_slope = 1; optional float steepness = 3 [deprecated = true]; }
message LayerParameter { optional string name = 1; optional string type = 2; repeated string bottom = 3;
  repeated string top = 4; optional ReLUParameter relu_param = 123; }
message NetParameter { optional string name = 1; repeated LayerParameter layer = 100; }
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two repositories: one with a schema of its own."""
    files = {
        "a/good.prototxt": INPUT + RELU,
        "a/copy.prototxt": (INPUT + RELU).replace("dim: 4", "dim: 5"),
        "a/solver.prototxt": 'net: "good.prototxt" base_lr: 0.1 lr_policy: "fixed" max_iter: 5',
        "a/template.prototxt": INPUT.replace("dim: 4", "dim: $WIDTH"),
        "a/label_map.prototxt": 'item { name: "cat" label: 1 }',
        "b/fork.prototxt": FORK,
        "b/glow.prototxt": GLOWING,
        "b/wrong.prototxt": INPUT + RELU.replace('"x"', '"z"') + 'layer { name: "s" type: "Silence" bottom: "y" }',
        "b/src/caffe/proto/caffe.proto": PROTO,
        "b/readme.txt": "nothing",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_the_report(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["net", "--survey", str(folder), "--jobs", "1"]) == 0
    lines = [re.sub(r"\s+", " ", line).strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0].startswith("3 files are refused.")
    remedy = "--ignore-fields ReLUParameter.steepness, or --proto caffe.proto and a --plugin that reads it"
    assert f"1 1 field ReLUParameter.steepness {remedy} b/fork.prototxt" in lines
    assert any(line.startswith("1 1 type Glow caffepy layer-stub Glow --proto caffe.proto") for line in lines)
    assert "1 1 template with placeholders a script fills it in; give the result a/template.prototxt" in lines
    schema = folder / "b/src/caffe/proto/caffe.proto"
    assert f"With --proto {schema} 1 of 1 files that lack fields or values load." in lines
    assert any(line.startswith("1 layer 'r' (ReLU): unknown bottom blob 'z'") for line in lines)
    head = lines.index("folder files other solvers accepted nets load distinct build run")
    assert lines[head + 1 :] == ["a 5 1 1 1 3 2 1 1 1", "b 3 0 0 0 3 1 1 0 0", "all 8 1 1 1 6 3 2 1 1"]


def test_a_field_that_nothing_reads_is_missing_with_the_schema_too(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schema = folder / "b/src/caffe/proto/caffe.proto"
    schema.write_text(PROTO.replace(" [deprecated = true]", ""))
    assert main(["net", "--survey", str(folder / "b"), "--jobs", "1"]) == 0
    assert f"With --proto {schema} 0 of 1 files that lack fields or values load." in capsys.readouterr().out


def test_ignored_fields_open_a_net(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["net", "--survey", str(folder / "b"), "--jobs", "1", "--ignore-fields", "all"]) == 0
    assert "ReLUParameter" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        (INPUT + RELU, []),
        (FORK, [Missing("field", "ReLUParameter.steepness")]),
        (GLOWING, [Missing("type", "Glow")]),
        (GLOWING + FORK, [Missing("type", "Glow"), Missing("field", "ReLUParameter.steepness")]),
        (INPUT + "layers { type: DAZZLE }", [Missing("value", "V1LayerParameter.LayerType.DAZZLE")]),
        ("layer { name: }", [Missing("error", "found '}' where a quoted string is expected")]),
        ("layer { name: 'd' dim: $#size#$ }", [Missing("template", "with placeholders")]),
        ("base_lr: 1 test_iter: 1 haste: 3", [Missing("field", "SolverParameter.haste")]),
        ('base_lr: 1 max_iter: 1 net: "n" type: "Sgdd"', [Missing("error", "unknown solver type 'Sgdd'")]),
        ("layer { name: '\0' }", [Missing("error", "this is a binary file, not a prototxt")]),
    ],
)
def test_what_a_file_lacks(text: str, missing: list[Missing], tmp_path: Path) -> None:
    path = tmp_path / "x.prototxt"
    path.write_text(text)
    assert examine(path).missing == missing


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("layers { name: 'a' }", NET),
        ("name: 'n' layer { }", NET),
        ("base_lr: 0.1", SOLVER),
        ("# layer { }\nmax_iter: 3", SOLVER),
        ("net_param { layer { } } \n base_lr: 1", SOLVER),
        ("item { name: 'a' }", OTHER),
        ("", OTHER),
    ],
)
def test_kinds_of_files(text: str, kind: str) -> None:
    assert kind_of(text) == kind


def test_a_python_layer_whose_module_is_not_there_is_not_run(tmp_path: Path) -> None:
    path = tmp_path / "x.prototxt"
    path.write_text(
        INPUT + 'layer { name: "p" type: "Python" bottom: "x" python_param { module: "stranger" layer: "L" } }'
    )
    (tmp_path / "stranger.py").write_text("raise SystemExit")
    assert examine(path).error == "needs the Python module stranger"


def test_limits_of_a_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nets = [Surveyed(folder / "a/good.prototxt", NET)]
    run_all(nets, None, 1, 0.001)
    assert nets[0].error == "takes longer than 0.001 s"
    large = folder / "a/large.prototxt"
    large.write_text(INPUT.replace("dim: 4", "dim: 1000 dim: 1000000") + RELU)
    monkeypatch.setattr(survey, "MEMORY", 4 * 2**30)
    nets = [Surveyed(large, NET)]
    run_all(nets, None, 1, 60.0)
    assert re.search("memory|GiB", nets[0].error)


@pytest.mark.parametrize("text", ["no/such/folder", "."])
def test_a_folder_without_prototxts(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["net", "--survey", text]) == 2
    assert f"--survey {text}: no " in capsys.readouterr().err
