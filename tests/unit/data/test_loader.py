import logging

import cv2
import numpy as np
import pytest
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st

from caffepy.data.image_list import ImageListSource
from caffepy.data.loader import DatumLoader, ImageFileLoader, ImageLoader
from caffepy.data.order import RecordOrder
from caffepy.data.prefetch import Batch
from caffepy.data.transform import Transformer
from caffepy.errors import DataError, ShapeError
from caffepy.proto.caffe_pb2 import TRAIN, Datum, TransformationParameter


class Records:
    """A source of records in memory."""

    description = "list 'x'"

    def __init__(self, datums):
        self.records = [datum if isinstance(datum, bytes) else datum.SerializeToString() for datum in datums]

    def __len__(self):
        return len(self.records)

    def read(self, number):
        return memoryview(self.records[number])

    def record_name(self, number):
        return f"record {number} (key 'k{number}')"

    def close(self):
        pass


def image_datum(number, channels=3, height=4, width=5, **more):
    pixels = np.random.default_rng(number).integers(0, 256, channels * height * width, dtype=np.uint8)
    return Datum(channels=channels, height=height, width=width, data=pixels.tobytes(), label=number, **more)


def loader(datums, text="", **order):
    transformer = Transformer(text_format.Parse(text, TransformationParameter()), TRAIN, where="layer 'd' (Data)")
    return DatumLoader(Records(datums), RecordOrder(len(datums), **order), transformer, 1, 2, "layer 'd' (Data)")


def load(subject, first, count, tops=2):
    batch = Batch(tops)
    subject.load(first, count, batch)
    return batch.arrays


@settings(deadline=None, max_examples=40)
@given(
    count=st.integers(1, 12), first=st.integers(0, 30), height=st.sampled_from([1, 4, 100]), labels=st.booleans(),
    text=st.sampled_from(["", "scale: 0.5", "mirror: true", "mean_value: 3 mirror: true"]),
)  # fmt: skip
def test_all_ways_of_loading_agree(count, first, height, labels, text):
    """At once, one by one, as decoded images and as floats."""
    datums = [image_datum(n, height=height, width=100 if height == 100 else 5) for n in range(7)]
    at_once = load(loader(datums, text), first, count, 1 + labels)
    one_by_one = loader(datums, text)
    batch = Batch(1 + labels)
    ImageLoader.load(one_by_one, first, count, batch)
    decoded = [Datum(data=encode(datum), encoded=True, label=datum.label) for datum in datums]
    floats = [Datum(channels=3, height=d.height, width=d.width, float_data=list(d.data), label=d.label) for d in datums]
    for other in (batch.arrays, load(loader(decoded, text), first, count, 1 + labels),
                  load(loader(floats, text), first, count, 1 + labels)):  # fmt: skip
        for found, expected in zip(other, at_once, strict=True):
            np.testing.assert_array_equal(found, expected)
    if labels:
        assert at_once[1].tolist() == [n % 7 for n in range(first, first + count)]


def encode(datum):
    pixels = np.frombuffer(datum.data, np.uint8).reshape(datum.channels, datum.height, datum.width)
    return cv2.imencode(".png", np.ascontiguousarray(pixels.transpose(1, 2, 0)))[1].tobytes()


@pytest.mark.parametrize("size", [5, 200])
def test_what_is_loaded_does_not_depend_on_the_batch(size):
    subject = loader([image_datum(n, 3, size, size) for n in range(5)], f"mirror: true crop_size: {size - 2}")
    whole = load(subject, 3, 12)[0]
    parts = [load(subject, 3, 5)[0], load(subject, 8, 7)[0]]
    np.testing.assert_array_equal(whole, np.concatenate(parts))


def test_sizes_may_vary_under_a_crop():
    subject = loader([image_datum(0, 3, 6, 7), image_datum(1, 3, 5, 9), image_datum(2, 3, 6, 7)], "crop_size: 4")
    assert load(subject, 0, 3)[0].shape == (3, 3, 4, 4)


def test_batches_may_have_different_shapes():
    subject = loader([image_datum(0, 1, 2, 3), image_datum(1, 1, 4, 2)])
    assert [load(subject, n, 1)[0].shape for n in range(3)] == [(1, 1, 2, 3), (1, 1, 4, 2), (1, 1, 2, 3)]


