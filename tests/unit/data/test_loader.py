import logging

import cv2
import image_files
import numpy as np
import pytest
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_records import Records

from caffepy.backend.types import ImageSlot
from caffepy.data import bulk_copy
from caffepy.data.images import decode_plain_jpeg
from caffepy.data.loader import DatumLoader, ImageFileLoader
from caffepy.data.prefetch import Batch
from caffepy.data.sampler import Sampler
from caffepy.data.sources.databases import LmdbSource, write_datums
from caffepy.data.sources.image_list import ImageListSource
from caffepy.data.transform import DataTransformer
from caffepy.data.workers import Workers
from caffepy.errors import DataError
from caffepy.formats.proto.caffe_pb2 import TEST, TRAIN, BlobProto, BlobShape, Datum, TransformationParameter


def image_datum(number, channels=3, height=4, width=5, **more):
    pixels = np.random.default_rng(number).integers(0, 256, channels * height * width, dtype=np.uint8)
    return Datum(channels=channels, height=height, width=width, data=pixels.tobytes(), label=number, **more)


def loader(datums, text="", threads=1, **order):
    transformer = DataTransformer(text_format.Parse(text, TransformationParameter()), TRAIN, where="layer 'd' (Data)")
    order = Sampler(len(datums), **order)
    return DatumLoader(Records(datums), order, transformer, 1, 2, "layer 'd' (Data)", threads)


def load(subject, first, count, tops=2):
    batch = Batch(tops)
    subject.load(first, count, batch)
    return batch.arrays


@settings(max_examples=40)
@given(
    count=st.integers(1, 12),
    first=st.integers(0, 30),
    labels=st.booleans(),
    text=st.sampled_from(["", "scale: 0.5", "mirror: true", "mean_value: 3 mirror: true", "crop_size: 3"]),
)
def test_all_kinds_of_records_agree(count, first, labels, text):
    """Bytes, decoded images and floats."""
    datums = [image_datum(n) for n in range(7)]
    of_bytes = load(loader(datums, text), first, count, 1 + labels)
    decoded = [Datum(data=encode(datum), encoded=True, label=datum.label) for datum in datums]
    floats = [Datum(channels=3, height=d.height, width=d.width, float_data=list(d.data), label=d.label) for d in datums]
    for other in (decoded, floats):
        for found, expected in zip(load(loader(other, text), first, count, 1 + labels), of_bytes, strict=True):
            np.testing.assert_array_equal(found, expected)
    if labels:
        assert of_bytes[1].tolist() == [n % 7 for n in range(first, first + count)]


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


def test_force_color_leaves_other_records_alone(caplog):
    with caplog.at_level(logging.WARNING):
        subject = loader([image_datum(0, 1)], "force_color: true")
        load(subject, 0, 3)
    assert caplog.text.count("layer 'd' (Data): force_color and force_gray affect encoded images") == 1


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("text", "mode"),
    [("force_color: true", cv2.IMREAD_COLOR), ("force_gray: true", cv2.IMREAD_GRAYSCALE), ("", cv2.IMREAD_UNCHANGED)],
)
def test_encoded_images_are_made_color_or_gray(text, mode, channels):
    image = np.random.default_rng(2).integers(0, 256, (4, 5, channels), dtype=np.uint8)
    data = cv2.imencode(".png", image)[1]
    wanted = np.atleast_3d(cv2.imdecode(data, mode)).transpose(2, 0, 1)
    found = load(loader([Datum(data=data.tobytes(), encoded=True)], text), 0, 1)[0]
    np.testing.assert_array_equal(found[0], wanted)


def png(number, channels):
    return Datum(data=encode(image_datum(number, channels)), encoded=True, label=number)


