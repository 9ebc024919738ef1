"""Images as an Input layer's values: what the training net's data layer makes of the same files."""

from __future__ import annotations

import logging
from pathlib import Path

import cv2
import numpy as np
import pytest
from google.protobuf import text_format
from training import build_net

from caffepy.data.sources.databases import write_datums
from caffepy.errors import ConfigError, DataError
from caffepy.formats.proto import caffe_pb2
from caffepy.infer.input_transform import ImagePreparation, has_preparation
from caffepy.net.deploy import copy_preparation

RNG = np.random.default_rng(7)


def layer_of(text: str) -> caffe_pb2.LayerParameter:
    return text_format.Parse(text, caffe_pb2.LayerParameter())


def an_input(channels: int, height: int, width: int, fields: str = "") -> caffe_pb2.LayerParameter:
    shape = f"dim: 2 dim: {channels} dim: {height} dim: {width}"
    return layer_of(f'name: "in" type: "Input" top: "in" input_param {{ shape {{ {shape} }} }} {fields}')


def prepared(layer: caffe_pb2.LayerParameter) -> ImagePreparation:
    return ImagePreparation(layer, list(layer.input_param.shape[0].dim))


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """A coloured and a gray image of other sizes."""
    paths = [tmp_path / "color.png", tmp_path / "gray.png"]
    cv2.imwrite(str(paths[0]), RNG.integers(0, 256, (23, 37, 3), np.uint8))
    cv2.imwrite(str(paths[1]), RNG.integers(0, 256, (40, 21), np.uint8))
    return paths


def write_mean(path: Path, shape: tuple[int, int, int]) -> str:
    channels, height, width = shape
    values = RNG.uniform(0, 255, channels * height * width)
    path.write_bytes(
        caffe_pb2.BlobProto(num=1, channels=channels, height=height, width=width, data=values).SerializeToString()
    )
    return f'mean_file: "{path}"'


@pytest.mark.parametrize(
    ("image", "transform"),
    [
        ("new_height: 12 new_width: 14", "mean_value: 104 mean_value: 117 mean_value: 123 scale: 0.017"),
        ("new_height: 12 new_width: 14", "crop_size: 9 mean_value: 90 mirror: true"),
        ("new_height: 11 new_width: 14", "crop_h: 6 crop_w: 9"),
        ("new_height: 12 new_width: 14 is_color: false", "scale: 0.00390625"),
        ("new_height: 12 new_width: 14", "MEAN crop_size: 8"),
        ("", "resize_param { resize_mode: WARP height: 10 width: 13 interp_mode: AREA } mean_value: 3"),
        ("", "resize_param { resize_mode: FIT_SMALL_SIZE height: 16 width: 16 } crop_size: 15"),
        ("short_side: 16", "crop_size: 15"),
    ],
)
def test_values_are_those_of_the_data_layer(image: str, transform: str, files: list[Path], tmp_path: Path):
    transform = transform.replace("MEAN", write_mean(tmp_path / "mean.binaryproto", (3, 12, 14)))
    (tmp_path / "list").write_text("".join(f"{file} 0\n" for file in files))
    text = f"""name: "data" type: "ImageData" top: "data" top: "label" transform_param {{ {transform} }}
        image_data_param {{ source: "{tmp_path}/list" batch_size: 1 {image} }}"""
    source = layer_of(text)
    net = build_net(f"layer {{ {text.replace('mirror: true', '')} }}", caffe_pb2.TEST)
    target = an_input(*net.blobs["data"].shape[1:])
    assert copy_preparation(source, target) and has_preparation(target)
    made = prepared(target)
    for file in files:
        net.forward()
        wanted = net.blobs["data"].host_data()[0]
        assert np.array_equal(made(file), wanted), file
        assert np.array_equal(made(made.load(file)), wanted), "from an array"
    net.close()


def test_records_keep_their_values(tmp_path: Path):
    """A record that has the input's size is not changed by the resize; without a size images are resized to it."""
    pixels = RNG.integers(0, 256, (28, 28), np.uint8)
    cv2.imwrite(str(tmp_path / "digit.png"), pixels)
    cv2.imwrite(str(tmp_path / "colored.png"), cv2.cvtColor(pixels, cv2.COLOR_GRAY2BGR))
    datum = caffe_pb2.Datum(channels=1, height=28, width=28, data=pixels.tobytes())
    write_datums(tmp_path / "db", [(b"0", datum)])
    text = f"""name: "data" type: "Data" top: "data" top: "label" transform_param {{ scale: 0.00390625 }}
        data_param {{ source: "{tmp_path}/db" batch_size: 1 backend: LMDB }}"""
    net = build_net(f"layer {{ {text} }}", caffe_pb2.TEST)
    net.forward()
    target = an_input(1, 28, 28)
    assert copy_preparation(layer_of(text), target)
    for name in ("digit.png", "colored.png"):
        assert np.array_equal(prepared(target)(tmp_path / name), net.blobs["data"].host_data()[0])
    net.close()


