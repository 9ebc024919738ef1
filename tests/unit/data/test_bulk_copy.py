import struct
from types import SimpleNamespace

import numpy as np
import pytest
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st

from caffepy.backend.types import ImageSlot
from caffepy.data import bulk_copy
from caffepy.data.bulk_copy import copy_records
from caffepy.data.transform import DataTransformer
from caffepy.formats.proto.caffe_pb2 import TEST, TRAIN, BlobProto, BlobShape, Datum, TransformationParameter


def index_of(records, large=False):
    """Records one after the other, with bytes between them that belong to none; or each with pages of its own."""
    places, sizes, memory = [], [len(record) for record in records], b"\xff" * (4096 if large else 18)
    for record in records:
        if large:
            pages = -(-(16 + len(record)) // 4096)
            header = struct.pack("<QHHI", len(memory) // 4096, 0, 4, pages)
            places.append(len(memory) + 16)
            memory += (header + record).ljust(pages * 4096, b"\xff")
        else:
            places.append(len(memory))
            memory += record + b"\xff\xff"
    return SimpleNamespace(
        mapped=lambda: np.frombuffer(memory, np.uint8),
        page_size=4096 if large else 1 << 40,
        offsets=np.array(places, np.int64),
        sizes=np.array(sizes, np.int64),
    )


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """The kernel copies, however few the records are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bulk_copy._copy_records, "should_compile", lambda items, compiling: True)
        yield


def test_few_records_are_left_to_the_loader(monkeypatch):
    monkeypatch.setattr(bulk_copy._copy_records, "should_compile", lambda items, compiling: items > compiling)
    records = [datum(n) for n in range(4)]
    monkeypatch.setattr(bulk_copy, "_COMPILE_COST_IMAGES", 4)
    assert copy(records, (3, 4, 5))[0].tolist() == [1] * 4
    monkeypatch.setattr(bulk_copy, "_COMPILE_COST_IMAGES", 3)
    assert copy(records, (3, 4, 5))[0].tolist() == [0] * 4


def copy(records, shape, text="", phase=TRAIN, count=None, first=0, threads=1, resolve=None, large=False):
    """Which samples are left over, and the labels, places and pixels of the slots."""
    transformer = DataTransformer(
        text_format.Parse(text, TransformationParameter()), phase, resolve or (lambda path: path)
    )
    written = [r if isinstance(r, bytes) else r.SerializeToString() for r in records]
    slot = ImageSlot(count or len(records), *shape)
    slots = len(records) // slot.count
    block = np.full(slots * slot.size, 77, np.uint8)
    numbers = np.arange(len(records))
    left = copy_records(
        index_of(written, large), numbers, numbers + first, transformer, 5, 6, slot, block, threads, False
    )
    pending = np.ones(len(records), np.uint8) if left is None else left.pending
    return pending, [slot.parts(block[i * slot.size : (i + 1) * slot.size]) for i in range(slots)], transformer


def datum(number=0, shape=(3, 4, 5), **more):
    pixels = np.random.default_rng(number).integers(0, 256, shape, dtype=np.uint8)
    return Datum(**dict(zip(("channels", "height", "width"), shape, strict=True)), data=pixels.tobytes(), **more)


@settings(max_examples=60)
@given(
    channels=st.sampled_from([1, 2, 3, 7]),
    sizes=st.lists(st.tuples(*[st.integers(3, 9)] * 2), min_size=4, max_size=4),
    crop=st.sampled_from([0, 1, 3]),
    mirror=st.booleans(),
    phase=st.sampled_from([TRAIN, TEST]),
    first=st.integers(0, 2**40),
    threads=st.sampled_from([1, 2]),
    large=st.booleans(),
)
def test_crops_and_mirrors_are_the_transformers(channels, sizes, crop, mirror, phase, first, threads, large):
    if not crop:
        sizes = sizes[:1] * 4
    datums = [datum(n, (channels, *size), label=n - 1) for n, size in enumerate(sizes)]
    shape = (channels, crop, crop) if crop else (channels, *sizes[0])
    text = f"crop_size: {crop} mirror: {str(mirror).lower()}"
    left, slots, transformer = copy(datums, shape, text, phase, 2, first, threads, large=large)
    assert not left.any()
    crop_params = transformer.draw_crops(5, 6, np.arange(first, first + 4))
    for n, (one, size) in enumerate(zip(datums, sizes, strict=True)):
        labels, places, pixels = (part[n % 2] for part in slots[n // 2])
        top, at = transformer.crop_offset(*size, crop_params, n)
        image = np.frombuffer(one.data, np.uint8).reshape(channels, *size)
        np.testing.assert_array_equal(pixels, image[:, top : top + shape[1], at : at + shape[2]])
        assert places.tolist() == [crop_params.mirror[n], top, at]
        assert labels == n - 1


OTHERS = [
    b"",
    b"\xff\xff",
    b"\x08",
    datum().SerializeToString()[:-1],
    datum(encoded=True),
    Datum(channels=3, height=4, width=5, data=b"abc"),
    Datum(channels=3, height=4, width=5),
    Datum(channels=3, height=4, width=5, float_data=range(60)),
    Datum(channels=3, height=2**31 - 1, width=2**31 - 1, data=b"abc"),
    Datum(channels=3, height=-4, width=-5, data=bytes(60)),
    datum(shape=(3, 5, 4)),
    datum(shape=(1, 4, 15)),
    datum().SerializeToString() + b"\x22\x7f",
    datum().SerializeToString() + b"\x00\x01",
    datum().SerializeToString() + b"\x4b",
    datum().SerializeToString() + b"\x28" + b"\x80" * 10 + b"\x01",
    datum().SerializeToString() + b"\x20\x01",
    datum().SerializeToString() + b"\x4d\x01",
    datum().SerializeToString() + b"\x7a\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
]


@pytest.mark.parametrize("other", OTHERS)
def test_what_is_no_plain_image_is_left_over(other):
    left, [(labels, _, pixels)], _ = copy([datum(1, label=1), other, datum(2, label=2)], (3, 4, 5))
    assert left.tolist() == [0, 1, 0]
    assert labels[[0, 2]].tolist() == [1, 2]
    assert (pixels[1] == 77).all()


ALIKE = [
    datum(3, label=-1).SerializeToString() + b"\x28\x80\x02",
    b"\x28\x80\x02" + datum(3).SerializeToString(),
    datum(3, label=256, record_id=9, encoded=False),
    datum(3, label=256, float_data=[1, 2]),
    datum(3, label=256).SerializeToString() + b"\x7a\x02ab\x7d\x00\x00\x00\x00\x79" + bytes(8),
    b"\x22\x03abc" + datum(3, label=256).SerializeToString(),
]


@pytest.mark.parametrize("other", ALIKE)
def test_fields_may_come_in_any_order_with_others_among_them(other):
    """The last of a field counts, as in protobuf."""
    left, [(labels, _, pixels)], _ = copy([other], (3, 4, 5))
    assert left.tolist() == [0]
    assert labels.tolist() == [256]
    assert pixels[0].tobytes() == datum(3).data


@settings(max_examples=300)
@given(data=st.data())
def test_nothing_is_taken_that_protobuf_would_not_take(data):
    """Damaged records are either left over or mean the same to protobuf."""
    record = bytearray(datum(1, label=300).SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(record)))
        record[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    left, [(labels, _, pixels)], _ = copy([bytes(record)], (3, 4, 5))
    if not left[0]:
        parsed = Datum.FromString(bytes(record))
        assert (parsed.channels, parsed.height, parsed.width, parsed.encoded) == (3, 4, 5, False)
        assert pixels[0].tobytes() == parsed.data
        assert labels[0] == parsed.label


def test_images_must_have_the_size_of_the_mean_image(tmp_path):
    path = tmp_path / "mean"
    path.write_bytes(BlobProto(shape=BlobShape(dim=(3, 4, 5)), data=[0] * 60).SerializeToString())
    text = "crop_size: 3 mean_file: 'm'"
    left, _, _ = copy([datum(), datum(shape=(3, 5, 5))], (3, 3, 3), text, resolve=lambda _: path)
    assert left.tolist() == [0, 1]
