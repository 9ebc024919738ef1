import gzip
import hashlib
import http.server
import shutil
import struct
import threading

import numpy as np
import pytest

from caffepy.data.conversion import mnist_cifar as mnist
from caffepy.data.sources.databases import LmdbSource
from caffepy.errors import DataError, RunError
from caffepy.formats.proto.caffe_pb2 import Datum


def images_file(count, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (count, 28, 28), dtype=np.uint8)
    return struct.pack(">4I", 2051, count, 28, 28) + pixels.tobytes()


def labels_file(count):
    return struct.pack(">2I", 2049, count) + bytes(n % 10 for n in range(count))


@pytest.fixture
def folder(tmp_path):
    """Four small files, spelled and packed in different ways."""
    source = tmp_path / "idx"
    source.mkdir()
    (source / "train-images-idx3-ubyte").write_bytes(images_file(30))
    (source / "train-labels.idx1-ubyte").write_bytes(labels_file(30))
    (source / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(images_file(20, 1)))
    (source / "t10k-labels.idx1-ubyte.gz").write_bytes(gzip.compress(labels_file(20)))
    return source


def test_lmdbs_are_those_of_convert_mnist_data(folder, tmp_path):
    built = mnist.build_lmdbs(tmp_path / "out", mnist.folder_reader(folder))
    assert built == {tmp_path / "out" / "mnist_train_lmdb": 30, tmp_path / "out" / "mnist_test_lmdb": 20}
    source = LmdbSource(tmp_path / "out" / "mnist_test_lmdb")
    expected = Datum(channels=1, height=28, width=28, data=images_file(20, 1)[16 + 784 * 13 :][:784], label=3)
    assert Datum.FromString(source.read(13)) == expected
    assert source.record_name(13) == "record 13 (key '00000013')"
    source.close()


def test_lmdbs_of_other_digits_are_kept(folder, tmp_path, monkeypatch):
    before = mnist.build_lmdbs(tmp_path, mnist.folder_reader(folder))
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: pytest.fail("must not even be fetched"))
    with pytest.raises(DataError, match="mnist_train_lmdb' already exists"):
        mnist.build_lmdbs(tmp_path, mnist.fetch_file)
    (folder / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(images_file(20, 2)))
    with pytest.raises(DataError, match="mnist_test_lmdb' already exists"):
        mnist.build_lmdbs(tmp_path, mnist.folder_reader(folder))
    assert mnist.build_lmdbs(tmp_path, mnist.folder_reader(folder), force=True) == before


def test_lmdbs_of_the_same_digits_are_found(folder, tmp_path, monkeypatch):
    built = mnist.build_lmdbs(tmp_path, mnist.folder_reader(folder))
    train, test = built
    written = (train / "data.mdb").stat().st_mtime_ns
    assert mnist.build_lmdbs(tmp_path, mnist.folder_reader(folder)) == built
    shutil.rmtree(test)  # as an interrupt between the two leaves it
    assert mnist.build_lmdbs(tmp_path, mnist.folder_reader(folder)) == built
    assert (train / "data.mdb").stat().st_mtime_ns == written

    read = mnist.folder_reader(folder)
    known = {
        part: tuple(mnist.IdxFile(file.name, 0, hashlib.sha256(read(file)).hexdigest()) for file in files)
        for part, files in mnist.FILES.items()
    }
    monkeypatch.setattr(mnist, "FILES", known)
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: pytest.fail("must not be fetched again"))
    assert mnist.build_lmdbs(tmp_path, mnist.fetch_file) == built


@pytest.mark.parametrize("content", [b"", b"no LMDB"])
def test_a_damaged_lmdb_is_not_taken_for_the_digits(folder, tmp_path, content):
    train, _ = mnist.build_lmdbs(tmp_path, mnist.folder_reader(folder))
    (train / "data.mdb").write_bytes(content)
    with pytest.raises(DataError, match="mnist_train_lmdb' already exists"):
        mnist.build_lmdbs(tmp_path, mnist.folder_reader(folder))


