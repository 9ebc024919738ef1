"""The schema of a process: registered by a call, an option and a variable, in this process and those that it starts."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from caffepy.errors import ConfigError
from caffepy.formats.proto.schemas import fork_schema, register_proto

FORK = """
package caffe;
message LayerParameter {
  optional BlurredParameter blurred_param = 106;  // convolution_param of other Caffes
  optional string note = 103;
  optional int32 rank = 104 [default = 3];
}
message BlurredParameter { optional float alpha = 1 [default = 0.25]; }
message PoolingParameter { enum PoolMethod { MEAN = 0; MAX = 1; MEDIAN = 2; } }
message SolverParameter { optional float wobble = 3000; optional bool test_initialization = 32; }
message NetParameter { optional string owner = 3001; }
message V1LayerParameter { enum LayerType { BLURRED = 999; } optional BlurredParameter blurred_param = 999; }
"""
PLUGIN = """
import caffepy

class Blurred:
    def setup(self, bottom, top):
        print("alpha", self.param.blurred_param.alpha, self.type if hasattr(self, "type") else "")
    def reshape(self, bottom, top):
        top[0].reshape(*bottom[0].shape)
    def forward(self, bottom, top):
        top[0].data[...] = bottom[0].data * self.param.blurred_param.alpha
    def backward(self, top, propagate_down, bottom):
        bottom[0].diff[...] = top[0].diff * self.param.blurred_param.alpha

caffepy.register_layer("Blurred", Blurred)
"""
INPUT = 'layer { name: "d" type: "Input" top: "d" input_param { shape { dim: 1 dim: 2 dim: 4 dim: 4 } } }'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "fork.proto").write_text(FORK)
    (tmp_path / "focal.py").write_text(PLUGIN)
    return tmp_path


def run(folder: Path, *arguments: str, status: int = 0, **variables: str) -> str:
    """The output of a Python process in the folder."""
    environment = {**os.environ, **variables}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=folder, env=environment, timeout=300
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_registered_schema(folder: Path) -> None:
    checks = Path(__file__).with_name("registered_checks.py")
    said = run(folder, str(checks), PYTHONPATH=str(folder))
    assert said.count(" passed\n") == 6


def test_options_of_a_command(folder: Path) -> None:
    (folder / "net.prototxt").write_text(
        INPUT + ' layer { name: "f" type: "Blurred" bottom: "d" top: "f" blurred_param { alpha: 3 } }'
    )
    command = ("-m", "caffepy", "time", "--model", "net.prototxt", "--cpu", "--iterations", "1")
    said = run(folder, *command, "-proto=fork.proto", "--plugin", "focal.py", CAFFEPY_PROTO="other.proto")
    assert "alpha 3.0" in said
    said = run(folder, *command, "--plugin", "focal", CAFFEPY_PROTO=str(folder / "fork.proto"))
    assert "alpha 3.0" in said
    said = run(folder, *command, "--proto", "fork.proto", status=2)
    assert "net.prototxt:1: layer 'f': unknown layer type 'Blurred'; if a Caffe fork" in said
    (folder / "fork.proto").write_text("message M {\n optional X x = 1; }")
    said = run(folder, *command, "--proto", "fork.proto", status=2)
    assert 'fork.proto:2: "X" is not defined' in said
    said = run(folder, *command, status=2, CAFFEPY_PROTO="none.proto")
    assert "caffepy: error: " in said
    assert "none.proto: no such schema (.proto); check the path" in said


def test_it_is_too_late_when_the_schema_is_in_use(folder: Path) -> None:
    importlib.import_module("caffepy.formats.proto.caffe_pb2")
    assert fork_schema() is None
    with pytest.raises(ConfigError, match="schema is in use already; call register_proto before .* set CAFFEPY_PROTO"):
        register_proto(folder / "fork.proto")
    assert "CAFFEPY_PROTO" not in os.environ
