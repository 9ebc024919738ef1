"""`caffepy warm-up` runs nets whose data are not there, and later starts compile nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from caffepy.backend.meta import MetaBackend
from caffepy.cli.main import main
from caffepy.cli.nets import record_shapes
from caffepy.formats.proto import caffe_pb2
from caffepy.formats.prototxt import parse_text
from caffepy.layers import LayerContext
from caffepy.net.record_shape import without_data

ROOT = Path(__file__).resolve().parents[3]
SOLVER = """
net: "net.prototxt" base_lr: 0.01 lr_policy: "fixed" momentum: 0.9 max_iter: 5 random_seed: 1 solver_mode: CPU
test_iter: 2 test_interval: 2 snapshot: 1 snapshot_prefix: "written" weights: "absent.caffemodel"
"""
READER = """
layer { name: "train" type: "Data" top: "data" top: "label" include { phase: TRAIN }
  transform_param { scale: 0.00390625 } data_param { source: "mnist_train_lmdb" batch_size: 6 backend: LMDB } }
layer { name: "test" type: "Data" top: "data" top: "label" include { phase: TEST }
  transform_param { scale: 0.00390625 } data_param { source: "mnist_test_lmdb" batch_size: 4 backend: LMDB } }
"""
NET = """
name: "small"
%s
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 10 weight_filler {
  type: "xavier" } } }
layer { name: "relu" type: "ReLU" bottom: "ip" top: "ip" }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""
COMPILING = "Compiling CPU kernels for the first time"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "solver.prototxt").write_text(SOLVER)
    (tmp_path / "net.prototxt").write_text(NET % READER)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def caffepy(folder: Path, *arguments: str) -> str:
    """What a process of its own logs, whose cache is a folder of its own."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "caffepy", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stderr


def kept(folder: Path) -> set[str]:
    """The files of the cache."""
    return {str(path.relative_to(folder)) for path in (folder / "cache").rglob("*") if path.is_file()}


def test_what_warm_up_compiles_training_does_not(folder: Path) -> None:
    before = set(folder.iterdir())
    log = caffepy(folder, "warm-up", "--solver", "solver.prototxt", "--shape", "1,28,28")
    assert log.count(COMPILING) == 1
    assert re.search(r"Later starts .* use the caches in .*/cache/caffepy\n", log)
    assert set(folder.iterdir()) - before == {folder / "cache"}, "neither data nor snapshots"
    files = kept(folder)
    assert len(files) > 8
    caffepy(folder, "data", "mnist", "--subset")
    (folder / "solver.prototxt").write_text(SOLVER.replace('weights: "absent.caffemodel"', ""))
    log = caffepy(folder, "train", "--solver", "solver.prototxt")
    assert "Optimization Done" in log
    assert COMPILING not in log
    assert kept(folder) == files


def test_a_second_warm_up_of_a_model_compiles_nothing(folder: Path) -> None:
    (folder / "deploy.prototxt").write_text(
        NET.split('layer { name: "loss"')[0]
        % 'layer { name: "in" type: "Input" top: "data" input_param { shape { dim: 2 dim: 1 dim: 28 dim: 28 } } }'
    )
    assert caffepy(folder, "warm-up", "--model", "deploy.prototxt").count(COMPILING) == 1
    files = kept(folder)
    assert COMPILING not in caffepy(folder, "warm-up", "--model", "deploy.prototxt")
    assert kept(folder) == files


def test_a_model_that_reads_data_is_run_without_them(folder: Path) -> None:
    assert main(["warm-up", "--model", "net.prototxt", "--shape", "1,28,28"]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "needs either --solver or --model"),
        ("--solver solver.prototxt --model net.prototxt", "needs either --solver or --model"),
        ("--solver solver.prototxt", r"'mnist_train_lmdb' does not exist .*; or give the shape .* --shape 3,224,224"),
        ("--model net.prototxt", r"'mnist_test_lmdb' does not exist .*; or give the shape .* --shape 3,224,224"),
    ],
)
def test_what_is_missing_is_named(folder: Path, options: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warm-up", *options.split()]) in (1, 2)
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("caffepy: error: ")]
    assert len(errors) == 1
    assert re.search(message, errors[0])


def net_of(text: str) -> caffe_pb2.NetParameter:
    return parse_text(text, caffe_pb2.NetParameter(), "net")


@pytest.mark.parametrize(("devices", "batch"), [(1, 6), (4, 2)])
def test_a_batch_is_divided_among_devices(devices: int, batch: int) -> None:
    net = without_data(net_of(READER), {"data": (1, 28, 28)}, devices)
    assert [layer.type for layer in net.layer] == ["DummyData", "DummyData"]
    assert [list(shape.dim) for shape in net.layer[0].dummy_data_param.shape] == [[batch, 1, 28, 28], [batch]]
    assert not net.layer[0].HasField("data_param")


def test_boxes_are_one_list_for_all_images() -> None:
    net = net_of(
        'layer { name: "d" type: "AnnotatedData" top: "data" top: "label" data_param { source: "absent" batch_size: 6 }'
        " transform_param { crop_size: 24 } }"
    )
    said: list[str] = []
    context = LayerContext(MetaBackend(), phase=caffe_pb2.TRAIN)
    shapes = record_shapes(net, context, caffe_pb2.NetState(phase=caffe_pb2.TRAIN), None, said.append)
    (data,) = without_data(net, shapes, as_inputs=True).layer
    assert data.type == "Input"
    assert [list(shape.dim) for shape in data.input_param.shape] == [[6, 3, 24, 24], [1, 1, 1, 8]]
    assert said == ["layer 'd': its data are missing; using --shape 3,24,24, from crop_size"]
