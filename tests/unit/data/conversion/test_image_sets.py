"""convert_imageset: the bytes that Caffe's tool writes, against Datums made by hand."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import cv2
import lmdb
import numpy as np
import pytest
from databases import BACKENDS, NO_PLYVEL

from caffepy.data.conversion import image_sets
from caffepy.data.conversion.image_sets import Database, ImageOptions, convert_image_set
from caffepy.errors import ConfigError, DataError
from caffepy.formats.proto.caffe_pb2 import Datum

RNG = np.random.default_rng(7)
PICTURE = RNG.integers(0, 256, (5, 7, 3), np.uint8)
"""Height, width, then blue, green, red."""


def records(path: Path) -> list[tuple[bytes, bytes]]:
    with lmdb.open(str(path), readonly=True, lock=False) as environment, environment.begin() as transaction:
        return list(transaction.cursor())


def convert(listing: str = "list.txt", seed: int | None = None, root: str = "img/", **options) -> list:
    """The records of a new LMDB."""
    convert_image_set(root, Path(listing), Database(Path("db")), ImageOptions(threads=2, **options), seed)
    return records(Path("db"))


@pytest.fixture(autouse=True)
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three images of one size and a list of them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "img" / "a b").mkdir(parents=True)
    cv2.imwrite("img/a b/1.png", PICTURE)
    cv2.imwrite("img/2.PNG", PICTURE[::-1].copy())
    cv2.imwrite("img/3.jpg", PICTURE)
    Path("list.txt").write_text("a b/1.png 3\n2.PNG -1\n\n3.jpg 70000\n")


def plain(pixels: np.ndarray, label: int) -> bytes:
    """Fields in the order of their numbers, `encoded` set to false, as Caffe's CVMatToDatum leaves them."""
    planes = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    channels, height, width = planes.shape
    datum = Datum(channels=channels, height=height, width=width, data=planes.tobytes(), label=label, encoded=False)
    return datum.SerializeToString()


def test_keys_and_records_are_those_of_caffe():
    jpeg = cv2.imread("img/3.jpg", cv2.IMREAD_COLOR)
    assert convert() == [
        (b"00000000_a b/1.png", plain(PICTURE, 3)),
        (b"00000001_2.PNG", plain(PICTURE[::-1], -1)),
        (b"00000002_3.jpg", plain(jpeg, 70000)),
    ]


def test_columns_of_tabs_and_spaces_are_one_space():
    wanted = convert()
    Path("columns.txt").write_bytes(b"a b/1.png\t3\r\n2.PNG    -1 \n3.jpg \t70000\n")
    shutil.rmtree("db")
    assert convert("columns.txt") == wanted


def test_the_bytes_by_hand():
    cv2.imwrite("img/tiny.png", np.array([[[1, 2, 3], [4, 5, 6]]], np.uint8))
    Path("tiny.txt").write_text("tiny.png 9\n")
    # channels 3, height 1, width 2, data of 6 bytes in planes of blue, green and red, label 9, encoded false
    assert convert("tiny.txt")[0][1] == bytes.fromhex("0803 1001 1802 2206 010402050306 2809 3800")


def test_resized_and_gray_images():
    gray = cv2.imread("img/a b/1.png", cv2.IMREAD_GRAYSCALE)
    assert convert(gray=True, resize_height=9, resize_width=4)[0][1] == plain(cv2.resize(gray, (4, 9)), 3)


def test_large_images_have_long_lengths():
    cv2.imwrite("img/large.png", np.full((200, 300, 3), 7, np.uint8))
    Path("large.txt").write_text("large.png 0\n")
    assert convert("large.txt")[0][1] == plain(np.full((200, 300, 3), 7, np.uint8), 0)


def test_files_pass_through_as_they_are():
    assert [record for _, record in convert(encoded=True)] == [
        Datum(data=Path(f"img/{name}").read_bytes(), label=label, encoded=True).SerializeToString()
        for name, label in (("a b/1.png", 3), ("2.PNG", -1), ("3.jpg", 70000))
    ]


def test_jpeg_files_are_jpg(tmp_path: Path):
    Path("img/3.jpg").rename("img/3.JPEG")
    Path("list.txt").write_text("3.JPEG 1\n")
    assert Datum.FromString(convert(encode_type="jpg")[0][1]).data == Path("img/3.JPEG").read_bytes()


def test_other_formats_and_sizes_are_encoded():
    found = Datum.FromString(convert(encode_type="png")[2][1])  # the JPEG
    jpeg = cv2.imread("img/3.jpg", cv2.IMREAD_COLOR)
    assert found.encoded and found.label == 70000 and not found.HasField("channels")
    assert found.data == cv2.imencode(".png", jpeg)[1].tobytes()
    convert_image_set("img/", Path("list.txt"), Database(Path("b")), ImageOptions(False, 4, 6, encoded=True))
    assert (
        Datum.FromString(records(Path("b"))[0][1]).data
        == cv2.imencode(".png", cv2.resize(PICTURE, (6, 4)))[1].tobytes()
    )


