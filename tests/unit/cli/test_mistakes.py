"""What a newcomer may do wrong with files: each message says what was found, where, and what to do."""

from __future__ import annotations

import gzip
import os
import re
import sys
import threading
from pathlib import Path

import cv2
import numpy as np
import pytest

from caffepy.cli.main import main

NET = """
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: [1, 1, 4, 4] } } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 2 } }
"""
SOLVER = 'net: "net.prototxt" base_lr: 0.1 lr_policy: "fixed" max_iter: 1 '


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.prototxt").write_text(NET)
    Path("empty.prototxt").write_text("# nothing\n")
    Path("v1.prototxt").write_text(NET.replace('"InnerProduct"', "INNER_PRODUCT"))
    Path("solver.prototxt").write_text(SOLVER.replace("net.prototxt", "nte.prototxt"))
    Path("nothing.prototxt").write_text(SOLVER.replace("net.prototxt", "empty.prototxt"))
    Path("words.prototxt").write_text(SOLVER.replace("0.1", "fast"))
    Path("packed.caffemodel").write_bytes(gzip.compress(b"weights"))
    for name in ("cat.png", "dog.png"):
        cv2.imwrite(name, np.zeros((4, 4), np.uint8))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("train --cpu --solver solver.prototxt", r"solver: net: 'nte.prototxt' does not exist \(looked from "),
        ("train --cpu --solver words.prototxt", r"words.prototxt:1:30: found fast where a number is expected"),
        ("net --model v1.prototxt", r'v1.prototxt:3:26: .* write type: "InnerProduct", or make it layers { }'),
        ("net --model empty.prototxt", "empty.prototxt: the net has no layers in the TRAIN phase"),
        ("test --model empty.prototxt --weights x", "empty.prototxt: the net has no layers in the TEST phase"),
        ("time --model empty.prototxt", "empty.prototxt: the net has no layers in the TRAIN phase"),
        ("train --cpu --solver nothing.prototxt", "net file: .*empty.prototxt: the net has no layers in the TRAIN"),
        ("test --model net.prototxt --weights packed.caffemodel", "packed.caffemodel: .* packed with gzip; unpack"),
        ("test --model net.prototxt --weights net.prototxt", "net.prototxt: .* it is text .* give the binary file"),
        ("classify cat.png --model net.prototxt --mean-file packed.caffemodel", "'packed.caffemodel' .* gzip; unpack"),
        ("import net.prototxt", "net.prototxt: not an ONNX model, or damaged: it is text .*; give the binary file"),
    ],
)
def test_the_message_helps(command: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.split()) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("caffepy: error: ")]
    assert len(lines) == 1
    assert re.search(message, lines[0]), lines[0]


def test_a_second_image_is_not_overwritten_with_probabilities(capsys: pytest.CaptureFixture[str]) -> None:
    before = Path("dog.png").read_bytes()
    assert main(["classify", "cat.png", "dog.png", "--model", "net.prototxt"]) == 0
    assert "dog.png\n" in capsys.readouterr().out
    assert main(["classify", "cat.png", "--output", "dog.png", "--model", "net.prototxt"]) == 2
    assert "'dog.png' is the output" in capsys.readouterr().err
    assert Path("dog.png").read_bytes() == before


def test_a_system_without_further_threads_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert main(["train", "--cpu", "--solver", "solver.prototxt"]) == 1
    assert re.search(r"(?m)^caffepy: error: the system gives .* no more threads: .*ulimit -u", capsys.readouterr().err)


# -- standard streams ------------------------------------------------------------------------------------


@pytest.mark.parametrize("closed", ["stdin", "stdout", "stderr"])
def test_a_stream_that_was_closed_at_start_takes_what_is_printed(closed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, closed, None)
    assert main(["net", "--model", "net.prototxt"]) == 0
    assert getattr(sys, closed) is not None


def test_output_to_a_full_disk_is_the_disks_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["net", "--model", "net.prototxt"]) == 1
    assert capsys.readouterr().err == "caffepy: error: the output cannot be written: No space left on device\n"


def test_an_error_that_cannot_be_printed_has_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w", buffering=1) as full:
        monkeypatch.setattr(sys, "stderr", full)
        assert main(["net"]) == 2
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # what is still buffered