BAD = [
    (b"\xff\xff", r"is not a Datum \("),
    (Datum(channels=3, height=4, width=5, data=b"abc"), r"is a Datum of 3 bytes, but its .* 3 x 4 x 5 = 60"),
    (Datum(channels=3, height=4, width=5, float_data=[1]), r"is a Datum of 1 floats, but its "),
    (Datum(data=b"no image", encoded=True), "is an image of 8 bytes that OpenCV cannot decode"),
    (
        image_datum(2, 3, 5, 5),
        r"is 3 x 5 x 5 and makes 3 x 5 x 5, but others of its batch make 3 x 4 x 5; set crop_size",
    ),
]


@pytest.mark.parametrize(("datum", "message"), BAD)
def test_a_bad_record_is_named(datum, message):
    subject = loader([image_datum(0), image_datum(1), datum])
    with pytest.raises(DataError, match=rf"^layer 'd' \(Data\): list 'x': record 2 \(key 'k2'\) {message}"):
        load(subject, 0, 3)
    assert subject.reading == "record 2 of list 'x'"
    np.testing.assert_array_equal(load(subject, 0, 2)[1], [0, 1])


def test_a_bad_first_record_is_named():
    with pytest.raises(DataError, match=r"record 0 \(key 'k0'\) is a Datum of 3 bytes"):
        loader([BAD[1][0]]).sample_shape()


def test_batches_that_are_too_large_are_refused_before_they_are_made():
    with pytest.raises(ShapeError, match=r"^layer 'd' \(Data\): shape 1000000000 3 4 5 .* is not possible"):
        subject = loader([image_datum(0)])
        subject._records = lambda first, count: [subject._source.read(0)]
        load(subject, 0, 10**9)


def test_force_color_leaves_other_records_alone(caplog):
    with caplog.at_level(logging.WARNING):
        subject = loader([image_datum(0, 1)], "force_color: true")
        ImageLoader.load(subject, 0, 3, Batch(2))
    assert caplog.text.count("layer 'd' (Data): force_color and force_gray only change encoded images") == 1


@pytest.mark.parametrize(("text", "channels"), [("force_color: true", 3), ("force_gray: true", 1), ("", 3)])
def test_encoded_images_are_made_color_or_gray(text, channels):
    datum = Datum(data=encode(image_datum(0)), encoded=True)
    assert load(loader([datum], text), 0, 2)[0].shape == (2, channels, 4, 5)


def test_samples_are_described():
    subject = loader([image_datum(n) for n in range(4)], shuffle=True, seed=1)
    labels = load(subject, 8, 4)[1]
    for place, label in enumerate(labels):
        assert subject.describe(8 + place) == f"record {int(label)} (key 'k{int(label)}') of list 'x'"


# -- image lists -----------------------------------------------------------------------------------------


def image_list(tmp_path, lines):
    for n in range(3):
        cv2.imwrite(str(tmp_path / f"my image {n}.png"), np.full((4, 6, 3), 10 * n, np.uint8))
    (tmp_path / "list.txt").write_text("\n".join(lines) + "\n")
    return ImageListSource(tmp_path / "list.txt", f"{tmp_path}/")


def test_images_of_a_list(tmp_path):
    source = image_list(tmp_path, [f"my image {n}.png {n + 5}" for n in range(3)])
    subject = ImageFileLoader(
        source, RecordOrder(3), Transformer(TransformationParameter(), TRAIN), color=False, size=(2, 3)
    )
    images, labels = load(subject, 1, 3)
    assert images.shape == (3, 1, 2, 3)
    assert images[:, 0, 0, 0].tolist() == [10, 20, 0]
    assert labels.tolist() == [6, 7, 5]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], r"image list '.*list\.txt' names no images; each line must be a path, a space and a label"),
        (["a.png 1", "b.png"], r"list\.txt':2: 'b\.png' is no label; a line is a path, a space and a whole number"),
        (["a.png one"], r"list\.txt':1: 'one' is no label"),
    ],
)
def test_bad_lists(tmp_path, lines, message):
    with pytest.raises(DataError, match=message):
        image_list(tmp_path, lines)


def test_absent_list_and_image(tmp_path):
    with pytest.raises(DataError, match=r"image list '.*nothing' cannot be read: No such file"):
        ImageListSource(tmp_path / "nothing")
    source = image_list(tmp_path, ["absent.png 1"])
    subject = ImageFileLoader(source, RecordOrder(1), Transformer(TransformationParameter(), TRAIN), where="layer 'i'")
    with pytest.raises(
        DataError, match=r"layer 'i': .*: record 0 \('.*absent\.png'\) cannot be read: No such file.*root_folder"
    ):
        load(subject, 0, 1)
