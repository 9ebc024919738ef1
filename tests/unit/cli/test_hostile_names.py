"""Names come from files: they send no escape sequences to a terminal, forge no lines of a log, and are no formulas."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import cv2
import numpy as np
import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st

from caffepy.cli.main import main
from caffepy.errors import printable, spreadsheet_text
from caffepy.formats.proto import caffe_pb2

FORGED = "I0101 00:00:00.000000 1 solver.cpp:1] Iteration 77, loss = 0"
EVIL = f"=a\x1b[31m\x1b]0;title\x07\r\x08\x9b1m\u2028\n{FORGED}\n"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")
NET = """
layer { name: "data" type: "DummyData" top: "data" top: "label" dummy_data_param { shape { dim: 2 dim: 3 }
  shape { dim: 2 } data_filler { type: "gaussian" } data_filler { type: "constant" } } }
layer { name: "EVIL" type: "InnerProduct" bottom: "data" top: "EVIL" inner_product_param { num_output: 3
  weight_filler { type: "xavier" } } }
layer { name: "EVILloss" type: "SoftmaxWithLoss" bottom: "EVIL" bottom: "label" top: "EVILloss" }
layer { name: "EVILtop" type: "Accuracy" bottom: "EVIL" bottom: "label" top: "EVILtop" include { phase: TEST } }
"""
CLASSIFIER = """
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 1 dim: 3 dim: 4 dim: 4 } } }
layer { name: "EVIL" type: "InnerProduct" bottom: "data" top: "EVIL" inner_product_param { num_output: 3 } }
"""
DETECTOR = """
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 1 dim: 3 dim: 4 dim: 4 } } }
layer { name: "loc" type: "InnerProduct" bottom: "data" top: "loc" inner_product_param { num_output: 4 } }
layer { name: "conf" type: "InnerProduct" bottom: "data" top: "conf" inner_product_param { num_output: 2
  bias_filler { type: "constant" value: 0.75 } } }
layer { name: "pool" type: "Pooling" bottom: "data" top: "pool" pooling_param { global_pooling: true } }
layer { name: "prior" type: "PriorBox" bottom: "pool" bottom: "data" top: "prior" prior_box_param { min_size: 2 } }
layer { name: "EVIL" type: "DetectionOutput" bottom: "loc" bottom: "conf" bottom: "prior" top: "EVIL"
  detection_output_param { num_classes: 2 keep_top_k: 1 confidence_threshold: 0.1
  nms_param { nms_threshold: 0.5 top_k: 1 } } }
