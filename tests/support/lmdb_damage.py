"""A process that reads damaged LMDBs and says what became of each: `lmdb_damage.py FOLDER CASES`.

Every fourth file is damaged while it is open: cut off, grown, or cut off and grown again, between a look at its size
and the copying of its records.

Prints a line of JSON: how many were refused and read, the longest time of one, and by how much memory grew. Ends with
an error if something else than a DataError was raised, or a record was read that the file does not hold at its place.
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import numba  # noqa: F401 (else the loader does without machine code for long)
import numpy as np
from damage import damaged
from numpy.typing import NDArray

from caffepy.backend.types import ImageSlot
from caffepy.data.loader import DatumLoader
from caffepy.data.sampler import Sampler
from caffepy.data.sources.databases import LmdbSource
from caffepy.data.sources.lmdb_index import LmdbIndex
from caffepy.data.transform import DataTransformer
from caffepy.errors import DataError
from caffepy.formats.proto import caffe_pb2

SETS = {"small": (300, 5, b"%08d"), "deep": (90, 5, b"%0500d"), "large": (40, 50, b"%08d")}
"""Records, height and width of their images, and keys: records within a page, a tree of three levels, and records
with pages of their own."""


class Subject:
    """A whole LMDB and what its records are.

    Args:
        path: of its folder.
        count: records.
        size: height and width of the images.
        key: format of the keys.
    """

    def __init__(self, path: Path, count: int, size: int, key: bytes) -> None:
        rng = np.random.default_rng(1)
        self.path, self.size, self.file = path, size, path / "data.mdb"
        with lmdb.open(str(path), map_size=1 << 22) as environment, environment.begin(write=True) as transaction:
            for number in range(count):
                datum = caffe_pb2.Datum(channels=1, height=size, width=size, label=number, data=rng.bytes(size * size))
                transaction.put(key % number, datum.SerializeToString())
        index = LmdbIndex(self.file)
        assert index.find(count)
        self.content = self.file.read_bytes()
        self.places = list(zip(index.offsets.tolist(), index.sizes.tolist(), strict=True))

    def read(self, content: bytes) -> str:
        """What becomes of a damaged copy: `refused` or `read`, as a whole or by loading batches."""
        self.file.write_bytes(content)
        try:
            source = LmdbSource(self.path)
            assert source.record_name(0) and source.fingerprint()
            records = [source.read(number) for number in range(len(source))]
            assert len(records) == len(self.places), "another number of records"
            self.compare(records, content)
            self.load(source, records)
        except DataError as error:
            assert "\n" not in str(error)
            return "refused"
        return "read"

    def read_while_it_changes(self, rng: random.Random) -> str:
        """What becomes of a file that changes in the middle of a batch: always `refused`, if a page of it was lost."""
        self.file.write_bytes(self.content)
        source = LmdbSource(self.path)
        loader, slot, block = self._loader(source)
        assert loader.load_bytes([0], len(source), slot, block) == 1
        source.allows_concurrent_reads = self._changing(source.allows_concurrent_reads, rng)  # type: ignore[method-assign]
        try:
            loader.load_bytes([0], len(source), slot, block)
        except DataError as error:
            assert "during reading" in str(error) or "temporarily" in str(error), error
            return "refused"
        raise AssertionError("the change was not noticed")

    def _changing(self, check: Callable[[int], bool], rng: random.Random) -> Callable[[int], bool]:
        """A check of the file after whose first success the file changes."""
        kind, size = rng.choice(["cut", "grown", "both"]), rng.randrange(len(self.content))

        def checked(count: int) -> bool:
            result = check(count)
            if count:
                if kind != "grown":
                    os.truncate(self.file, size)
                if kind != "cut":
                    os.truncate(self.file, len(self.content) + (size if kind == "grown" else 0))
            return result

        return checked

    def compare(self, records: list[bytes], content: bytes) -> None:
        """Each record is what the file holds at its place; sizes of keys and records may be damaged a little."""
        for number, (record, (at, size)) in enumerate(zip(records, self.places, strict=True)):
            assert record in content[at - 1 : at + len(record) + 1], number
            assert self.size == 50 or abs(len(record) - size) < 2, number

    def load(self, source: LmdbSource, records: list[bytes]) -> None:
        """Compare the images that loading in bulk copies with the records'."""
        loader, slot, block = self._loader(source)
        if loader.load_bytes([0], len(source), slot, block):
            pixels = slot.parts(block)[2]
            for number, record in enumerate(records):
                datum = caffe_pb2.Datum.FromString(record)
                assert datum.encoded or pixels[number].tobytes() == datum.data, number

    def _loader(self, source: LmdbSource) -> tuple[DatumLoader, ImageSlot, NDArray[np.uint8]]:
        transformer = DataTransformer(caffe_pb2.TransformationParameter(), caffe_pb2.TEST)
        slot = ImageSlot(len(source), 1, self.size, self.size)
        return DatumLoader(source, Sampler(len(source)), transformer), slot, np.zeros(slot.size, np.uint8)


def main(folder: Path, cases: int) -> dict[str, Any]:
    """Read `cases` damaged copies."""
    subjects = [Subject(folder / name, *settings) for name, settings in SETS.items()]
    assert [subject.read(subject.content) for subject in subjects] == ["read"] * len(subjects)
    before, longest, found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0.0, Counter[str]()
    for seed in range(cases):
        subject = subjects[seed % len(subjects)]
        started = time.perf_counter()
        try:
            rng = random.Random(seed)
            if seed % 4 == 3:
                found[subject.read_while_it_changes(rng)] += 1
            else:
                found[subject.read(damaged(subject.content, rng))] += 1
        except BaseException as error:
            raise RuntimeError(f"case {seed}") from error
        longest = max(longest, time.perf_counter() - started)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {**found, "longest": longest, "grown": grown * 1024}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))))
