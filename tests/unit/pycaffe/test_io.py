"""Images, records and the Transformer, against scikit-image and SciPy, which Caffe's io.py calls."""

from __future__ import annotations

import builtins

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caffepy.errors import DataError, UserError
from caffepy.formats.proto import caffe_pb2
from caffepy.pycaffe import io
from caffepy.utils.installation import MissingExtraError

pytest.importorskip("scipy", reason="scipy is not installed: pip install '.[test]'")

import scipy.ndimage
import skimage.io
import skimage.transform


def random_image(shape, low=0.0, high=1.0, seed=0):
    return np.random.default_rng(seed).uniform(low, high, shape).astype(np.float32)


# -- records ----------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3), min_size=0, max_size=5), st.booleans())
def test_blobprotos_keep_shape_data_and_diff(shape, diff):
    array = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    blob = io.array_to_blobproto(array, -array if diff else None)
    np.testing.assert_array_equal(io.blobproto_to_array(blob), array)
    if diff:
        np.testing.assert_array_equal(io.blobproto_to_array(blob, return_diff=True), -array)


def test_blobprotos_of_other_kinds():
    old = caffe_pb2.BlobProto(num=1, channels=1, height=2, width=3, data=range(6))
    assert io.blobproto_to_array(old).shape == (1, 1, 2, 3)
    double = caffe_pb2.BlobProto(double_data=[0.1], double_diff=[0.2], shape={"dim": [1]})
    assert io.blobproto_to_array(double)[0] == 0.1
    assert io.blobproto_to_array(double, return_diff=True)[0] == 0.2
    half = np.array([1.5, 2.5], np.float16)
    raw = caffe_pb2.BlobProto(raw_data=half.tobytes(), raw_data_type=caffe_pb2.FLOAT16, shape={"dim": [2]})
    np.testing.assert_array_equal(io.blobproto_to_array(raw), half)
    assert io.blobproto_to_array(caffe_pb2.BlobProto(data=[123])) == 123


def test_blobprotos_that_do_not_fit():
    with pytest.raises(ValueError, match=r"has 4 elements and the shape \(\), which do not fit"):
        io.blobproto_to_array(caffe_pb2.BlobProto(data=range(4)))
    with pytest.raises(ValueError, match="has 3 bytes, no whole number of float16"):
        io.blobproto_to_array(caffe_pb2.BlobProto(raw_data=b"123", raw_data_type=caffe_pb2.FLOAT16))
    with pytest.raises(ValueError, match=r"data has the shape \(2,\) and diff \(3,\)"):
        io.array_to_blobproto(np.zeros(2), np.zeros(3))


def test_lists_of_arrays_travel_as_bytes():
    arrays = [random_image((2, 3)), random_image((4,))]
    for function in (io.arraylist_to_blobprotovector_str, io.arraylist_to_blobprotovecor_str):
        for found, expected in zip(io.blobprotovector_str_to_arraylist(function(arrays)), arrays, strict=True):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.int64])
def test_datums_keep_the_array(dtype):
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    datum = io.array_to_datum(array.transpose(0, 2, 1), label=7)
    assert datum.label == 7
    assert bool(datum.data) == (dtype == np.uint8)
    np.testing.assert_array_equal(io.datum_to_array(datum), array.transpose(0, 2, 1))
    assert not io.array_to_datum(array).HasField("label")


def test_encoded_datums_are_decoded():
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    datum = caffe_pb2.Datum(data=cv2.imencode(".png", pixels)[1].tobytes(), encoded=True)
    np.testing.assert_array_equal(io.datum_to_array(datum), pixels.transpose(2, 0, 1))


def test_datums_that_do_not_fit():
    with pytest.raises(ValueError, match=r"Incorrect array shape.*\(2, 3\)"):
        io.array_to_datum(np.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"the Datum has 3 elements and the shape \(1, 2, 2\)"):
        io.datum_to_array(caffe_pb2.Datum(channels=1, height=2, width=2, data=b"123"))


# -- images -----------------------------------------------------------------------------------------


def write(path, pixels):
    assert cv2.imwrite(str(path), pixels)
    return path


