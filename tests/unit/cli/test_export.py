"""`caffepy export` and `caffepy import`, as a user calls them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from export_cases import DETECT
from google.protobuf import text_format
from onnx import TensorProto, helper, load_model, numpy_helper, save_model
from onnx_nets import layer_text, net_of

import caffepy
from caffepy.cli.main import main
from caffepy.export.onnx.libraries import Session, run_model
from caffepy.formats.caffemodel import read_weights, write_caffemodel
from caffepy.formats.load import read_net
from caffepy.layers.export_rules import OnnxLayer

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
    net = net_of(NET)
    write_caffemodel(weights, net.name, net.layers)
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
    assert (
        main(["export", *(str(tmp_path / f"back.{e}") for e in ("prototxt", "caffemodel")), files[2], "--overwrite"])
        == 0
    )


@pytest.mark.parametrize("more", [[], ["--fold", "--batch", "dynamic"]])
def test_half(files, more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["export", *files, "--half", *more]) == 0
    assert "float16 weights: output 'z': largest difference" in capsys.readouterr().out
    stored = {constant.name: constant.data_type for constant in load_model(files[2]).graph.initializer}
    assert stored["conv/W/half"] == TensorProto.FLOAT16
    x = np.random.default_rng(5).standard_normal((2, 3, 6, 6)).astype(np.float32)
    wanted, found = caffepy.load(*files[:2])(x)["z"], run_model(files[2], {"x0": x})["z"]
    assert 0 < np.abs(found - wanted).max() < 0.01 * np.abs(wanted).max()
    assert main(["import", files[2], "--output", str(tmp_path / "back")]) == 0


@pytest.mark.parametrize("more", [[], ["--batch", "dynamic", "--fold"]])
def test_an_input_that_no_layer_reads(files, more: list[str], capsys: pytest.CaptureFixture[str]):
    unread = 'layer { name: "i" type: "Input" top: "im_info" input_param { shape { dim: 2 dim: 3 } } }'
    Path(files[0]).write_text(NET + unread)
    assert main(["export", *files, *more]) == 0
    said = capsys.readouterr()
    assert "output 'z': largest difference" in said.out and "output 'im_info'" not in said.out
    assert "input 'im_info' is left out: no layer of the export reads it" in said.err
    assert [one.name for one in load_model(files[2]).graph.input] == ["x0"]


BEHIND = """
layer { name: "scores" type: "Sigmoid" bottom: "conf" top: "scores" }
layer { name: "codes" type: "Power" bottom: "loc" top: "codes" power_param { scale: 0.001 } }
"""


@pytest.fixture
def detector(tmp_path: Path) -> list[Path]:
    """A net that finds boxes behind other layers, its weights, and the path of a file to write."""
    first, last = (DETECT % (240, "code_type: CORNER", "")).split('layer { name: "out"')
    detection = last.replace('bottom: "loc" bottom: "conf"', 'bottom: "codes" bottom: "scores"')
    paths = [tmp_path / name for name in ("net.prototxt", "net.caffemodel", "net.onnx")]
    paths[0].write_text(f'{first}{BEHIND}layer {{ name: "out"{detection}')
    write_caffemodel(paths[1], "net", net_of(paths[0].read_text()).layers)
    return paths


@pytest.mark.parametrize("more", [[], ["--batch", "dynamic"]])
def test_boxes_in_another_order_are_checked_by_what_they_are_found_from(
    detector: list[Path], more: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    run, add = Session.run, OnnxLayer.add

    def reordered(session: Session, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        found = run(session, feeds)
        return {name: values[:, :, ::-1] if name == "out" else values for name, values in found.items()}

    def without_sigmoid(view: OnnxLayer, kind: str, *names: str, **more: object) -> str:
        return names[0] if kind == "Sigmoid" else add(view, kind, *names, **more)

    monkeypatch.setattr(Session, "run", reordered)
    command = ["export", *map(str, detector), *more]
    assert main(command) == 0
    said = capsys.readouterr()
    assert said.err.count("rounding may have reordered boxes") == (2 if more else 1)
    assert "output 'scores': largest difference" in said.out
    assert "output 'codes': largest difference" in said.out
    detector[2].unlink()
    monkeypatch.setattr(OnnxLayer, "add", without_sigmoid)
    assert main(command) == 1
    assert "output 'scores': largest difference" in capsys.readouterr().err
    assert not detector[2].exists()


def test_the_check_reaches_boxes_that_a_nets_own_inputs_do_not(
    detector: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    command = ["export", *map(str, detector)]
    assert main(command) == 0
    assert "layer 'out' alone: output 'top0': largest difference" in capsys.readouterr().out
    detector[2].unlink()
    add = OnnxLayer.add

    def without_max(view: OnnxLayer, kind: str, *names: str, **more: object) -> str:
        return names[-1] if kind == "Max" else add(view, kind, *names, **more)

    monkeypatch.setattr(OnnxLayer, "add", without_max)
    assert main(command) == 1
    assert "layer 'out' alone: output 'top0' has the shape" in capsys.readouterr().err
    assert not detector[2].exists()


def test_weights_beyond_the_range_of_float16(files, capsys: pytest.CaptureFixture[str]):
    net = net_of(NET)
    net.backend.fill(net.layers[1].blobs[0].data, 1e6)
    write_caffemodel(Path(files[1]), net.name, net.layers)
    assert main(["export", *files, "--half"]) == 2
    assert "layer 'conv' (Convolution): parameter 0 has values that float16 cannot hold" in capsys.readouterr().err


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
        assert "[onnx]'" in said


def test_without_onnxruntime(files, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    assert main(["export", *files]) == 0
    monkeypatch.setattr("caffepy.export.onnx.libraries.has_runtime", lambda: False)
    capsys.readouterr()
    assert main(["export", *files]) == 2
    assert "onnxruntime, needed to check the file, is not installed" in capsys.readouterr().err
    assert main(["import", files[2]]) == 0
    said = capsys.readouterr().out
    assert "not compared: onnxruntime is not installed (" in said and "[onnx]'" in said


def test_a_difference_writes_nothing(files, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    wrong = {"z": np.zeros((2, 4, 4, 4), np.float32)}
    monkeypatch.setattr("caffepy.export.onnx.libraries.Session.run", lambda *_: wrong)
    assert main(["export", *files]) == 1
    assert "above the limit of 0.0001; the file is not written" in capsys.readouterr().err
    assert not Path(files[2]).exists()


@pytest.mark.parametrize(
    ("command", "match"),
    [
        (["export", "NET", "WEIGHTS", "OUT", "--opset", "99"], "opset is 99; 13 to 21 can be written"),
        (["export", "NET", "WEIGHTS", "OUT", "--batch", "none"], "'none' is not a whole number"),
        (["export", "NET", "OUT", "OUT"], "out.onnx"),
        (["export", "NET"], "required: WEIGHTS, OUT"),
        (["import", "OUT"], "cannot be read: No such file"),
        (["import", "NET"], "not an ONNX model"),
        (["import", "OUT", "--shape", "a,b"], "'a,b' is not a shape such as"),
        (["import", "NET", "--output", "."], ". is a folder; give --output a path without suffix"),
    ],
)
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


SMALL_EPS = 1e-7


def statistics(channels: int) -> list[np.ndarray]:
    """Scale, bias, mean and a variance beside which an eps of 1e-5 counts."""
    rng = np.random.default_rng(4)
    return [*rng.standard_normal((3, channels)).astype(np.float32), rng.uniform(1e-6, 4e-6, channels).astype("f")]


def test_import_writes_files_that_load_as_the_model(tmp_path: Path):
    """NVIDIA's dialect, which a field of NVIDIA Caffe's alone would choose, has an eps of at least 1e-5."""
    nodes = [
        helper.make_node("BatchNormalization", ["x", *"sbmv"], ["a"], epsilon=SMALL_EPS),
        helper.make_node("Selu", ["a"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3, 4, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(values, name) for name, values in zip("sbmv", statistics(3), strict=True)],
    )
    path = tmp_path / "net.onnx"
    save_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))
    assert main(["import", str(path)]) == 0
    x = np.random.default_rng(5).standard_normal((2, 3, 4, 4)).astype(np.float32)
    found = caffepy.load(tmp_path / "net.prototxt", tmp_path / "net.caffemodel")(x)["y"]
    wanted = run_model(str(path), {"x": x})["y"]
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["net.caffemodel", "net.onnx", "net.prototxt"]


def test_import_checks_the_files_that_it_writes(
    files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """In NVIDIA's dialect, which the variable chooses, eps is at least 1e-5."""
    Path(files[0]).write_text(NET.replace('top: "bn" }', f'top: "bn" batch_norm_param {{ eps: {SMALL_EPS} }} }}'))
    net = net_of(Path(files[0]).read_text())
    net.backend.from_host(np.full(4, 1e-6, np.float32), net.layers[2].blobs[1].data)
    write_caffemodel(Path(files[1]), net.name, net.layers)
    assert main(["export", *files]) == 0
    monkeypatch.setenv("CAFFEPY_DIALECT", "nvidia")
    assert main(["import", files[2], "--output", str(tmp_path / "back")]) == 1
    assert "above the limit of 0.0001; the file is not written" in capsys.readouterr().err
    assert not list(tmp_path.glob("*back*"))
    assert main(["import", files[2], "--output", str(tmp_path / "back"), "--fold"]) == 0


@pytest.mark.parametrize("fold", [[], ["--fold"]])
def test_export_keeps_the_dialect_that_a_field_of_the_whole_net_chooses(files, fold: list[str]):
    text = "reduce_buckets: 2 " + NET.replace('top: "bn" }', f'top: "bn" batch_norm_param {{ eps: {SMALL_EPS} }} }}')
    Path(files[0]).write_text(text)
    net = net_of(text)
    net.backend.from_host(statistics(4)[3], net.layers[2].blobs[1].data)
    write_caffemodel(Path(files[1]), net.name, net.layers)
    assert main(["export", *files, *fold]) == 0
    x = np.random.default_rng(5).standard_normal((2, 3, 6, 6)).astype(np.float32)
    wanted, found = caffepy.load(*files[:2])(x)["z"], run_model(files[2], {"x0": x})["z"]
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())
