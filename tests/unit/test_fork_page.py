"""docs/tutorials/unknown-fork.md: its commands and its layers, with a schema that has the fork's two fields."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from caffepy.cli.main import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tutorials" / "unknown-fork.md").read_text()
LAYERS = dict(
    zip(("scaled_tanh", "scaled_tanh_fast", "gain"), re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL), strict=False)
)
SCHEMA = """
syntax = "proto2";
package caffe;
message LayerParameter { optional string name = 1; optional ScaledTanHParameter scaled_tanh_param = 265; }
message ScaledTanHParameter { required float alpha = 1; required float beta = 2; }
"""
PROTO = "fork/src/caffe/proto/caffe.proto"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reader's folder behind step 4; training is shorter."""
    folder = tmp_path_factory.mktemp("reader")
    shutil.copytree(ROOT / "models" / "lenet", folder / "models" / "lenet", ignore=shutil.ignore_patterns("*_*"))
    for name in ("train_test.prototxt",):
        shutil.copy(ROOT / "models" / "lenet" / name, folder / "models" / "lenet")
    assert main(["data", "mnist", "--subset", "--to", str(folder / "models" / "lenet")]) == 0
    (folder / PROTO).parent.mkdir(parents=True)
    (folder / PROTO).write_text(SCHEMA)
    commands = re.findall(r"(?m)^    (sed .*(?:\n {8}.*)?)", PAGE)
    assert len(commands) == 2
    subprocess.run(["bash", "-e"], input=textwrap.dedent("\n".join(commands)), text=True, cwd=folder, check=True)
    solver = folder / "models" / "lenet" / "tanh_solver.prototxt"
    solver.write_text(re.sub(r"(max_iter|test_interval|display): \d+", r"\1: 30", solver.read_text()))
    for name, text in LAYERS.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def run(folder: Path, *arguments: str, status: int = 0) -> str:
    return run_module(folder, "caffepy", *arguments, status=status)


def run_module(folder: Path, *arguments: str, status: int = 0) -> str:
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=300)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def shown(text: str) -> str:
    """An error of the page as a pattern, whose lines are one and whose ellipsis is anything."""
    (found,) = re.findall(rf"(?m)^    caffepy: error: (.*{re.escape(text)}(?:.*\n)*?.*…)$", PAGE)
    return re.escape(re.sub(r"\s+", " ", found.removesuffix(" …"))).replace(r"\ ", r"\s")


def test_errors_on_the_way(folder: Path) -> None:
    command = ["net", "--solver", "models/lenet/tanh_solver.prototxt"]
    assert re.search(shown("unknown field"), run(folder, *command, status=2))
    assert re.search(shown("unknown layer type"), run(folder, *command, "--proto", PROTO, status=2))


def test_the_stub_and_the_filled_in_layer(folder: Path, tmp_path: Path) -> None:
    """The page's class passes the test that the command writes."""
    shutil.copytree(folder / "fork", tmp_path / "fork")
    run(tmp_path, "layer-stub", "ScaledTanH", "--proto", PROTO)
    assert sorted(path.name for path in tmp_path.glob("*.py")) == ["scaled_tanh.py", "test_scaled_tanh.py"]
    test = ("pytest", "-q", "-p", "no:cacheprovider", "test_scaled_tanh.py")
    assert "fill in forward of ScaledTanH" in run_module(tmp_path, *test, status=1)
    (tmp_path / "scaled_tanh.py").write_text(LAYERS["scaled_tanh"])
    assert "1 passed" in run_module(tmp_path, *test)


def test_the_layer_with_a_parameter(folder: Path) -> None:
    code = (
        "import caffepy, gain, numpy as np\n"
        "x = np.random.default_rng(0).standard_normal((2, 3, 4, 5)).astype(np.float32)\n"
        "(y,) = caffepy.check_gradient('type: \"ChannelGain\"', x)\n"
        "assert np.array_equal(x, y)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_both_layers_train_alike_and_the_weights_are_tested(folder: Path) -> None:
    options = ["--proto", PROTO, "--plugin"]
    scores = []
    for plugin in ("scaled_tanh.py", "scaled_tanh_fast.py"):
        said = run(
            folder, "train", "--solver", "models/lenet/tanh_solver.prototxt", "--cpu", "--overwrite", *options, plugin
        )
        scores.append([float(number) for number in re.findall(r"loss = ([\d.]+) \(", said)])
    assert scores[0] == pytest.approx(scores[1], rel=1e-3)
    assert scores[0][-1] < scores[0][0] / 2
    model = ["--model", "models/lenet/tanh.prototxt", "--weights", "models/lenet/tanh_iter_30.caffemodel"]
    said = run(folder, "test", *model, "--iterations", "15", "--cpu", *options, "scaled_tanh_fast")
    assert float(re.findall(r"(?m)\] loss = ([\d.]+)", said)[-1]) == pytest.approx(scores[1][-1], rel=1e-4)