"""


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("net", NET), ("classifier", CLASSIFIER), ("detector", DETECTOR)):
        net = text_format.Parse(
            text.replace("EVIL", text_format.text_encoding.CEscape(EVIL, True)), caffe_pb2.NetParameter()
        )
        net.name = EVIL
        Path(f"{name}.prototxt").write_text(text_format.MessageToString(net))
    Path("solver.prototxt").write_text(
        'net: "net.prototxt" base_lr: 0.01 lr_policy: "fixed" max_iter: 2 display: 1 test_iter: 1 test_interval: 1 '
        'snapshot_prefix: "s"'
    )
    weights = caffe_pb2.NetParameter()
    layer = weights.layer.add(name=EVIL, type="InnerProduct")
    for shape in ((3, 48), (3,)):
        layer.blobs.add(data=np.ones(shape).ravel().tolist()).shape.dim.extend(shape)
    Path("classifier.caffemodel").write_bytes(weights.SerializeToString())
    cv2.imwrite("a.png", np.zeros((8, 8, 3), np.uint8))
    Path("labels.txt").write_text("".join(f"{line}\n" for line in ("=a\x1b[31m\x07\x9b1m", "-1.5", "@b")))
    labels = caffe_pb2.LabelMap()
    labels.item.add(name=EVIL, label=1, display_name=EVIL)
    Path("map.prototxt").write_text(text_format.MessageToString(labels))


def check_printed(text: str) -> None:
    assert not CONTROL.search(text), repr(CONTROL.search(text))
    assert not re.search(f"^{re.escape(FORGED)}", text, re.MULTILINE)


TRAIN = "train --solver solver.prototxt --cpu"
COMMANDS = (
    (TRAIN,),
    (f"{TRAIN} --log csv:run.csv,jsonl:run.jsonl --set debug_info=true",),
    (f"{TRAIN} --verbose",),
    (TRAIN, "test --model net.prototxt --weights s_iter_2.caffemodel --iterations 1"),
    (TRAIN, "snapshot verify s_iter_2.caffemodel"),
    (TRAIN, "extract_features s_iter_2.caffemodel net.prototxt data features 1 lmdb"),
    ("time --model net.prototxt --iterations 1",),
    ("net --model net.prototxt",),
    ("net --model net.prototxt --memory",),
    ("net --model net.prototxt --memory --limit 1",),
    ("deploy net.prototxt",),
    ("draw_net net.prototxt net.dot",),
    ("classify a.png --model classifier.prototxt --labels labels.txt",),
    ("classify a.png --model classifier.prototxt --labels labels.txt --format csv",),
    ("classify a.png --model classifier.prototxt --labels labels.txt --format json",),
    ("detect a.png --model detector.prototxt --label-map map.prototxt",),
    ("detect a.png --model detector.prototxt --label-map map.prototxt --format text",),
    ("detect a.png --model detector.prototxt --label-map map.prototxt --format json",),
    ("export classifier.prototxt classifier.caffemodel x.onnx", "import x.onnx --output y"),
)


@pytest.mark.parametrize("commands", COMMANDS, ids=lambda commands: commands[-1])
def test_what_commands_print(commands: tuple[str, ...], capsys: pytest.CaptureFixture[str]):
    for command in commands:
        assert main(command.split()) == 0, capsys.readouterr().err
        told = capsys.readouterr()
        check_printed(told.out + told.err)


def test_errors(capsys: pytest.CaptureFixture[str]):
    net = text_format.Parse(Path("net.prototxt").read_text(), caffe_pb2.NetParameter())
    net.layer[1].bottom[0] = EVIL * 2
    Path("net.prototxt").write_text(text_format.MessageToString(net))
    for options in ("", " --traceback"):
        assert main(f"net --model net.prototxt{options}".split()) == 2
        error = capsys.readouterr().err
        assert "\\x1b[31m" in error
        check_printed(error)


def cells(path: Path) -> list[list[str]]:
    return list(csv.reader(io.StringIO(path.read_text(), newline="")))


def check_cells(rows: list[list[str]]) -> None:
    for cell in (cell for row in rows for cell in row):
        assert not CONTROL.search(cell) and "\n" not in cell
        assert cell[:1] not in tuple("=+-@") or float(cell) is not None


def test_cells_of_csv(capsys: pytest.CaptureFixture[str]):
    assert main(f"{TRAIN} --log csv:run.csv".split()) == 0
    head = cells(Path("run.csv"))[0]
    assert any("=a\\x1b[31m" in name for name in head) and len(set(head)) == len(head)
    assert main(f"{TRAIN} --log csv:run.csv --max-iter 4 --snapshot s_iter_2.solverstate".split()) == 0
    assert cells(Path("run.csv"))[0] == head, "a resumed training finds its columns"
    check_cells(cells(Path("run.csv")))
    capsys.readouterr()
    assert (
        main(["classify", "a.png", "--model", "classifier.prototxt", "--labels", "labels.txt", "--format", "csv"]) == 0
    )
    rows = list(csv.reader(io.StringIO(capsys.readouterr().out)))
    assert [row[2] for row in rows[1:]] == [r"'=a\x1b[31m\x07\x9b1m", "-1.5", "'@b"], "a number stays"
    check_cells(rows)
    Path("=b.png").write_bytes(Path("a.png").read_bytes())
    assert main(["detect", "=b.png", "--model", "detector.prototxt", "--label-map", "map.prototxt"]) == 0
    rows = list(csv.reader(io.StringIO(capsys.readouterr().out)))
    assert rows[1][0] == "'=b.png" and rows[1][2].startswith("'=a\\x1b")
    check_cells(rows)


def test_tables_of_a_log(capsys: pytest.CaptureFixture[str]):
    Path("a.log").write_text(
        "I1121 11:29:00.123456 1 solver.cpp:1] Iteration 1, loss = 1\n"
        "I1121 11:29:00.123456 1 solver.cpp:1]     Train net output #0: -cmd\x1b[2J|x = 1\n"
    )
    assert main(["parse_log", "a.log"]) == 0
    check_printed(capsys.readouterr().out)
    assert cells(Path("a.log.train"))[0][3] == "'-cmd\\x1b[2J|x"
    check_cells(cells(Path("a.log.train")))


@given(st.text())
def test_any_name(name: str):
    assert not CONTROL.search(printable(name)) and "\n" not in printable(name)
    cell = spreadsheet_text(name)
    assert not CONTROL.search(cell)
    assert cell[:1] not in tuple("=+-@") or re.fullmatch(r"[-+]?[\d.]+([eE][-+]?\d+)?", cell)
    assert printable("Hund, 犬, सं") == "Hund, 犬, सं"
