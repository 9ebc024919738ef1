"""LMDBs that change while they are read; the fuzzer's format `data.mdb` damages them before."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest
from fuzz.seeds import lmdbs

from caffepy.backend.types import ImageSlot
from caffepy.data.loader import DatumLoader
from caffepy.data.sampler import Sampler
from caffepy.data.sources.databases import LmdbSource
from caffepy.data.transform import DataTransformer
from caffepy.errors import DataError
from caffepy.formats.proto import caffe_pb2


def changing(source: LmdbSource, file: Path, *sizes: int) -> Callable[[int], bool]:
    """A check of the file after whose first success it gets other sizes."""
    check = source.allows_concurrent_reads

    def checked(count: int) -> bool:
        result = check(count)
        for size in sizes if count else ():
            os.truncate(file, size)
        return result

    return checked


@pytest.mark.parametrize("kind", ["cut", "grown", "both"])
def test_a_change_in_the_middle_of_a_batch_is_noticed(tmp_path: Path, kind: str) -> None:
    """Between a look at the file's size and the copying of its records."""
    random = Random(kind)
    for (file, count), side in zip(lmdbs(tmp_path), (5, 5, 50), strict=True):
        content, slot = file.read_bytes(), ImageSlot(count, 1, side, side)
        transformer = DataTransformer(caffe_pb2.TransformationParameter(), caffe_pb2.TEST)
        for _ in range(80):
            file.write_bytes(content)
            source = LmdbSource(file.parent)
            loader, block = DatumLoader(source, Sampler(count), transformer), np.zeros(slot.size, np.uint8)
            assert loader.load_bytes([0], count, slot, block) == 1
            whole, size = len(content), random.randrange(len(content))
            sizes = {"cut": (size,), "grown": (whole + size,), "both": (size, whole)}[kind]
            source.allows_concurrent_reads = changing(source, file, *sizes)  # type: ignore[method-assign]
            with pytest.raises(DataError, match="during reading|temporarily"):
                loader.load_bytes([0], count, slot, block)