@pytest.mark.parametrize("color", [True, False])
@pytest.mark.parametrize("name", ["color.png", "color.jpg", "gray.png", "gray.jpg", "alpha.png", "deep.png"])
def test_load_image_is_scikit_images(tmp_path, name, color):
    random = np.random.default_rng(1)
    kind = name.partition(".")[0]
    shape = {"gray": (9, 7), "deep": (9, 7), "alpha": (9, 7, 4)}.get(kind, (9, 7, 3))
    depth = np.uint16 if kind == "deep" else np.uint8
    path = write(tmp_path / name, random.integers(0, np.iinfo(depth).max, shape, dtype=depth))
    expected = skimage.img_as_float(skimage.io.imread(path, as_gray=not color)).astype(np.float32)
    expected = expected.reshape(9, 7, -1)[:, :, :3]
    found = io.load_image(str(path), color)
    assert found.dtype == np.float32
    assert found.shape == (9, 7, 3 if color else 1)
    assert found.flags.c_contiguous
    np.testing.assert_allclose(found, np.broadcast_to(expected, found.shape), atol=1e-6)


def test_images_that_cannot_be_loaded(tmp_path):
    with pytest.raises(DataError, match=r"image '.*absent.png' cannot be read: No such file"):
        io.load_image(tmp_path / "absent.png")
    for name, content in (("empty.jpg", b""), ("text.jpg", b"no image at all")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=f"image '.*{name}' is an image of .* bytes that OpenCV cannot decode"):
            io.load_image(tmp_path / name)
    (tmp_path / "cut.png").write_bytes(cv2.imencode(".png", np.zeros((9, 9), np.uint8))[1].tobytes()[:-20])
    with pytest.raises(DataError, match=r"image '.*cut.png' is"):
        io.load_image(tmp_path / "cut.png")


SIZES = st.tuples(st.integers(1, 12), st.integers(1, 12))


@given(SIZES, SIZES, st.sampled_from([1, 3]))
def test_linear_resizing_is_scikit_images(old, new, channels):
    image = random_image((*old, channels), -30, 200)
    low, high = image.min(), image.max()
    found = io.resize_image(image, new)
    assert found.dtype == np.float32
    if high > low:
        unit = skimage.transform.resize(
            (image - low) / (high - low), new, order=1, mode="constant", anti_aliasing=False
        )
        np.testing.assert_allclose(found, unit * (high - low) + low, atol=1e-6 * (high - low), rtol=0)


@given(SIZES, SIZES, st.sampled_from([2, 4, 5]))
def test_linear_resizing_of_other_channels_is_scipys(old, new, channels):
    image = random_image((*old, channels))
    factors = (new[0] / old[0], new[1] / old[1], 1)
    np.testing.assert_allclose(io.resize_image(image, new), scipy.ndimage.zoom(image, factors, order=1), atol=1e-6)


@pytest.mark.parametrize("order", [0, 2, 3])
def test_other_orders_are_scikit_images(order):
    image = random_image((7, 9, 3))
    low, high = image.min(), image.max()
    unit = (image - low) / (high - low)
    for new in ((14, 5), (3, 20)):
        expected = skimage.transform.resize(unit, new, order=order, mode="constant", anti_aliasing=False)
        np.testing.assert_allclose(io.resize_image(image, new, order), expected * (high - low) + low, atol=1e-5)


def test_constant_images_stay_constant():
    np.testing.assert_array_equal(io.resize_image(np.full((2, 2, 3), 5.0), (4, 3)), np.full((4, 3, 3), 5.0))


def test_resizing_that_cannot_be(monkeypatch):
    with pytest.raises(ValueError, match=r"an image of the shape \(2, 2\) cannot be resized to 3 x 3"):
        io.resize_image(np.zeros((2, 2)), (3, 3))
    with pytest.raises(ValueError, match="cannot be resized to 0 x 3"):
        io.resize_image(np.zeros((2, 2, 3)), (0, 3))
    original = builtins.__import__

    def without_scipy(name, *rest, **named):
        if name.startswith("scipy"):
            raise ImportError(name)
        return original(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without_scipy)
    with pytest.raises(MissingExtraError, match=r"scipy is not installed .* order 3: .*install .*\[images\]'"):
        io.resize_image(random_image((2, 2, 3)), (3, 3), 3)


def test_oversample_takes_corners_centre_and_mirrors():
    images = [random_image((6, 8, 3), seed=i) for i in range(2)]
    crops = io.oversample(images, (4, 5))
    assert crops.shape == (20, 4, 5, 3)
    image, first = images[1], crops[10:]
    np.testing.assert_array_equal(first[0], image[:4, :5])
    np.testing.assert_array_equal(first[1], image[:4, 3:])
    np.testing.assert_array_equal(first[2], image[2:, :5])
    np.testing.assert_array_equal(first[3], image[2:, 3:])
    np.testing.assert_array_equal(first[4], image[1:5, 1:6])
    np.testing.assert_array_equal(first[5:], first[:5, :, ::-1])