def test_the_shipped_subset_is_whole(tmp_path):
    built = mnist.build_lmdbs(tmp_path, mnist.folder_reader(mnist.SUBSET))
    assert list(built.values()) == [8500, 1500]
    read = mnist.folder_reader(mnist.SUBSET)
    for images, labels in mnist.FILES.values():
        pixels = mnist.parse_images(read(images), images.name)
        classes = np.bincount(mnist.parse_labels(read(labels), labels.name))
        assert 30 < pixels.mean() < 36
        assert (classes > 0.08 * classes.sum()).all()
    assert "Creative Commons Attribution-Share Alike 3.0" in (mnist.SUBSET / "README.md").read_text()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "f: has 0 bytes, too few for an idx file of images"),
        (labels_file(20), r"f: is not an idx file of images \(it begins with 2049, not 2051\)"),
        (images_file(2)[:-1], "f: its header announces 1568 bytes, but it has 1567"),
        (images_file(2) + b"x", "f: its header announces 1568 bytes, but it has 1569"),
        (struct.pack(">4I", 2051, 0, 28, 28), "f: holds no images"),
        (struct.pack(">4I", 2051, *[2**32 - 1] * 3), r"f: its header announces \d{29} bytes, but it has 0"),
    ],
)
def test_bad_images(content, message):
    with pytest.raises(DataError, match=message):
        mnist.parse_images(content, "f")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (images_file(1), r"f: is not an idx file of labels \(it begins with 2051, not 2049\)"),
        (labels_file(5) + b"1", "f: its header announces 5 bytes, but it has 6"),
        (struct.pack(">2I", 2049, 2) + b"\x01\x0a", "f: label 1 is 10; digits end at 9"),
    ],
)
def test_bad_labels(content, message):
    with pytest.raises(DataError, match=message):
        mnist.parse_labels(content, "f")


def test_files_that_do_not_belong_together(folder, tmp_path):
    (folder / "train-labels.idx1-ubyte").write_bytes(labels_file(29))
    with pytest.raises(DataError, match="train-images-idx3-ubyte has 30 digits and train-labels-idx1-ubyte 29 labels"):
        mnist.build_lmdbs(tmp_path, mnist.folder_reader(folder))


def test_missing_and_damaged_files(folder, tmp_path):
    (folder / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(images_file(20))[:-20])
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte\.gz' cannot be read: "):
        mnist.build_lmdbs(tmp_path, mnist.folder_reader(folder))
    with pytest.raises(DataError, match="' has no train-images-idx3-ubyte or train-images-idx3-ubyte.gz"):
        mnist.build_lmdbs(tmp_path / "b", mnist.folder_reader(tmp_path))


# -- mirrors ---------------------------------------------------------------------------------------------


@pytest.fixture
def mirror():
    """A web server on this machine; what it has is in `pages`."""
    pages = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            content = pages.get(self.path)
            self.send_response(404 if content is None else 200)
            self.end_headers()
            self.wfile.write(content or b"")

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", pages
    server.shutdown()
    thread.join(300)
    server.server_close()


def test_the_first_mirror_that_has_the_file_unharmed_is_taken(mirror):
    address, pages = mirror
    content = labels_file(500)
    file = mnist.IdxFile("digits", len(content), hashlib.sha256(content).hexdigest())
    pages["/harmed/digits.gz"] = gzip.compress(content[:-1] + b"\x07")
    pages["/cut/digits.gz"] = gzip.compress(content)[:-30]
    pages["/good/digits.gz"] = gzip.compress(content)
    folders = [f"{address}/{name}/" for name in ("absent", "harmed", "cut", "good")]
    assert mnist.fetch_file(file, tuple(folders), timeout=300) == content
    with pytest.raises(
        RunError, match=r"cannot fetch digits \(.*absent.*404.*harmed.*SHA-256 .*; .*cut.*; download the four files"
    ):
        mnist.fetch_file(file, tuple(folders[:3]), timeout=300)


def test_a_file_that_unpacks_to_more_than_it_should_is_not_unpacked(mirror):
    address, pages = mirror
    pages["/digits.gz"] = gzip.compress(bytes(10_000_000))
    with pytest.raises(RunError, match="SHA-256 of the unpacked file is"):
        mnist.fetch_file(mnist.IdxFile("digits", 100, ""), (f"{address}/",), timeout=300)
