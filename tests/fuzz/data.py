"""Records, images and other data."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import numpy as np
from fuzz import seeds
from fuzz.mutate import Random, damage_text
from fuzz.mutate_hdf5 import damage_hdf5, damage_structure, structured_files
from fuzz.target import BinaryTarget, TextTarget

from caffepy.formats.proto import caffe_pb2


class Lmdb(BinaryTarget):
    """A database, read record by record and many at once."""

    name = "data.mdb"
    file = "db/data.mdb"
    share = 6

    def prepare(self) -> None:
        self.path.parent.mkdir(exist_ok=True)
        self.blobs = seeds.lmdbs(self.folder)

    def read(self) -> None:
        from caffepy.data.sources.databases import LmdbSource

        source = LmdbSource(self.path.parent)
        try:
            source.record_name(0)
            read_records(source)
            read_batch(source)
            source.fingerprint()
        finally:
            source.close()


def read_records(source: Any) -> None:
    """Parse the first records of a source."""
    from caffepy.data.datum import parse_datum

    for number in range(min(len(source), 400)):
        with contextlib.suppress(_data_error()):
            parse_datum(source.read(number))


def read_batch(source: Any) -> None:
    """Load the first records into a batch of bytes, or of floats where they are none of bytes."""
    from caffepy.data.loader import DatumLoader
    from caffepy.data.prefetch import Batch
    from caffepy.data.sampler import Sampler
    from caffepy.data.transform import DataTransformer

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
        from caffepy.data.sources.databases import LmdbSource

        whole = self.blobs[data[0] % len(self.blobs)]
        self.path.write_bytes(whole)
        status = os.stat(self.path)
        source = LmdbSource(self.path.parent)
        try:
            with contextlib.suppress(_data_error()):
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
        data = super().make(random)
        whole = self.blobs[0]
        if random.random() < 0.7:  # of the size that it had, so that nothing tells the two apart
            number = random.randrange(len(self.blobs))
            whole = self.blobs[number]
            return bytes([number]) + (data + whole[len(data) :])[: len(whole)]
        return random.randbytes(1) + data


def _data_error() -> type[Exception]:
    from caffepy.errors import DataError

    return DataError


class Hdf5Data(BinaryTarget):
    name = "HDF5 data"
    file = "data.h5"
    share = 6

    def prepare(self) -> None:
        self.blobs = [*seeds.golden("data.h5"), *structured_files()]
        self.list = self.folder / "list.txt"
        self.list.write_text(str(self.path))

    def make(self, random: Random) -> bytes:
        chance = random.random()
        if chance < 0.2:
            return super().make(random)
        data = random.choice(self.blobs)
        if chance < 0.5:
            data = damage_hdf5(self.blobs[0], random)
        return damage_structure(data, random) if chance > 0.4 else data

    def read(self) -> None:
        from caffepy.layers.input.hdf5 import Hdf5Source

        source = Hdf5Source(self.list, ["data", "label"])
        try:
            source.arrays(0)
            source.fingerprint()
        finally:
            source.close()


class ImageList(TextTarget):
    name = "image list"
    file = "images.txt"

    def prepare(self) -> None:
        (self.folder / "a.png").write_bytes(seeds.images()[0])
        self.texts = ["a.png 1\nb.jpg 2\nsome dir/c.png 3\n", "a.png 1\n"]

    def read(self) -> None:
        from caffepy.data.sources.image_list import ImageListSource

        source = ImageListSource(self.path, f"{self.folder}/")
        for number in range(min(len(source), 20)):
            with contextlib.suppress(_data_error()):
                source.read(number)


class WindowFile(TextTarget):
    name = "window file"
    file = "windows.txt"

    def prepare(self) -> None:
        self.texts = ["# 0 a.png 3 40 60 2\n1 0.9 1 2 30 40\n0 0.1 3 4 5 6\n# 1 b.png 3 9 9 1\n2 1.0 0 0 8 8\n"]

    def read(self) -> None:
        from caffepy.layers.input.window_data import WindowSource

        WindowSource(self.path, f"{self.folder}/", (0.5, 0.5), False).fingerprint()


class WindowTable(TextTarget):
    name = "windows as CSV"
    file = "windows.csv"

    def prepare(self) -> None:
        self.texts = ["filename,ymin,xmin,ymax,xmax\na.png,1,2,30,40\nb.png,0.5,1e1,9,9\n"]

    def read(self) -> None:
        from caffepy.infer.windows import read_windows

        read_windows(self.path)


class Annotation(TextTarget):
    """Boxes in XML, JSON and text."""

    name = "annotation"
    file = "boxes"

    def prepare(self) -> None:
        box = "<bndbox><xmin>1</xmin><ymin>2</ymin><xmax>30</xmax><ymax>40</ymax></bndbox>"
        size = "<size><width>60</width><height>40</height></size>"
        self.texts = [
            f"<annotation>{size}<object><name>cat</name><difficult>1</difficult>{box}</object></annotation>",
            '{"image": {"height": 40, "width": 60}, "annotation": [{"category_id": 1, "bbox": [1, 2.5, 3, 4]}]}',
            "1 1 2 30 40\n2 0 0 5.5 6\n",
        ]

    def read(self) -> None:
        from caffepy.data.conversion.annotation_sets import READERS, read_boxes

        for kind in READERS:
            with contextlib.suppress(_data_error()):
                read_boxes(str(self.path), kind, (40, 60), {"cat": 1, "1": 2}, caffe_pb2.AnnotatedDatum())


class Npy(BinaryTarget):
    """Arrays of numbers; half of the damaged ones have another text as their header."""

    name = ".npy"
    file = "mean.npy"
    share = 2

    def prepare(self) -> None:
        self.blobs = []
        for values in (np.ones((3, 4, 5), "f4"), np.ones((2, 3), ">f8", order="F"), np.ones(3, "i2"), np.ones((), "?")):
            np.save(self.path, values)
            self.blobs.append(self.path.read_bytes())
        np.savez(self.folder / "a.npz", a=values)
        self.blobs.append((self.folder / "a.npz").read_bytes())
        self.headers = [blob[10:].split(b"\n")[0].decode("latin-1") for blob in self.blobs[:-1]]

    def make(self, random: Random) -> bytes:
        if random.random() < 0.5:
            return super().make(random)
        header = damage_text(random.choice(self.headers), self.headers, random)[:60000]
        return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(random.choice((0, 48, 300)))

    def read(self) -> None:
        from caffepy.infer.images import list_images, read_any_mean

        with contextlib.suppress(_data_error()):
            read_any_mean(str(self.path))
        for image in list_images([self.path]):
            image.load(3)


class Image(BinaryTarget):
    name = "PNG and JPEG"
    share = 2

    def prepare(self) -> None:
        self.blobs = seeds.images()

    def use(self, data: bytes) -> None:
        from caffepy.data.images import decode_image

        decode_image(data)


class Datum(BinaryTarget):
    name = "Datum"
    kind = caffe_pb2.Datum

    def prepare(self) -> None:
        self.blobs = [record.SerializeToString() for record in seeds.datum()]

    def use(self, data: bytes) -> None:

        from caffepy.data.datum import datum_shape, parse_datum
        from caffepy.data.images import decode_image

        record, values = parse_datum(data)
        if record.encoded:
            decode_image(values)
        else:
            datum_shape(record, len(values) or len(record.float_data), "bytes")


class Mean(BinaryTarget):
    name = "mean binaryproto"
    file = "mean.binaryproto"
    kind = caffe_pb2.BlobProto

    def prepare(self) -> None:
        blob = caffe_pb2.BlobProto(num=1, channels=1, height=2, width=2, data=[1, 2, 3, 4])
        raw = caffe_pb2.BlobProto(raw_data_type=caffe_pb2.FLOAT, raw_data=bytes(16))
        raw.shape.dim.extend([1, 2, 2])
        self.blobs = [blob.SerializeToString(), raw.SerializeToString()]

    def read(self) -> None:
        from caffepy.data.mean import read_mean

        read_mean(self.path)


class Blob(Mean):
    """The matrix of an InfogainLoss."""

    name = "infogain binaryproto"
    file = "infogain.binaryproto"

    def read(self) -> None:
        from caffepy.data.mean import read_blob

        read_blob(self.path, "infogain_loss_param source")


class Idx(BinaryTarget):
    name = "idx"
    file = "train-images-idx3-ubyte"

    def prepare(self) -> None:
        self.blobs = seeds.idx()

    def use(self, data: bytes) -> None:
        from caffepy.data.conversion.mnist_cifar import parse_images, parse_labels

        for parse in (parse_images, parse_labels):
            with contextlib.suppress(_data_error()):
                parse(data, "file")


TARGETS = (
    Lmdb,
    ChangingLmdb,
    Hdf5Data,
    ImageList,
    WindowFile,
    WindowTable,
    Annotation,
    Npy,
    Image,
    Datum,
    Mean,
    Blob,
    Idx,
)