def test_the_seed_decides_the_order():
    Path("many.txt").write_text("".join(f"2.PNG {n}\n" for n in range(50)))
    first = [Datum.FromString(record).label for _, record in convert("many.txt", seed=1)]
    assert first != sorted(first) and sorted(first) == list(range(50))
    keys = [key for key, _ in records(Path("db"))]
    assert keys[:2] == [b"00000000_2.PNG", b"00000001_2.PNG"]
    for seed, same in ((1, True), (2, False)):
        convert_image_set("img/", Path("many.txt"), Database(Path("again"), force=True), ImageOptions(), seed)
        assert (records(Path("again")) == records(Path("db"))) == same


def test_unreadable_images_are_named_and_left_out(caplog: pytest.LogCaptureFixture):
    Path("img/broken.png").write_bytes(b"no image")
    Path("list.txt").write_text("absent.png 1\n2.PNG 2\nbroken.png 3\n3.jpg 4\n")
    with caplog.at_level(logging.INFO):
        found = convert()
    assert [key for key, _ in found] == [b"00000001_2.PNG", b"00000003_3.jpg"]  # numbers of lines, as in Caffe
    said = caplog.messages
    assert "'list.txt':1: skipped: 'img/absent.png' cannot be read: No such file or directory" in said
    assert any(line.startswith("'list.txt':3: skipped: 'img/broken.png' is an image of 8 bytes") for line in said)
    assert "Processed 2 files." in said
    assert "2 of 4 images could not be read and were skipped; see above" in said


def test_a_list_of_windows_with_a_byte_order_mark_loses_no_image():
    Path("list.txt").write_bytes("\ufeff2.PNG 2\r\n3.jpg 4\r\n".encode())
    assert [key for key, _ in convert()] == [b"00000000_2.PNG", b"00000001_3.jpg"]


def test_no_readable_image_is_an_error():
    with pytest.raises(
        DataError, match=r"none of the 3 images of 'list.txt' can be read.* first path is 'elsewhere/a b/1.png'"
    ):
        convert(root="elsewhere/")
    assert not Path("db").exists()


def test_images_of_two_sizes():
    cv2.imwrite("img/4.png", PICTURE[:4])
    Path("list.txt").write_text("2.PNG 0\n4.png 0\n")
    assert len(convert()) == 2
    with pytest.raises(DataError, match="'list.txt':2: 'img/4.png' is 3 x 4 x 7, but 'img/2.PNG' is 3 x 5 x 7;"):
        convert_image_set("img/", Path("list.txt"), Database(Path("other")), ImageOptions(check_size=True))
    assert not Path("other").exists()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_destination_that_is_there_is_refused_before_any_work(backend: str, monkeypatch: pytest.MonkeyPatch):
    target = Database(Path("db"), backend)
    convert_image_set("img/", Path("list.txt"), target, ImageOptions())
    monkeypatch.setattr(image_sets, "read_image_record", None)
    with pytest.raises(DataError, match="'db' already exists; remove it, or give --overwrite to replace it"):
        convert_image_set("img/", Path("list.txt"), target, ImageOptions())


def test_an_interrupted_run_leaves_nothing(monkeypatch: pytest.MonkeyPatch):
    Path("many.txt").write_text("".join(f"2.PNG {n}\n" for n in range(3000)))
    done = []

    def interrupted(self: image_sets.Progress, count: int = 1) -> None:
        done.append(count)
        if len(done) == 2500:
            raise KeyboardInterrupt

    monkeypatch.setattr(image_sets.Progress, "advance", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert("many.txt")
    assert sorted(os.listdir()) == ["img", "list.txt", "many.txt"]


@pytest.mark.parametrize("size", [{"resize_height": 3}, {"resize_width": 3}])
def test_one_size_alone(size: dict[str, int]):
    with pytest.raises(ConfigError, match="resize_height and resize_width must be set together"):
        ImageOptions(**size)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encode_type": "abc"}, "encode_type 'abc' is not a format that OpenCV writes"),
        ({"encode_type": "../x"}, "is not a format"),
        ({"resize_height": 1 << 20, "resize_width": 1 << 20}, "give a smaller size"),
    ],
)
def test_options_that_make_no_sense(options: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        ImageOptions(**options)


def test_long_paths_do_not_fit_lmdbs_keys():
    folder = "x" * 200
    Path(f"img/{folder}/{folder}/{folder}").mkdir(parents=True)
    name = f"{folder}/{folder}/{folder}/1.png"
    cv2.imwrite(f"img/{name}", PICTURE)
    Path("list.txt").write_text(f"{name} 1\n")
    with pytest.raises(
        DataError, match="has 617 bytes; LMDB's limit is 511; use shorter paths in the list, or --backend"
    ):
        convert()
    pytest.importorskip("plyvel", reason=NO_PLYVEL)
    convert_image_set("img", Path("list.txt"), Database(Path("level"), "leveldb"), ImageOptions())


def test_names_that_are_not_utf8():
    name = os.fsdecode(b"caf\xe9.png")
    Path("img/2.PNG").rename(f"img/{name}")
    Path("list.txt").write_bytes(b"caf\xe9.png 1\n")
    assert convert()[0][0] == b"00000000_caf\xe9.png"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2.PNG\n", "'list.txt':1: '2.PNG' is not a label"),
        ("\n", "image list 'list.txt' names no images"),
        ("a\0 1", "'list.txt':1: the line has a NUL character"),
    ],
)
def test_lists_that_are_none(text: str, message: str):
    Path("list.txt").write_text(text)
    with pytest.raises(DataError, match=message):
        convert()