def test_arrays_are_bytes_or_from_0_to_1(files: list[Path]):
    made = prepared(an_input(3, 8, 8, "transform_param { mean_value: 10 }"))
    pixels = made.load(files[0])
    wanted = made(files[0])
    assert np.array_equal(made(pixels / 255), wanted)
    assert np.array_equal(made(np.dstack([pixels, pixels[:, :, :1]])), wanted), "transparency is dropped"
    gray = made.load(files[1])[:, :, 0]
    assert np.array_equal(made(gray), made(files[1]))
    for array, message in (
        (np.full((4, 4, 3), 2.0), "values of uint8, or other numbers from 0 to 1"),
        (np.full((4, 4), np.nan), "values of uint8, or other numbers from 0 to 1"),
        (np.zeros((4, 4, 2)), r"an array of the shape \(4, 4, 2\) is no image"),
        (np.zeros((0, 4)), r"an array of the shape \(0, 4\) is no image"),
    ):
        with pytest.raises(DataError, match=message):
            made(array)


def test_a_small_crop_of_an_assumed_size_is_a_warning(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        prepared(an_input(3, 227, 227, "transform_param { crop_size: 227 }"))
        prepared(an_input(3, 28, 28, "transform_param { scale: 0.5 }"))
        prepared(
            an_input(3, 28, 28, "transform_param { crop_size: 28 } image_data_param { new_height: 64 new_width: 64 }")
        )
        assert not caplog.text
        prepared(an_input(3, 28, 28, "transform_param { crop_size: 28 }"))
    assert (
        "sees 28 x 28 of each image, which is resized to 256 x 256: less than half of it; give layer 'in'"
        in caplog.text
    )


def test_what_does_not_fit(files: list[Path], tmp_path: Path):
    mean = write_mean(tmp_path / "mean.binaryproto", (1, 8, 8))
    for layer, message in (
        (an_input(2, 8, 8, "transform_param { }"), r"layer 'in': its transform_param is for images of 1 or 3 channels"),
        (an_input(3, 8, 8, "image_data_param { new_height: 8 }"), "new_height and new_width must be set together"),
        (an_input(3, 8, 8, f"transform_param {{ {mean} mean_value: 1 }}"), "has both mean_file and mean_value"),
    ):
        with pytest.raises(ConfigError, match=message):
            prepared(layer)
    made = prepared(an_input(3, 8, 8, f"transform_param {{ {mean} }}"))
    with pytest.raises(DataError, match=r"image '.*color.png' .*8 x 8"):
        made(files[0])
    with pytest.raises(DataError, match=r"image '.*missing' cannot be read: No such file"):
        made(tmp_path / "missing")
    (tmp_path / "text.jpg").write_text("text")
    with pytest.raises(DataError, match=r"image '.*text.jpg' is an image of 4 bytes that OpenCV cannot decode"):
        made(tmp_path / "text.jpg")


def test_layers_without_images_get_no_preparation():
    data = layer_of('name: "d" type: "Data" top: "d"')
    assert not copy_preparation(data, an_input(2, 4, 4))
    assert not copy_preparation(layer_of('name: "d" type: "HDF5Data" top: "d"'), an_input(3, 4, 4))
    target = an_input(3, 4, 4, "transform_param { scale: 3 } image_data_param { new_height: 9 new_width: 9 }")
    assert copy_preparation(data, target, (6, 5))
    assert not target.transform_param.HasField("scale"), "the previous preparation is removed"
    assert (target.image_data_param.new_height, target.image_data_param.new_width) == (6, 5)


def test_fields_of_other_dialects_and_windows():
    resized = layer_of(
        'name: "d" type: "Data" top: "d" transform_param { scale: 2 resize_param { height: 8 width: 8 } crop_size: 4 }'
    )
    for nvidia in (False, True):
        target = an_input(3, 4, 4)
        assert copy_preparation(resized, target, None, nvidia)
        assert len(target.transform_param.resize_param) == (not nvidia), "Data has none in NVIDIA's dialect"
    resized.type = "WindowData"
    target = an_input(3, 4, 4)
    assert copy_preparation(resized, target, (9, 9), True)
    assert target.transform_param.scale == 2
    assert not target.transform_param.crop_size, "WindowData resizes windows to the crop"
    assert not target.HasField("image_data_param")
