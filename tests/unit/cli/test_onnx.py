"""`caffepy export` and `caffepy import`, as a user calls them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format
from onnx_nets import layer_text, net_of

from caffepy.cli.main import main
from caffepy.config.load import read_net, read_weights
from caffepy.snapshot.binary import write_weights_binary

NET = layer_text('name: "conv" type: "Convolution" convolution_param { num_output: 4 kernel_size: 3 }', (2, 3, 6, 6))
NET = (
    NET.replace('name: "it" ', "")
    + """
layer { name: "bn" type: "BatchNorm" bottom: "y" top: "bn" } layer { name: "relu" type: "ReLU" bottom: "bn" top: "z" }
"""
)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str, str]:
    """A net, its weights, and the path of a file to write."""
    prototxt, weights = tmp_path / "net.prototxt", tmp_path / "net.caffemodel"
    prototxt.write_text(NET)
    write_weights_binary(weights, net_of(NET), write_diff=False)
    return str(prototxt), str(weights), str(tmp_path / "out.onnx")


@pytest.mark.parametrize("more", [[], ["--fold"], ["--batch", "dynamic"], ["--batch", "3", "--opset", "13"]])
def test_there_and_back(files, more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["export", *files, *more]) == 0
    said = capsys.readouterr().out
    assert "output 'z': largest difference" in said
    assert f"{files[2]}: {2 if '--fold' in more else 3} nodes, opset {13 if '13' in more else 17}" in said
    assert main(["import", files[2], "--output", str(tmp_path / "back"), "--fold"]) == 0
    said = capsys.readouterr().out
    assert "output 'z': largest difference" in said
    assert "back.prototxt: 3 layers" in said
    assert [layer.type for layer in read_net(tmp_path / "back.prototxt").layer] == ["Input", "Convolution", "ReLU"]
    assert [len(layer.blobs) for layer in read_weights(tmp_path / "back.caffemodel").layer] == [0, 2, 0]
    assert main(["export", *(str(tmp_path / f"back.{e}") for e in ("prototxt", "caffemodel")), files[2]]) == 0


def test_without_a_comparison(files, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert main(["export", *files, "--no-check"]) == 0
    assert "difference" not in capsys.readouterr().out
    assert main(["import", files[2], "--no-check"]) == 0
    assert "not compared, because of --no-check" in capsys.readouterr().out
    assert (tmp_path / "out.caffemodel").exists()


def test_without_the_libraries(files, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setitem(sys.modules, "onnx", None)
    for command in (["export", *files], ["import", files[2]]):
        assert main(command) == 2
        assert "onnx is not installed and is needed to" in (said := capsys.readouterr().err)
        assert "pip install 'caffepy[onnx]'" in said


def test_without_onnxruntime(files, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    assert main(["export", *files]) == 0
    monkeypatch.setattr("caffepy.onnx.libraries.has_runtime", lambda: False)
    capsys.readouterr()
    assert main(["export", *files]) == 2
    assert "onnxruntime, which the file is compared by, is not installed" in capsys.readouterr().err
    assert main(["import", files[2]]) == 0
    assert "not compared: onnxruntime is not installed (pip install 'caffepy[onnx]')" in capsys.readouterr().out


def test_a_difference_writes_nothing(files, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    wrong = {"z": np.zeros((2, 4, 4, 4), np.float32)}
    monkeypatch.setattr("caffepy.onnx.libraries.run_model", lambda *_: wrong)
    assert main(["export", *files]) == 1
    assert "above the limit of 0.0001; the file is not written" in capsys.readouterr().err
    assert not Path(files[2]).exists()


@pytest.mark.parametrize(("command", "match"), [
    (["export", "NET", "WEIGHTS", "OUT", "--opset", "99"], "opset is 99; 13 to 21 can be written"),
    (["export", "NET", "WEIGHTS", "OUT", "--batch", "none"], "'none' is not a whole number"),
    (["export", "NET", "OUT", "OUT"], "out.onnx"),
    (["export", "NET"], "required: WEIGHTS, OUT"),
    (["import", "OUT"], "cannot be read: No such file"),
    (["import", "NET"], "not an ONNX model"),
    (["import", "OUT", "--shape", "a,b"], "'a,b' is no shape such as"),
    (["import", "NET", "--output", "."], ". is a folder; give --output a path without ending"),
])  # fmt: skip
def test_mistakes(files, command: list[str], match: str, capsys: pytest.CaptureFixture[str]):
    names = dict(zip(("NET", "WEIGHTS", "OUT"), files, strict=True))
    assert main([names.get(word, word) for word in command]) == 2
    assert match in capsys.readouterr().err.splitlines()[-1]


def test_the_prototxt_is_text_that_both_caffes_read(files, tmp_path: Path):
    assert main(["export", *files, "--no-check"]) == 0
    assert main(["import", files[2], "--output", str(tmp_path / "back"), "--no-check"]) == 0
    text = (tmp_path / "back.prototxt").read_text()
    assert text_format.MessageToString(read_net(tmp_path / "back.prototxt")) == text
    assert "blobs" not in text
