"""`caffepy classify` and `caffepy detect`: what nets say of image files."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import cv2
import h5py
import numpy as np
import pytest

import caffepy.infer.model
from caffepy.backend import Backend, create_backend
from caffepy.cli.main import main
from caffepy.errors import ConfigError, DataError
from caffepy.formats.proto import caffe_pb2
from caffepy.infer.classify import ImageModel, classify
from caffepy.infer.images import ImageOptions, InputImage, image_files, list_images, read_any_mean, read_array
from caffepy.pycaffe import Detector

COLOURS = """
    layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 1 dim: 3 dim: 4 dim: 4 } } }
    layer { name: "pool" type: "Pooling" bottom: "data" top: "pool" pooling_param { pool: AVE global_pooling: true } }
    layer { name: "fc" type: "InnerProduct" bottom: "pool" top: "fc"
            inner_product_param { num_output: 3 bias_term: false } }
"""
"""Its scores are the means of the three channels."""
BOXES = """
    layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 1 dim: 3 dim: 4 dim: 4 } } }
    layer { name: "loc" type: "InnerProduct" bottom: "data" top: "loc" inner_product_param { num_output: 4
            weight_filler { type: "constant" } } }
    layer { name: "conf" type: "InnerProduct" bottom: "data" top: "conf" inner_product_param { num_output: 2
            weight_filler { type: "constant" } bias_filler { type: "constant" value: 0.75 } } }
    layer { name: "pool" type: "Pooling" bottom: "data" top: "pool" pooling_param { global_pooling: true } }
    layer { name: "prior" type: "PriorBox" bottom: "pool" bottom: "data" top: "prior"
            prior_box_param { min_size: 2 variance: 0.1 variance: 0.1 variance: 0.2 variance: 0.2 } }
    layer { name: "found" type: "DetectionOutput" bottom: "loc" bottom: "conf" bottom: "prior" top: "found"
            detection_output_param { num_classes: 2 share_location: true background_label_id: 0
            nms_param { nms_threshold: 0.45 top_k: 10 } keep_top_k: 5 confidence_threshold: 0.1 } }
"""
"""It finds label 1 with the score 0.75 in the middle half of any image."""


@pytest.fixture
def net(tmp_path: Path) -> list[str]:
    """Arguments that name a net whose scores are the means of its input's channels."""
    (tmp_path / "net.prototxt").write_text(COLOURS)
    weights = caffe_pb2.NetParameter()
    layer = weights.layer.add(name="fc", type="InnerProduct")
    layer.blobs.add(shape={"dim": [3, 3]}, data=np.eye(3).ravel().tolist())
    (tmp_path / "net.caffemodel").write_bytes(weights.SerializeToString())
    return ["--model", str(tmp_path / "net.prototxt"), "--weights", str(tmp_path / "net.caffemodel"), "--threads=1"]


@pytest.fixture
def red(tmp_path: Path) -> Path:
    """An image that is red, and a bit blue in its middle."""
    image = np.zeros((40, 80, 3), np.uint8)
    image[:, :, 2] = 200
    image[15:25, 30:50, 0] = 100
    path = tmp_path / "red.png"
    cv2.imwrite(str(path), image)
    return path


def test_random_weights_are_a_warning(net: list[str], windows: Path, red: Path, capsys):
    without = [*net[:2], net[-1]]
    of_windows = ["detect", str(windows), "--crop-mode", "list", "--context-pad", "0"]
    for command in (["classify", str(red), "--images-dim=4,4"], of_windows):
        assert main([*command, *without]) == 0
        said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("W")]
        assert len(said) == 1 and "net.prototxt: no weights are given" in said[0] and "give --weights" in said[0]
        assert main([*command, *net]) == 0
        assert "no weights are given" not in capsys.readouterr().err


