"""`caffepy quantize`, as a user calls it."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import onnx
import pytest
from onnx_nets import net_of

from caffepy.cli.main import main
from caffepy.export.onnx.libraries import run_model
from caffepy.formats.caffemodel import write_caffemodel

BODY = """
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv" convolution_param { num_output: 4 kernel_size: 3 } }
layer { name: "bn" type: "BatchNorm" bottom: "conv" top: "conv" }
layer { name: "relu" type: "ReLU" bottom: "conv" top: "conv" }
layer { name: "fc" type: "InnerProduct" bottom: "conv" top: "fc" inner_product_param { num_output: 2 } }
"""
INPUT = """
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 1 dim: 3 dim: 8 dim: 8 } }
  transform_param { scale: 0.00390625 } }
"""
DATA = """
layer { name: "data" type: "ImageData" top: "data" top: "label" include { phase: %s }
  transform_param { scale: 0.00390625 }  image_data_param { source: "%s" batch_size: 4 } }
"""
LOSS = """
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "fc" bottom: "label" top: "loss" }
"""


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Images that are bright above (label 0) or below (1), and a net that tells them apart."""
    rng = np.random.default_rng(3)
    images, lines = [], []
    for index in range(16):
        image = rng.integers(0, 60, (8, 8, 3)).astype(np.uint8)
        image[(index % 2) * 4 :][:4] += 150
        path = tmp_path / f"photos/{index:02}.png"
        path.parent.mkdir(exist_ok=True)
        cv2.imwrite(str(path), image)
        images.append(image)
        lines.append(f"{path} {index % 2}\n")
    (tmp_path / "list.txt").write_text("".join(lines))
    net = net_of(INPUT + BODY)
    values = np.stack([image.transpose(2, 0, 1) for image in images]) / np.float32(256)
    fc = net.layers[-1]
    features = features_of(net, values)
    above, below = features[::2].mean(0), features[1::2].mean(0)
    middle = (above + below) / 2
    net.backend.from_host(np.stack([above - below, below - above]).astype(np.float32), fc.blobs[0].data)
    net.backend.from_host(np.array([-middle @ (above - below), middle @ (above - below)], "f"), fc.blobs[1].data)
    names = {name: str(tmp_path / name) for name in ("deploy.prototxt", "train.prototxt", "net.caffemodel", "out.onnx")}
    Path(names["deploy.prototxt"]).write_text(INPUT + BODY)
    data = "".join(DATA % (phase, tmp_path / "list.txt") for phase in ("TRAIN", "TEST"))
    Path(names["train.prototxt"]).write_text(data + BODY + LOSS)
    write_caffemodel(Path(names["net.caffemodel"]), "net", net.layers)
    return names | {"photos": str(tmp_path / "photos")}


def features_of(net, values: np.ndarray) -> np.ndarray:
    """What the last layer reads, (N, K)."""
    rows = []
    for value in values:
        net.backend.from_host(value[None], net.blobs["data"].data)
        net.forward()
        rows.append(net.blobs["conv"].host_data().reshape(-1).copy())
    return np.stack(rows)


def quantize(files: dict[str, str], *more: str) -> int:
    """Run the command."""
    return main(["quantize", files["deploy.prototxt"], files["net.caffemodel"], files["out.onnx"], *more])


def test_accuracy_before_and_after(files, capsys: pytest.CaptureFixture[str]):
    assert quantize(files, "--like", files["train.prototxt"], "--samples", "10", "--iterations", "4") == 0
    said = capsys.readouterr().out
    assert "calibrated with 10 images" in said
    assert "int8: output 'fc': largest difference" in said
    assert "accuracy on 16 test images: 1.0000 before, 1.0000 after" in said
    model = onnx.load(files["out.onnx"])
    assert {node.op_type for node in model.graph.node} >= {"QuantizeLinear", "DequantizeLinear", "Conv"}
    assert onnx.TensorProto.INT8 in {constant.data_type for constant in model.graph.initializer}
    found = run_model(files["out.onnx"], {"data": np.zeros((3, 3, 8, 8), np.float32)})["fc"]
    assert found.shape == (3, 2), "any batch"


def test_images_of_a_folder(files, capsys: pytest.CaptureFixture[str]):
    assert quantize(files, "--images", files["photos"]) == 0
    said = capsys.readouterr().out
    assert "calibrated with 16 images" in said and "accuracy" not in said


def test_a_train_net_without_test_data(files, capsys: pytest.CaptureFixture[str]):
    path = Path(files["train.prototxt"])
    path.write_text(path.read_text().replace("phase: TEST", 'stage: "never"'))
    assert quantize(files, "--like", str(path), "--samples", "4") == 0
    assert "accuracy: not measured: " in (said := capsys.readouterr().out)
    assert "no data layers in the TEST phase" in said


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ([], "--like train_val.prototxt or --images PATH"),
        (["--like", "deploy.prototxt"], "no data layers in the TRAIN phase"),
        (["--images", "none"], "none"),
    ],
)
def test_mistakes(files, more: list[str], match: str, capsys: pytest.CaptureFixture[str]):
    assert quantize(files, *(files.get(word, word) for word in more)) == 2
    assert match in capsys.readouterr().err
    assert not Path(files["out.onnx"]).exists()


def test_data_of_other_names_is_refused(files, capsys: pytest.CaptureFixture[str]):
    path = Path(files["train.prototxt"])
    path.write_text(path.read_text().replace('"data"', '"image"'))
    assert quantize(files, "--like", str(path)) == 2
    assert "its data layers give image, label; the deploy net's input 'data' must be one" in capsys.readouterr().err


def test_images_that_cannot_be_read(files, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name in ("00.png", "03.png"):
        (tmp_path / "photos" / name).write_bytes(b"no image")
    assert quantize(files, "--images", files["photos"], "--samples", "10") == 1
    said = capsys.readouterr()
    assert "calibrated with 10 images" in said.out
    assert [line.split("'")[1][-6:] for line in said.err.splitlines() if "left out: " in line] == ["00.png", "03.png"]
    (tmp_path / "list.txt").write_text(f"{tmp_path / 'photos/00.png'}\n{tmp_path / 'absent.png'}\n")
    assert quantize(files, "--images", str(tmp_path / "list.txt"), "--overwrite") == 2
    assert "none of the 2 images can be read" in capsys.readouterr().err
