"""Files for a layer type that the user writes: what they list, that they run, and what their test finds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from caffepy.errors import ConfigError
from caffepy.scaffold.layer_stub import make_stub

SCHEMA = """
syntax = "proto2";
package caffe;
message LayerParameter {
  optional ScaledTanHParameter scaled_tanh_param = 265;
  optional OddParameter odd_param = 266;
}
message ScaledTanHParameter { required float alpha = 1; optional float beta = 2 [default = 0.6667]; }
message OddParameter {
  enum Kind { MAX = 0; AVE = 3; }
  required Kind kind = 1;
  optional Kind other = 2 [default = AVE];
  repeated int32 sizes = 3;
  repeated Kind kinds = 4;
  optional string text = 5 [default = "\\"\\"\\"\\\\"];
  optional FillerParameter filler = 6;
  required bool on = 7;
}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "fork.proto").write_text(SCHEMA)
    return tmp_path


def run(folder: Path, *words: str, status: int = 0) -> str:
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, cwd=folder, timeout=300)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def stub(folder: Path, *words: str, status: int = 0) -> str:
    return run(folder, "caffepy", "layer-stub", *words, "--proto", "fork.proto", status=status)


def test_the_test_says_what_is_missing_until_the_layer_is_filled_in(folder: Path) -> None:
    said = stub(folder, "ScaledTanH")
    assert said.splitlines()[-1] == "test_scaled_tanh.py: then run pytest test_scaled_tanh.py"
    text = (folder / "scaled_tanh.py").read_text()
    assert "alpha  float, required\n        beta   float, default 0.6667\n" in text
    tests = ("pytest", "-q", "-p", "no:cacheprovider", "test_scaled_tanh.py")
    assert "NotImplementedError: fill in forward of ScaledTanH" in run(folder, *tests, status=1)
    param = "self.param.scaled_tanh_param"
    text = text.replace(
        'raise NotImplementedError("fill in forward of ScaledTanH")',
        f"return {param}.alpha * np.tanh({param}.beta * x)",
    )
    (folder / "scaled_tanh.py").write_text(text)
    assert "NotImplementedError: fill in backward of ScaledTanH" in run(folder, *tests, status=1)
    right = f"return dy * {param}.beta * ({param}.alpha - y * y / {param}.alpha)"
    stubbed = 'raise NotImplementedError("fill in backward of ScaledTanH")'
    (folder / "scaled_tanh.py").write_text(text.replace(stubbed, f"{right} * 1.1"))
    assert "the gradient of bottom 0 is wrong" in run(folder, *tests, status=1)
    (folder / "scaled_tanh.py").write_text(text.replace(stubbed, right))
    run(folder, *tests)


def test_settings_of_all_types_and_a_file_elsewhere(folder: Path) -> None:
    (folder / "sub").mkdir()
    stub(folder, "odd", "--output", "sub/odd_one.py")
    text = (folder / "sub" / "odd_one.py").read_text()
    for line in (
        "kind    one of MAX = 0, AVE = 3, required",
        "other   one of MAX = 0, AVE = 3, default AVE",
        "sizes   list of int32",
        "kinds   list of one of MAX = 0, AVE = 3",
        "filler  FillerParameter, default its own defaults",
        "on      bool, required",
    ):
        assert line in text
    assert """default '\\"\\"\\"\\\\\\\\'""" in text
    test = ("pytest", "-q", "-p", "no:cacheprovider", "sub/test_odd_one.py")
    assert "fill in forward of odd" in run(folder, *test, status=1)


def test_a_type_without_settings_of_its_name(folder: Path) -> None:
    said = stub(folder, "Select")
    assert (
        "Select has no settings of its own, or --param FIELD names them: fork.proto has scaled_tanh_param, odd" in said
    )
    assert sorted(os.listdir(folder)) == ["fork.proto", "select_layer.py", "test_select_layer.py"]
    stub(folder, "Other", "--param", "odd_param", "--output", "a.py")
    assert "odd_param { kind: MAX on: true }" in (folder / "test_a.py").read_text()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["ReLU"], "TYPE is 'ReLU', which caffepy or a --plugin has"),
        (["a-b"], "TYPE is 'a-b'; give a layer type of letters and digits"),
        (["class"], "TYPE is 'class'"),
        (["Other", "--param", "x_param"], "--param x_param: LayerParameter has no such message; fork.proto has scaled"),
        (["Other", "--output", "a-b.py"], "--output a-b.py: give a Python file's name"),
        (["Other", "--output", "a.txt"], "--output a.txt: give a Python file's name"),
    ],
)
def test_what_is_refused(folder: Path, words: list[str], error: str) -> None:
    assert error in stub(folder, *words, status=2)
    assert os.listdir(folder) == ["fork.proto"]


def test_without_a_schema_caffepys_own_settings_are_listed() -> None:
    made = make_stub("Interp2", "interp_param")
    assert made.prototxt == 'type: "Interp2" interp_param { }'
    assert "register_proto" not in made.test_text(Path("interp.py"))
    with pytest.raises(ConfigError, match="caffepy has .* and [0-9]+ more"):
        make_stub("Interp2", "no_param")
