"""Records, images and other data."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import numpy as np
from fuzz import seeds
from fuzz.mutate import Random, damage_in_place, damage_text
from fuzz.mutate_hdf5 import damage_hdf5, damage_structure, structured_files
from fuzz.target import BinaryTarget, TextTarget, reads

from caffepy.backend.types import ImageSlot
from caffepy.data.conversion.annotation_sets import READERS, read_boxes
from caffepy.data.conversion.mnist_cifar import parse_images, parse_labels
from caffepy.data.datum import datum_shape, parse_datum
from caffepy.data.images import decode_image
from caffepy.data.loader import DatumLoader
from caffepy.data.mean import read_blob, read_mean
from caffepy.data.prefetch import Batch
from caffepy.data.sampler import Sampler
from caffepy.data.sources.databases import LmdbSource
from caffepy.data.sources.image_list import ImageListSource
from caffepy.data.sources.lmdb_index import LmdbIndex
from caffepy.data.transform import DataTransformer
from caffepy.errors import DataError
from caffepy.formats.proto import caffe_pb2
from caffepy.infer.images import list_images, read_any_mean
from caffepy.infer.windows import read_windows
from caffepy.layers.input.hdf5 import Hdf5Source
from caffepy.layers.input.window_data import WindowSource


class Lmdb(BinaryTarget):
    """A database, read record by record and many at once.

    The first byte is the number of a seed that was damaged in its place: records are those that lie where they lay.
    """

    name = "data.mdb"
    file = "db/data.mdb"
    share = 6

    def prepare(self) -> None:
        self.path.parent.mkdir(exist_ok=True)
        self.seeds, self.places = [], []
        for file, count in seeds.lmdbs(self.folder):
            index = LmdbIndex(file)
            assert index.find(count)
            self.seeds.append(file.read_bytes())
            self.places.append(list(zip(index.offsets.tolist(), index.sizes.tolist(), strict=True)))

    def make(self, random: Random) -> bytes:
        if random.random() < 0.4:
            return b"\xff" + super().make(random)
        number = random.randrange(len(self.seeds))
        return bytes([number]) + damage_in_place(self.seeds[number], random)

    def use(self, data: bytes) -> None:
        self.path.write_bytes(data[1:])
        source = LmdbSource(self.path.parent)
        try:
            assert source.record_name(0) and source.fingerprint()
            read_records(source)
            read_batch(source)
            if data[0] < len(self.seeds):
                self.compare(source, data[1:], self.places[data[0]])
        finally:
            source.close()

    def compare(self, source: LmdbSource, content: bytes, places: list[tuple[int, int]]) -> None:
        """Compare records with what the file holds at their places, whose sizes may be damaged a little, and images."""
        records = [source.read(number) for number in range(len(source))]
        assert len(records) == len(places), "another number of records"
        for record, (at, size) in zip(records, places, strict=True):
            assert record in content[at - 1 : at + len(record) + 1], at
            assert size > 2000 or abs(len(record) - size) < 2, at
        transformer = DataTransformer(caffe_pb2.TransformationParameter(), caffe_pb2.TEST)
        side = 50 if places[0][1] > 2000 else 5
        slot = ImageSlot(len(source), 1, side, side)
        block = np.zeros(slot.size, np.uint8)
        if DatumLoader(source, Sampler(len(source)), transformer).load_bytes([0], len(source), slot, block):
            for pixels, record in zip(slot.parts(block)[2], records, strict=True):
                datum = caffe_pb2.Datum.FromString(record)
                assert datum.encoded or pixels.tobytes() == datum.data


def read_records(source: Any) -> None:
    """Parse the first records of a source."""
    for number in range(min(len(source), 400)):
        with contextlib.suppress(DataError):
            parse_datum(source.read(number))


def read_batch(source: Any) -> None:
    """Load the first records into a batch of bytes, or of floats where they are none of bytes."""
    count = min(len(source), 16)
    transformer = DataTransformer(caffe_pb2.TransformationParameter(mirror=True), caffe_pb2.TRAIN)
    loader = DatumLoader(source, Sampler(len(source)), transformer)
    try:
        images = loader.byte_images(count)
        if images is not None and images.slot.size < 1 << 24:
            loader.load_bytes([0], count, images.slot, np.zeros(images.slot.size, np.uint8))
        loader.load(0, count, Batch(2))
    finally:
        loader.close()


class ChangingLmdb(Lmdb):
    """A database that is damaged while it is open, and the time of its last change set back."""

    name = "data.mdb, open"
    share = 2

    def use(self, data: bytes) -> None:
        whole = self.seeds[data[0] % len(self.seeds)]
        self.path.write_bytes(whole)
        status = os.stat(self.path)
        source = LmdbSource(self.path.parent)
        try:
            with contextlib.suppress(DataError):
                source.allows_concurrent_reads(min(len(source), data[0]))
            with open(self.path, "r+b") as file:
                file.write(data[1:])
                file.truncate()
            os.utime(self.path, ns=(status.st_atime_ns, status.st_mtime_ns))
            read_records(source)
            read_batch(source)
        finally:
            source.close()

    def make(self, random: Random) -> bytes:
        data = super().make(random)[1:]
        if random.random() < 0.7:  # of the size that it had, so that nothing tells the two apart
            number = random.randrange(len(self.seeds))
            whole = self.seeds[number]
            return bytes([number]) + (data + whole[len(data) :])[: len(whole)]
        return random.randbytes(1) + data


class Hdf5Data(BinaryTarget):
    name = "HDF5 data"
    file = "data.h5"
    share = 6

    def prepare(self) -> None:
        self.seeds = [*seeds.golden("data.h5"), *structured_files()]
        self.list = self.folder / "list.txt"
        self.list.write_text(str(self.path))

    def make(self, random: Random) -> bytes:
        chance = random.random()
        if chance < 0.2:
            return super().make(random)
        data = random.choice(self.seeds)
        if chance < 0.5:
            data = damage_hdf5(self.seeds[0], random)
        return damage_structure(data, random) if chance > 0.4 else data

    def read(self) -> None:
        source = Hdf5Source(self.list, ["data", "label"])
        try:
            source.arrays(0)
            source.fingerprint()
        finally:
            source.close()


@reads(TextTarget, "image list", lambda: ["a.png 1\nb.jpg 2\nsome dir/c.png 3\n", "a.png 1\n"], "images.txt")
def image_list(path: Path) -> None:
    (path.parent / "a.png").write_bytes(seeds.images()[0])
    source = ImageListSource(path, f"{path.parent}/")
    for number in range(min(len(source), 20)):
        with contextlib.suppress(DataError):
            source.read(number)


WINDOWS = "# 0 a.png 3 40 60 2\n1 0.9 1 2 30 40\n0 0.1 3 4 5 6\n# 1 b.png 3 9 9 1\n2 1.0 0 0 8 8\n"
TABLE = "filename,ymin,xmin,ymax,xmax\na.png,1,2,30,40\nb.png,0.5,1e1,9,9\n"
BOX = "<bndbox><xmin>1</xmin><ymin>2</ymin><xmax>30</xmax><ymax>40</ymax></bndbox>"
SIZE = "<size><width>60</width><height>40</height></size>"
BOXES = [
    f"<annotation>{SIZE}<object><name>cat</name><difficult>1</difficult>{BOX}</object></annotation>",
    '{"image": {"height": 40, "width": 60}, "annotation": [{"category_id": 1, "bbox": [1, 2.5, 3, 4]}]}',
    "1 1 2 30 40\n2 0 0 5.5 6\n",
]


@reads(TextTarget, "window file", lambda: [WINDOWS], "windows.txt")
def window_file(path: Path) -> None:
    WindowSource(path, f"{path.parent}/", (0.5, 0.5), False).fingerprint()


window_table = reads(TextTarget, "windows as CSV", lambda: [TABLE], "windows.csv")(read_windows)


@reads(TextTarget, "annotation", lambda: BOXES, "boxes")
def annotation(path: Path) -> None:
    """Boxes in XML, JSON and text."""
    for kind in READERS:
        with contextlib.suppress(DataError):
            read_boxes(str(path), kind, (40, 60), {"cat": 1, "1": 2}, caffe_pb2.AnnotatedDatum())


class Npy(BinaryTarget):
    """Arrays of numbers; half of the damaged ones have another text as their header."""

    name = ".npy"
    file = "mean.npy"
    share = 2

    def prepare(self) -> None:
        self.seeds = []
        for values in (np.ones((3, 4, 5), "f4"), np.ones((2, 3), ">f8", order="F"), np.ones(3, "i2"), np.ones((), "?")):
            np.save(self.path, values)
            self.seeds.append(self.path.read_bytes())
        np.savez(self.folder / "a.npz", a=values)
        self.seeds.append((self.folder / "a.npz").read_bytes())
        self.headers = [blob[10:].split(b"\n")[0].decode("latin-1") for blob in self.seeds[:-1]]

    def make(self, random: Random) -> bytes:
        if random.random() < 0.5:
            return super().make(random)
        header = damage_text(random.choice(self.headers), self.headers, random)[:60000]
        return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(random.choice((0, 48, 300)))

    def read(self) -> None:
        with contextlib.suppress(DataError):
            read_any_mean(str(self.path))
        for image in list_images([self.path]):
            image.load(3)


image = reads(BinaryTarget, "PNG and JPEG", seeds.images, share=2)(decode_image)


@reads(BinaryTarget, "Datum", lambda: [record.SerializeToString() for record in seeds.datum()], kind=caffe_pb2.Datum)
def datum(data: bytes) -> None:
    record, values = parse_datum(data)
    if record.encoded:
        decode_image(values)
    else:
        datum_shape(record, len(values) or len(record.float_data), "bytes")


def means() -> list[bytes]:
    """A mean of values and one of raw data."""
    blob = caffe_pb2.BlobProto(num=1, channels=1, height=2, width=2, data=[1, 2, 3, 4])
    raw = caffe_pb2.BlobProto(raw_data_type=caffe_pb2.FLOAT, raw_data=bytes(16))
    raw.shape.dim.extend([1, 2, 2])
    return [blob.SerializeToString(), raw.SerializeToString()]


mean = reads(BinaryTarget, "mean binaryproto", means, "mean.binaryproto", kind=caffe_pb2.BlobProto)(read_mean)


@reads(BinaryTarget, "infogain binaryproto", means, "infogain.binaryproto", kind=caffe_pb2.BlobProto)
def infogain(path: Path) -> None:
    """The matrix of an InfogainLoss."""
    read_blob(path, "infogain_loss_param source")


@reads(BinaryTarget, "idx", seeds.idx)
def idx(data: bytes) -> None:
    for parse in (parse_images, parse_labels):
        with contextlib.suppress(DataError):
            parse(data, "file")


TARGETS = (
    *(Lmdb, ChangingLmdb, Hdf5Data, image_list, window_file, window_table, annotation),
    *(Npy, image, datum, mean, infogain, idx),
)