def test_crops_larger_than_images():
    with pytest.raises(ValueError, match="crops of 7 x 2 cannot be cut out of images of 6 x 8"):
        io.oversample([np.zeros((6, 8, 3))], (7, 2))


# -- Transformer ------------------------------------------------------------------------------------


def color_transformer(mean):
    transformer = io.Transformer({"data": (1, 3, 6, 5)})
    transformer.set_transpose("data", (2, 0, 1))
    transformer.set_channel_swap("data", (2, 1, 0))
    transformer.set_raw_scale("data", 255)
    transformer.set_mean("data", mean)
    transformer.set_input_scale("data", 0.017)
    return transformer


MEANS = [np.array([104.0, 117, 123]), random_image((3, 6, 5), 90, 130), random_image((6, 5), 90, 130)]


@pytest.mark.parametrize("mean", MEANS)
def test_preprocess_and_back(mean):
    transformer = color_transformer(mean)
    image = random_image((6, 5, 3))
    kept = image.copy()
    found = transformer.preprocess("data", image)
    full = mean.reshape(3, 1, 1) if mean.ndim == 1 else mean
    expected = (image.transpose(2, 0, 1)[::-1] * 255 - full) * 0.017
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(transformer.deprocess("data", found), image, atol=1e-5)
    np.testing.assert_allclose(transformer.deprocess("data", found[np.newaxis]), image, atol=1e-5)
    np.testing.assert_array_equal(image, kept)


def test_preprocess_leaves_the_image_alone():
    transformer = io.Transformer({"data": [1, 3, 6, 5]})
    transformer.set_raw_scale("data", 2)
    image = random_image((6, 5, 3))
    kept = image.copy()
    np.testing.assert_array_equal(transformer.preprocess("data", image), 2 * kept)
    np.testing.assert_array_equal(image, kept)


def test_preprocess_resizes():
    transformer = io.Transformer({"data": caffe_pb2.BlobShape(dim=[1, 3, 4, 4]).dim})
    image = random_image((6, 5, 3))
    np.testing.assert_array_equal(transformer.preprocess("data", image), io.resize_image(image, (4, 4)))


def test_gray_images_come_back():
    transformer = io.Transformer({"data": (1, 1, 6, 5)})
    transformer.set_transpose("data", (2, 0, 1))
    transformer.set_mean("data", np.array([0.25]))
    image = random_image((6, 5, 1))
    np.testing.assert_allclose(transformer.deprocess("data", transformer.preprocess("data", image)), image, atol=1e-6)
    plain = io.Transformer({"data": (1, 1, 6, 5)})
    assert plain.deprocess("data", np.zeros((1, 1, 6, 5))).shape == (6, 5)


@pytest.mark.parametrize("shape", [(3, 12, 10), (1, 12, 10), (12, 10)])
def test_means_of_another_size_are_resized(shape):
    transformer = io.Transformer({"data": (1, 3, 6, 5)})
    mean = random_image(shape, 90, 130)
    transformer.set_mean("data", mean)
    expected = io.resize_image(mean.reshape(-1, 12, 10).transpose(1, 2, 0), (6, 5)).transpose(2, 0, 1)
    np.testing.assert_array_equal(transformer.mean["data"], expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t.set_transpose("data", (1, 0)), "Transpose order needs to have the same number of dimensions"),
        (lambda t: t.set_channel_swap("data", (1, 0)), "Channel swap needs to have the same number of dimensions"),
        (lambda t: t.set_mean("data", np.zeros(2)), "Mean channels incompatible with input"),
        (lambda t: t.set_mean("data", np.zeros((1, 3, 6, 5))), r"Mean shape invalid: \(1, 3, 6, 5\)"),
        (lambda t: t.set_mean("data", np.zeros((2, 6, 5))), r"Mean shape invalid: \(2, 6, 5\)"),
        (lambda t: t.set_raw_scale("label", 2), "label is not one of the net inputs: .*data"),
        (lambda t: t.set_input_scale("label", 2), "label is not one of the net inputs"),
        (lambda t: t.preprocess("label", np.zeros((6, 5, 3))), "label is not one of the net inputs"),
        (lambda t: t.deprocess("label", np.zeros((3, 6, 5))), "label is not one of the net inputs"),
    ],
)
def test_what_does_not_fit_is_said(call, message):
    with pytest.raises(UserError, match=message):
        call(io.Transformer({"data": (1, 3, 6, 5)}))


def test_wrong_means_are_value_errors():
    with pytest.raises(ValueError, match="Mean channels"):
        io.Transformer({"data": (1, 3, 6, 5)}).set_mean("data", np.zeros(2))