@pytest.mark.parametrize("text", ["", "crop_size: 3", "mean_value: 1 mean_value: 2 mean_value: 3"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_gray_image_in_a_color_set_is_named(text, count):
    subject = loader([png(0, 3), png(1, 3), png(2, 1)], text)
    wanted = (
        r"^layer 'd' \(Data\): list 'x': record 2 \(key 'k2'\) is gray \(1 channel\), but record 0 has 3: set "
        r"transform_param \{ force_color: true \}"
    )
    with pytest.raises(DataError, match=wanted):
        load(subject, 3 - count, count)
    force = loader([png(0, 3), png(1, 3), png(2, 1)], f"{text} force_color: true")
    assert load(force, 0, 3)[0].shape[:2] == (3, 3)


def test_a_color_image_in_a_gray_set_is_named():
    with pytest.raises(DataError, match=r"record 1 \(key 'k1'\) has 3 channels, but record 0 is gray .* force_gray: t"):
        load(loader([png(0, 1), png(1, 3)]), 0, 2)


def test_a_first_image_that_is_gray_does_not_fit_three_means():
    wanted = r"record 0 \(key 'k0'\) is gray \(1 channel\), but transform_param has 3 mean_value; .* force_color: true"
    with pytest.raises(DataError, match=wanted):
        loader([png(0, 1), png(1, 3)], "mean_value: 1 mean_value: 2 mean_value: 3").sample_shape()


def test_raw_images_of_other_channels_are_named():
    with pytest.raises(DataError, match=r"record 1 \(key 'k1'\) is gray .*, but record 0 has 3: rebuild the database"):
        load(loader([image_datum(0, 3), image_datum(1, 1)]), 0, 2)


def test_samples_are_described():
    subject = loader([image_datum(n) for n in range(4)], shuffle=True, seed=1)
    labels = load(subject, 8, 4)[1]
    for place, label in enumerate(labels):
        assert subject.describe(8 + place) == f"record {int(label)} (key 'k{int(label)}') of list 'x'"


# -- bytes -----------------------------------------------------------------------------------------------


def load_bytes(subject, firsts, count, shape):
    """What `load_bytes` says, and the labels, places and pixels of the slots that it filled."""
    slot = ImageSlot(count, *shape)
    block = np.zeros(len(firsts) * slot.size, np.uint8)
    filled = subject.load_bytes(firsts, count, slot, block)
    return filled, [slot.parts(block[i * slot.size : (i + 1) * slot.size]) for i in range(filled)]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", ["plain", "encoded", "mixed"])
def test_bytes_are_those_of_the_records(kind, threads):
    datums = [image_datum(n) for n in range(7)]
    written = [
        Datum(data=encode(d), encoded=True, label=d.label) if kind == "encoded" or (kind == "mixed" and n % 3) else d
        for n, d in enumerate(datums)
    ]
    subject = loader(written, threads=threads)
    filled, slots = load_bytes(subject, [5, 100], 9, (3, 4, 5))
    assert filled == 2
    for first, (labels, places, pixels) in zip([5, 100], slots, strict=True):
        numbers = [n % 7 for n in range(first, first + 9)]
        assert labels.tolist() == numbers
        assert not places.any()
        assert [image.tobytes() for image in pixels] == [datums[n].data for n in numbers]
    subject.close()
    subject.close()


def test_places_are_those_of_the_float_way():
    subject = loader([image_datum(n, 1, 9, 8) for n in range(4)], "crop_size: 3 mirror: true")
    _, [(_, places, pixels)] = load_bytes(subject, [20], 40, (1, 3, 3))
    images = load(subject, 20, 40)[0]
    for (mirror, _, _), bytes_, floats in zip(places, pixels, images, strict=True):
        np.testing.assert_array_equal(bytes_[:, :, ::-1] if mirror else bytes_, floats)
    assert len({tuple(place) for place in places.tolist()}) > 20


@pytest.mark.parametrize(("datum", "message"), BAD)
def test_slots_before_a_bad_record_are_filled(datum, message):
    datums = [image_datum(n) for n in range(9)]
    datums[6] = datum
    subject = loader(datums, threads=2)
    assert load_bytes(subject, [0, 2, 4, 6], 2, (3, 4, 5))[0] == 3
    assert load_bytes(subject, [6], 2, (3, 4, 5))[0] == 0
    subject.close()


@pytest.mark.parametrize(
    "text", ["crop_size: 6 mirror: true", "crop_size: 6 img_rand_resize_lower: 8 img_rand_resize_upper: 12"]
)
@pytest.mark.parametrize("threads", [1, 3])
def test_encoded_images_located_in_bulk_are_those_read_one_by_one(text, threads, tmp_path, monkeypatch):
    datums = [image_datum(n, height=9 + n % 3, width=11) for n in range(7)]
    encoded = [Datum(data=encode(d), encoded=True, label=d.label - 2) for d in datums]
    mixed = [one if n % 3 else datum for n, (one, datum) in enumerate(zip(encoded, datums, strict=True))]
    damaged = [*mixed[:6], Datum(data=encode(datums[6])[:40], encoded=True)]
    write_datums(tmp_path / "db", ((b"%d" % n, datum) for n, datum in enumerate(damaged)))
    monkeypatch.setattr(bulk_copy._copy_records, "should_compile", lambda items, compiling: True)
    results = []
    for bulk in (True, False):
        param = text_format.Parse(text, TransformationParameter())
        transformer = DataTransformer(param, TRAIN, where="layer 'd'")
        source, order = LmdbSource(tmp_path / "db"), Sampler(7)
        subject = DatumLoader(source if bulk else Records(damaged), order, transformer, 1, 2, "layer 'd'", threads)
        results.append(load_bytes(subject, [0, 3, 6], 3, (3, 6, 6)))
        assert subject.stages.totals()["decoding"] > 0
        subject.close()
    (filled, slots), (expected_filled, expected) = results
    assert filled == expected_filled == 2, "the slot with the damaged record is left to `load`"
    for found, wanted in zip(slots, expected, strict=True):
        for part, wanted_part in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(part, wanted_part)
    with pytest.raises(DataError, match=r"record 6 .*PNG"):
        load(subject, 6, 3)


JPEG_SETTINGS = [
    ("crop_size: 24 mirror: true", TRAIN, False),
    ("crop_size: 24 force_color: true", TEST, False),
    ("crop_size: 24 mirror: true mean_file: 'm'", TRAIN, False),
    ("crop_size: 24 mirror: true mean_file: 'm'", TRAIN, True),
    ("mirror: true", TRAIN, True),
    ("crop_size: 24 img_rand_resize_lower: 30 img_rand_resize_upper: 60 allow_upscale: true", TRAIN, False),
]


@pytest.mark.parametrize(("text", "phase", "nvidia"), JPEG_SETTINGS)
def test_jpegs_located_in_bulk_are_those_read_one_by_one(text, phase, nvidia, tmp_path, monkeypatch):
    """Files of all kinds, one whose scan is damaged, and some of another size."""
    mean = BlobProto(shape=BlobShape(dim=(3, 40, 56)), data=np.arange(3 * 40 * 56) % 251)
    (tmp_path / "mean").write_bytes(mean.SerializeToString())
    by_name, other = image_files.files(), image_files.jpeg(image_files.smooth_image(7, 41, 56))
    damaged = by_name["baseline"][:-40] + bytes(38) + by_name["baseline"][-2:]
    images = [*(image_files.files(n)["baseline"] for n in range(20)), damaged]
    images += [file for name, file in by_name.items() if name != "CMYK"] + [other] * 3
    datums = [Datum(data=data, encoded=True, label=n - 3) for n, data in enumerate(images)]
    write_datums(tmp_path / "db", ((b"%03d" % n, datum) for n, datum in enumerate(datums)))
    monkeypatch.setattr(bulk_copy._copy_records, "should_compile", lambda items, compiling: True)
    sizes = []

    def counted(file, height, width):
        sizes.append((height, width))
        return decode_plain_jpeg(file, height, width)

    monkeypatch.setattr("caffepy.data.loader.decode_plain_jpeg", counted)
    count, results = len(datums) // 4, []
    for bulk in (True, False):
        param = text_format.Parse(text, TransformationParameter())
        transformer = DataTransformer(param, phase, lambda _: tmp_path / "mean", "layer 'd'", nvidia)
        source = LmdbSource(tmp_path / "db") if bulk else Records(datums)
        subject = DatumLoader(source, Sampler(len(datums)), transformer, 1, 2, "layer 'd'", 2)
        shape = subject.sample_shape()
        results.append(load_bytes(subject, range(0, len(datums), count), count, shape))
        subject.close()
    assert len(sizes) >= 24, "of the files that are plain"
    assert results[0][0] == results[1][0] >= 2
    for found, wanted in zip(results[0][1][: results[0][0]], results[1][1], strict=False):
        for part, wanted_part in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(part, wanted_part)


def test_floats_are_no_bytes():
    float_datum = Datum(channels=3, height=4, width=5, float_data=range(60))
    assert loader([float_datum]).byte_images(2) is None
    assert load_bytes(loader([image_datum(0), float_datum]), [0, 1], 1, (3, 4, 5))[0] == 1


def test_what_becomes_of_bytes():
    text = "crop_size: 2 scale: 0.5 mean_value: 1 mean_value: 2 mean_value: 3"
    images = loader([image_datum(0)], text).byte_images(6)
    assert images.slot == ImageSlot(6, 3, 2, 2)
    assert images.mean.tolist() == [[[1]], [[2]], [[3]]]
    assert images.scale == 0.5


# -- image lists -----------------------------------------------------------------------------------------


def image_list(tmp_path, lines):
    for n in range(3):
        cv2.imwrite(str(tmp_path / f"my image {n}.png"), np.full((4, 6, 3), 10 * n, np.uint8))
    (tmp_path / "list.txt").write_text("\n".join(lines) + "\n")
    return ImageListSource(tmp_path / "list.txt", f"{tmp_path}/")


def test_images_of_a_list(tmp_path):
    source = image_list(tmp_path, [f"my image {n}.png {n + 5}" for n in range(3)])
    subject = ImageFileLoader(
        source, Sampler(3), DataTransformer(TransformationParameter(), TRAIN), color=False, size=(2, 3)
    )
    images, labels = load(subject, 1, 3)
    assert images.shape == (3, 1, 2, 3)
    assert images[:, 0, 0, 0].tolist() == [10, 20, 0]
    assert labels.tolist() == [6, 7, 5]


def test_a_fingerprint_tells_lists_apart_and_not_their_places(tmp_path):
    def fingerprint(name, labels):
        (tmp_path / name).mkdir()
        lines = [f"my image {n}.png {label}" for n, label in enumerate(labels)]
        return image_list(tmp_path / name, lines).fingerprint()

    first = fingerprint("a", [5, 6, 7])
    assert first == fingerprint("b", [5, 6, 7])
    assert first["the number of images"] == "3"
    other = fingerprint("c", [5, 0, 7])
    assert {key for key in first if first[key] != other[key]} == {"the hash of the labels"}
    shorter = fingerprint("d", [5, 6])
    assert shorter["the hash of the last image"] != first["the hash of the last image"]
    with pytest.raises(DataError, match=r"image list '.*': record 0 \('.*absent.png'\) cannot be read: No such file"):
        image_list(tmp_path, ["absent.png 1"]).fingerprint()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], r"image list '.*list\.txt' names no images; each line must be a path, a space and a label"),
        (["a.png 1", "b.png"], r"list\.txt':2: 'b\.png' is not a label; a line is a path, a space"),
        (["a.png one"], r"list\.txt':1: 'one' is not a label"),
    ],
)
def test_bad_lists(tmp_path, lines, message):
    with pytest.raises(DataError, match=message):
        image_list(tmp_path, lines)