def test_the_table_has_the_likeliest_first(net: list[str], red: Path, tmp_path: Path, capsys):
    (tmp_path / "words.txt").write_text("n01 blue\nn02 green\nn03 red\x1b[2J\n")
    assert main(["classify", str(red), *net, "--labels", str(tmp_path / "words.txt"), "--images-dim", "4,4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == str(red)
    assert lines[1].split() == ["200.0000", "n03", "red\\x1b[2J"]
    assert [line.split()[-1] for line in lines[2:]] == ["blue", "green"]


def test_values_are_prepared_as_caffe_does(net: list[str], red: Path, tmp_path: Path):
    output = tmp_path / "scores.npy"
    options = ["-images_dim", "4,4", "-mean_file=1,2,3", "-input_scale", "0.5", "--raw_scale=100", "--center_only"]
    assert main(["classify", str(red), str(output), *net, *options]) == 0
    scores = np.load(output)
    assert scores.shape == (1, 3)
    assert scores[0, 1] == -1
    assert scores[0, 2] == pytest.approx((200 / 255 * 100 - 3) / 2, abs=1e-4)
    output = tmp_path / "swapped.npy"
    assert main(["classify", str(red), str(output), *net, "--images-dim=4,4", "--channel_swap=0,1,2"]) == 0
    assert np.load(output)[0, 0] == pytest.approx(200, abs=1e-3)


def test_onnxruntime_gives_the_same_scores(net: list[str], red: Path, tmp_path: Path):
    scores = []
    for engine in ("own", "onnxruntime"):
        output = tmp_path / f"{engine}.npy"
        assert main(["classify", str(red), str(output), *net, "--images-dim=4,4", "--engine", engine]) == 0
        scores.append(np.load(output))
    assert scores[0] == pytest.approx(scores[1], abs=1e-3)
    assert main(["classify", str(red), *net, "--engine", "onnxruntime", "--gpu", "0"]) == 2


def test_math_reaches_the_device(net: list[str], red: Path, monkeypatch: pytest.MonkeyPatch):
    chosen = []

    def create(device: int | None, threads: int | None, math: str) -> Backend:
        chosen.append(math)
        return create_backend(device, threads, math)

    monkeypatch.setattr(caffepy.infer.model, "create_backend", create)
    assert main(["classify", str(red), *net, "--images-dim=4,4", "--math", "fp32"]) == 0
    assert chosen == ["fp32"]


def test_ten_crops_are_averaged(net: list[str]):
    rng = np.random.default_rng(3)
    image = rng.random((6, 7, 3), np.float32)
    crops = [image[t : t + 4, le : le + 4] for t, le in ((0, 0), (0, 3), (2, 0), (2, 3), (1, 1))]
    with ImageModel(Path(net[1]), [Path(net[3])], threads=1) as model:
        given, plain = [InputImage("given", image)], ImageOptions(1.0)
        (mean,) = classify(model, given, plain.steps(model.image_shape, (6, 7), ten_crops=True))
        (centre,) = classify(model, given, plain.steps(model.image_shape, (6, 7)))
        with pytest.raises(ConfigError, match=r"resized to 3 x 9, and the net takes 4 x 4: give a larger --images-dim"):
            ImageOptions().steps(model.image_shape, (3, 9))
    assert mean == pytest.approx(np.mean([crop.mean((0, 1))[::-1] for crop in crops], axis=0), abs=1e-5)
    assert centre == pytest.approx(crops[-1].mean((0, 1))[::-1], abs=1e-5)


def test_folders_and_arrays(net: list[str], red: Path, tmp_path: Path, capsys):
    np.save(tmp_path / "images.npy", np.full((2, 5, 5, 3), (0.0, 1.0, 0.0), np.float32))
    assert main(["classify", str(tmp_path / "images.npy"), *net, "--images-dim=4,4", "--top", "1"]) == 0
    out = capsys.readouterr().out
    assert out.count("images.npy[") == 2
    assert out.count("255.0000  class 1") == 2
    assert image_files(tmp_path, "png") == [red]
    with pytest.raises(DataError, match=r"has no files that end in \.gif; name another suffix with --ext"):
        image_files(tmp_path, "gif")


# -- the preparation of the net's Input layer ---------------------------------------------------------------


@pytest.fixture
def own(net: list[str]) -> list[str]:
    """The net with a preparation: half of the value above 10, from images of 8 x 8 cropped to 4 x 4."""
    path = Path(net[1])
    fields = (
        "transform_param { scale: 0.5 mean_value: 10 crop_size: 4 } image_data_param { new_height: 8 new_width: 8 }"
    )
    path.write_text(COLOURS.replace('top: "data"', f'top: "data" {fields}', 1))
    return net


def test_images_are_prepared_by_the_net(own: list[str], red: Path, capsys):
    assert main(["classify", str(red), *own, "--format", "csv"]) == 0
    told = capsys.readouterr()
    assert "W" not in {line[:1] for line in told.err.splitlines()}
    rows = list(csv.DictReader(told.out.splitlines()))
    assert [row["label"] for row in rows] == ["2", "0", "1"]
    image = cv2.resize(cv2.imread(str(red)), (8, 8))[2:6, 2:6]
    assert [float(row["score"]) for row in rows] == pytest.approx([(image[:, :, c].mean() - 10) / 2 for c in (2, 0, 1)])


def test_options_replace_the_nets_preparation(own: list[str], red: Path, capsys):
    for option in ("--mean-file=0", "--raw-scale=255", "--input-scale=1", "--channel-swap=2,1,0", "--images-dim=4,4"):
        assert main(["classify", str(red), *own, "--top=1", option]) == 0
        told = capsys.readouterr()
        name = option.split("=")[0]
        assert f"net.prototxt: {name} replaces the preparation that the net's Input layer has" in told.err
        assert told.out.split()[2:] == ["class", "2"]
        assert float(told.out.split()[1]) > 150
    path = Path(own[1])
    path.write_text(path.read_text().replace("mean_value: 10", "mean_file: 'none'"))
    assert main(["classify", str(red), *own, "--mean-file=0"]) == 0
    capsys.readouterr()
    assert main(["classify", str(red), *own]) == 2
    assert "mean_file 'none' cannot be read: No such file" in capsys.readouterr().err
    path.write_text(path.read_text().replace("mean_file: 'none'", "mean_value: 10"))
    assert main(["classify", str(red), *own, "--top=1", "--center-only"]) == 0
    told = capsys.readouterr()
    assert "replaces" not in told.err
    assert told.out.split()[1:] == ["95.0000", "class", "2"]


def test_a_crop_of_less_than_half_is_a_warning(net: list[str], red: Path, capsys):
    assert main(["classify", str(red), *net]) == 0
    assert "sees 4 x 4 of each image, which is resized to 256 x 256: less than half" in capsys.readouterr().err
    for dim in ("4,4", "5,6"):
        assert main(["classify", str(red), *net, "--images-dim", dim]) == 0
        assert "less than half" not in capsys.readouterr().err


def test_several_images_folders_and_lists(own: list[str], red: Path, tmp_path: Path, capsys):
    photos = tmp_path / "photos"
    photos.mkdir()
    names = [photos / name for name in ("b.PNG", "a.jpg", "with space.bmp")]
    for value, name in enumerate(names, 1):
        cv2.imwrite(str(name), np.full((8, 8, 3), 60 * value, np.uint8))
    (photos / "notes.md").write_text("no image")
    (tmp_path / "list.txt").write_text(f"photos/b.PNG\n{names[2]}\n\nphotos/a.jpg 7\n{names[2]} 1\n")
    out = tmp_path / "classes.json"
    paths = [red, photos, tmp_path / "list.txt"]
    assert main(["classify", *map(str, paths), str(out), *own, "--top", "1"]) == 0
    assert capsys.readouterr().out == f"{out}: 8 images\n"
    found = json.loads(out.read_text())
    listed = [names[0], names[2], names[1], names[2]]
    assert [Path(row["image"]) for row in found] == [red, names[1], names[0], names[2], *listed]
    assert [row["classes"][0]["score"] for row in found[1:]] == pytest.approx([55, 25, 85, 25, 85, 55, 85], abs=1)
    assert found[0]["classes"] == [{"label": 2, "name": "", "score": 95}]
    for given in (
        [*paths, "--output", tmp_path / "all.npy"],
        [red, *own, photos, tmp_path / "list.txt", tmp_path / "all.npy"],
    ):
        assert main(["classify", *map(str, given), *(own if given[1] is photos else [])]) == 0
        assert np.load(tmp_path / "all.npy").shape == (8, 3)
        (tmp_path / "all.npy").unlink()
    (tmp_path / "empty.txt").write_text("\n")
    for path, message in ((tmp_path / "empty.txt", "names no images"), (tmp_path, "has no files that end in .gif")):
        assert main(["classify", str(path), *own, "--ext", "gif"]) == 2
        assert message in capsys.readouterr().err


def test_boxes_of_several_images(ssd: list[str], red: Path, tmp_path: Path, capsys):
    (tmp_path / "more").mkdir()
    again = tmp_path / "more" / "red.png"
    again.write_bytes(red.read_bytes())
    assert main(["detect", str(red), str(again), *ssd, "--draw", str(tmp_path / "drawn"), "--format", "text"]) == 0
    box = "    0.7500    20.0    10.0    60.0    30.0  thing"
    assert capsys.readouterr().out.splitlines() == [str(red), box, str(again), box]
    assert [path.name for path in sorted((tmp_path / "drawn").iterdir())] == ["red_000000.png", "red_000001.png"]


def test_boxes_are_those_of_whole_images(ssd: list[str], red: Path, capsys):
    path = Path(ssd[1])
    plain = path.read_text()
    for fields, code in (
        ("resize_param { height: 4 width: 4 } mean_value: 9", 0),
        ("crop_size: 4", 2),
        ("resize_param { resize_mode: FIT_LARGE_SIZE_AND_PAD height: 4 width: 4 }", 2),
    ):
        path.write_text(plain.replace('top: "data"', f'top: "data" transform_param {{ {fields} }}', 1))
        assert main(["detect", str(red), *ssd]) == code
        told = capsys.readouterr()
        assert ("crops or pads images, and boxes are relative to whole images" in told.err) == bool(code)
        assert code or "thing,0.7500,20.0,10.0,60.0,30.0" in told.out


def test_a_net_without_a_row_for_each_image(ssd: list[str], red: Path, capsys):
    assert main(["classify", str(red), *ssd[:3]]) == 2
    assert "not a row of scores for each; 'caffepy detect' takes nets that find boxes" in capsys.readouterr().err


def npy(header: str, values: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + values


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a numeric .npy file"),
        (b"PK\x03\x04 a zip", "is not a numeric .npy file"),
        (npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1, }"), "is not a numeric .npy file"),
        (npy("{'descr': '<f4', 'fortran_order': False, 'shape': (" + "9" * 5000 + ",)}"), "is not a numeric .npy file"),
        (npy("(" * 9000), "is not a numeric .npy file"),
        (npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2147483648,)}"), "mmap length is greater than"),
        (npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}"), "negative dimensions are not allowed"),
        (npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", bytes(8)), "Python objects in dtype"),
        (b"\x93NUMPY\x03\x00" + bytes(100), "is not a numeric .npy file"),
    ],
)
def test_damaged_arrays(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(DataError, match=rf"'.*a\.npy' .*{message}"):
        read_array(tmp_path / "a.npy")


@pytest.mark.parametrize("kind", ["f4", ">f8", "i2", "?"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_are_read_as_numpy_reads_them(tmp_path: Path, kind: str, order: Any) -> None:
    values = np.array(np.arange(24).reshape(2, 3, 4) % 7, kind, order=order)
    np.save(tmp_path / "a.npy", values)
    np.testing.assert_array_equal(read_array(tmp_path / "a.npy"), values.astype(np.float32), strict=True)


def test_input_that_is_none(tmp_path: Path, net: list[str], red: Path, capsys):
    np.save(tmp_path / "flat.npy", np.zeros(7))
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    (tmp_path / "text.jpg").write_text("no image")
    np.save(tmp_path / "two.npy", np.zeros((4, 4, 2)))
    with pytest.raises(DataError, match=r"has the shape \(7,\); images are \(N, H, W, C\)"):
        list_images([tmp_path / "flat.npy"])
    with pytest.raises(DataError, match=r"not a numeric \.npy file"):
        list_images([tmp_path / "objects.npy"])
    for name, message in (
        ("text.jpg", r"image '.*text\.jpg'"),
        ("two.npy", r"shape \(4, 4, 2\); images are \(H, W, 3\)"),
    ):
        (image,) = list_images([tmp_path / name])
        with pytest.raises(DataError, match=message):
            image.load(3)
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read_any_mean(str(tmp_path / "mean.npy"))
    assert main(["classify", str(red), *net, "--mean-file", "1,2"]) == 2
    assert "the mean has the shape (2,)" in capsys.readouterr().err
    assert main(["detect", str(red), *net]) == 2
    assert "the net has no DetectionOutput layer" in capsys.readouterr().err


# -- boxes ------------------------------------------------------------------------------------------------


@pytest.fixture
def ssd(tmp_path: Path) -> list[str]:
    (tmp_path / "ssd.prototxt").write_text(BOXES)
    (tmp_path / "labels.prototxt").write_text('item { name: "none" label: 0 } item { name: "thing" label: 1 }')
    return ["--model", str(tmp_path / "ssd.prototxt"), "--threads=1", "--label-map", str(tmp_path / "labels.prototxt")]


def test_boxes_are_in_pixels_of_the_image(ssd: list[str], red: Path, tmp_path: Path, capsys):
    assert main(["detect", str(red), *ssd]) == 0
    (row,) = csv.DictReader(capsys.readouterr().out.splitlines())
    assert row == {
        "image": str(red),
        "label": "1",
        "name": "thing",
        "score": "0.7500",
        "xmin": "20.0",
        "ymin": "10.0",
        "xmax": "60.0",
        "ymax": "30.0",
    }
    assert main(["detect", str(red), str(tmp_path / "boxes.json"), *ssd, "--threshold=0.8"]) == 0
    assert json.loads((tmp_path / "boxes.json").read_text()) == []


def test_labels_are_shown_by_their_display_name(ssd: list[str], red: Path, tmp_path: Path, capsys):
    (tmp_path / "labels.prototxt").write_text('item { name: "n1" label: 1 display_name: "A thing" }')
    assert main(["detect", str(red), *ssd]) == 0
    (row,) = csv.DictReader(capsys.readouterr().out.splitlines())
    assert row["name"] == "A thing"


def test_boxes_are_drawn(ssd: list[str], red: Path, tmp_path: Path, capsys):
    picture = tmp_path / "found.png"
    cv2.imwrite(str(red), np.full((400, 800, 3), (0, 0, 200), np.uint8))
    assert main(["detect", str(red), str(tmp_path / "boxes.json"), *ssd, "--draw", str(picture)]) == 0
    assert "boxes.json: 1 box in 1 image\n" in capsys.readouterr().out
    drawn, plain = cv2.imread(str(picture)), cv2.imread(str(red))
    assert drawn.shape == plain.shape
    assert (drawn[250, 200] != plain[250, 200]).any(), "the left edge"
    assert (drawn[250, 400] == plain[250, 400]).all(), "the middle"
    assert main(["detect", str(red), *ssd, "--draw", str(tmp_path / "found.txt")]) == 2
    assert "the suffix must be .png or .jpg" in capsys.readouterr().err
    cv2.imwrite(str(tmp_path / "blue.png"), np.zeros((40, 80, 3), np.uint8))
    several = ["detect", str(tmp_path), "--ext", "png", *ssd, "--draw"]
    assert main([*several, str(picture)]) == 2
    assert "no folder for the pictures of 3 images can be made there (File exists); name an" in capsys.readouterr().err
    assert main([*several, str(tmp_path / "drawn"), str(tmp_path / "boxes.csv")]) == 0, "an OUTPUT behind options"
    assert capsys.readouterr().out == f"{tmp_path / 'boxes.csv'}: 3 boxes in 3 images\n"
    assert sorted(path.name for path in (tmp_path / "drawn").iterdir()) == ["blue.png", "found.png", "red.png"]


# -- windows ------------------------------------------------------------------------------------------------


@pytest.fixture
def windows(red: Path, tmp_path: Path) -> Path:
    path = tmp_path / "windows.csv"
    path.write_text(f"filename,xmin,ymin,xmax,ymax\n{red},30,15,50,25\n{red},0,0,10,10\n")
    return path


def test_windows_of_a_list_are_classified(net: list[str], windows: Path, red: Path, tmp_path: Path, capsys):
    """As Caffe's detect.py: columns in its order, and the numbers of pycaffe's Detector."""
    options = ["-crop_mode", "list", "-context_pad=0", "-mean_file", "1,2,3"]
    assert main(["detect", str(windows), str(tmp_path / "found.csv"), *net, *options]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'found.csv'}: 2 windows x 3 classes\n"
    first, second = csv.reader((tmp_path / "found.csv").read_text().splitlines()[1:])
    assert (tmp_path / "found.csv").read_text().startswith("filename,ymin,xmin,ymax,xmax,class0,class1,class2\n")
    assert first[:5] == [str(red), "15", "30", "25", "50"]
    assert [float(score) for score in first[5:]] == pytest.approx([99, -2, 197])
    assert [float(score) for score in second[5:]] == pytest.approx([-1, -2, 197])


def test_windows_are_prepared_by_the_net(own: list[str], windows: Path, tmp_path: Path):
    assert main(["detect", str(windows), str(tmp_path / "found.csv"), *own, "--crop-mode=list", "--context-pad=0"]) == 0
    first, second = csv.reader((tmp_path / "found.csv").read_text().splitlines()[1:])
    assert [float(score) for score in first[5:]] == pytest.approx([45, -5, 95])
    assert [float(score) for score in second[5:]] == pytest.approx([-5, -5, 95])


def test_windows_as_hdf5_have_their_surroundings(net: list[str], windows: Path, red: Path, tmp_path: Path, capsys):
    detector = Detector(
        net[1], net[3], mean=np.array([1.0, 2, 3]), raw_scale=255, channel_swap=(2, 1, 0), context_pad=1
    )
    expected = detector.detect_windows([(str(red), [(15, 30, 25, 50), (0, 0, 10, 10)])])
    options = ["--crop-mode", "list", "--context-pad", "1", "--mean-file", "1,2,3"]
    assert main(["detect", str(windows), str(tmp_path / "found.h5"), *net, *options]) == 0
    with h5py.File(tmp_path / "found.h5") as file:
        assert file["filename"].asstr()[:].tolist() == [str(red)] * 2
        assert file["window"][:].tolist() == [[15, 30, 25, 50], [0, 0, 10, 10]]
        assert file["window"].attrs["columns"].tolist() == [b"ymin", b"xmin", b"ymax", b"xmax"]
        np.testing.assert_allclose(file["prediction"][:], [one["prediction"] for one in expected], rtol=1e-6)


def test_mistakes_about_windows(net: list[str], windows: Path, red: Path, tmp_path: Path, capsys):
    for arguments, message in (
        ([windows, "--crop-mode", "selective_search"], "--crop-mode selective_search needs a MATLAB package"),
        ([windows, tmp_path / "found.json", "--crop-mode", "list"], "windows are written as .csv or .h5 or .hdf5"),
        ([windows, "--crop-mode", "list", "--draw", "x.png"], "--draw shows the boxes of an SSD"),
        ([windows, "--crop-mode", "list"], "context_pad 16 does not fit the net's input of 4 x 4"),
        ([windows], "to classify the windows that it lists, give --crop-mode list"),
        ([windows, "--crop-mode", "list", "--context-pad", "-1"], "'-1' is no whole number of 0 or more"),
    ):
        assert main(["detect", *map(str, arguments), *net]) == 2
        assert message in capsys.readouterr().err
    windows.write_text(f"filename,xmin,ymin,xmax,ymax\n{red},30,50,50,55\n")
    assert main(["detect", str(windows), *net, "--crop-mode", "list", "--context-pad", "0"]) == 2
    assert f"the window [50, 30, 55, 50] is empty in an image '{red}' of 40 x 80" in capsys.readouterr().err


# -- unreadable images -------------------------------------------------------------------------------------


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A folder of two images and three files that are none."""
    folder = tmp_path / "damaged"
    folder.mkdir()
    for name in ("b.png", "e.png"):
        cv2.imwrite(str(folder / name), np.full((4, 4, 3), 100, np.uint8))
    whole = (folder / "b.png").read_bytes()
    for name, content in (("a.png", b""), ("c.jpg", b"no image"), ("d.png", whole[: len(whole) // 2])):
        (folder / name).write_bytes(content)
    return folder


def lines_of(said: str) -> list[str]:
    """The names of the images that a log says were left out."""
    return [Path(line.split("'")[1]).name for line in said.splitlines() if "left out: " in line]


@pytest.mark.parametrize("prepared", [False, True])
def test_classify_leaves_out_images_that_cannot_be_read(
    prepared: bool, damaged: Path, net, own, tmp_path: Path, capsys
):
    own = own if prepared else [*net, "--images-dim=4,4"]
    for output in ("found.csv", "found.json", "found.npy"):
        assert main(["classify", str(damaged), str(tmp_path / output), *own]) == 1
        assert lines_of(capsys.readouterr().err) == ["a.png", "c.jpg", "d.png"]
    rows = list(csv.reader((tmp_path / "found.csv").read_text().splitlines()[1:]))
    assert [Path(name).name for name, *_ in rows[::3]] == ["b.png", "e.png"]
    assert [Path(row["image"]).name for row in json.loads((tmp_path / "found.json").read_text())] == ["b.png", "e.png"]
    assert np.load(tmp_path / "found.npy").shape == (2, 3)
    np.save(tmp_path / "gray.npy", np.zeros((4, 4, 1)))
    absent = tmp_path / "absent.png"
    assert main(["classify", str(damaged / "b.png"), str(tmp_path / "gray.npy"), str(absent), *own]) == 1
    said = capsys.readouterr()
    assert lines_of(said.err)[-1] == "absent.png" and said.out.startswith(str(damaged / "b.png"))


def test_classify_without_a_readable_image(damaged: Path, net, tmp_path: Path, capsys):
    for name in ("b.png", "e.png"):
        (damaged / name).unlink()
    assert main(["classify", str(damaged), str(tmp_path / "found.csv"), *net]) == 2
    said = capsys.readouterr().err
    assert len(lines_of(said)) == 3 and "none of the 3 images can be read" in said
    assert not (tmp_path / "found.csv").exists()
    assert main(["classify", str(damaged / "a.png"), *net]) == 2  # one image: its own error
    assert "caffepy: error: image" in capsys.readouterr().err


def test_detect_leaves_out_images_that_cannot_be_read(damaged: Path, ssd, net, tmp_path: Path, capsys):
    assert main(["detect", str(damaged), *ssd, "--draw", str(tmp_path / "drawn")]) == 1
    said = capsys.readouterr()
    assert lines_of(said.err) == ["a.png", "c.jpg", "d.png"]
    assert [Path(line.split(",")[0]).name for line in said.out.splitlines()[1:]] == ["b.png", "e.png"]
    assert sorted(path.name for path in (tmp_path / "drawn").iterdir()) == ["b.png", "e.png"]
    windows = tmp_path / "list.csv"
    names = ("a.png", "b.png", "b.png", "c.jpg", "a.png", "d.png")
    windows.write_text("filename,xmin,ymin,xmax,ymax\n" + "".join(f"{damaged / name},0,0,2,2\n" for name in names))
    options = ["--crop-mode=list", "--context-pad=0"]
    for output in ("found.csv", "found.h5"):
        assert main(["detect", str(windows), str(tmp_path / output), *net, *options]) == 1
        said = capsys.readouterr()
        assert lines_of(said.err) == ["a.png", "c.jpg", "d.png"] and "2 windows x 3 classes" in said.out
    assert (tmp_path / "found.csv").read_text().count("b.png") == 2
    windows.write_text(f"filename,xmin,ymin,xmax,ymax\n{damaged / 'a.png'},0,0,2,2\n")
    assert main(["detect", str(windows), *net, *options]) == 2