def test_absent_list_and_image(tmp_path):
    with pytest.raises(DataError, match=r"image list '.*nothing' cannot be read: No such file"):
        ImageListSource(tmp_path / "nothing")
    source = image_list(tmp_path, ["absent.png 1"])
    subject = ImageFileLoader(source, Sampler(1), DataTransformer(TransformationParameter(), TRAIN), where="layer 'i'")
    with pytest.raises(
        DataError, match=r"layer 'i': .*: record 0 \('.*absent\.png'\) cannot be read: No such file.*root_folder"
    ):
        load(subject, 0, 1)


@pytest.mark.parametrize(("side", "encoded", "several"), [(8, False, False), (256, False, True), (8, True, True)])
def test_small_images_that_are_not_compressed_are_read_by_one_thread(side, encoded, several, monkeypatch):
    """Python does most of the work then, and several threads wait for each other."""
    threads = []
    monkeypatch.setattr(Workers, "run", lambda self, function, items: threads.append(self.threads))
    image = np.zeros((1, side, side), np.uint8)
    pixels = cv2.imencode(".png", image[0])[1].tobytes() if encoded else image.tobytes()
    datum = Datum(channels=1, height=side, width=side, data=pixels, encoded=encoded)
    subject = loader([datum] * 4, threads=3)
    slot = ImageSlot(4, 1, side, side)
    subject.load_bytes([0], 4, slot, np.zeros(slot.size, np.uint8))
    assert threads == [3 if several else 1]
