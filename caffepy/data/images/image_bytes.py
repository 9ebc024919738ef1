"""Many Datums at once from a mapped LMDB into a batch of bytes: read, checked, cropped and copied by one kernel.

Owns the reading of Datum's wire format without protobuf. Records that are not uncompressed images of the expected
size, or that are damaged, are left to the loader, which raises errors that name the record.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.backend.cpu.jit.address import address_of
from caffepy.backend.cpu.jit.deferred import compiled_part
from caffepy.backend.cpu.jit.intrinsics import copy_bytes
from caffepy.backend.cpu.jit.kernel import Bytes, Floats, Int, Ints, Words, device_function, kernel
from caffepy.backend.cpu.random import philox
from caffepy.backend.input_ring import ImageSlot
from caffepy.data.random import SAMPLE_WORDS, key_of
from caffepy.data.sources import lmdb_index
from caffepy.data.sources.lmdb_index import LmdbIndex
from caffepy.data.transform import Transformer

_GRAIN = 1 << 22
"""Bytes for each thread, at least."""
_COMPILING = 32_768
"""Images that the loader copies one by one in the time that the kernel takes to be compiled, about a second."""
word = compiled_part(lmdb_index.word)
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


@device_function
def _varint(file: Bytes, at: Int, end: Int) -> tuple[Int, Int]:
    """A number in protobuf's wire format as 64 bits, and the byte after it; -1 if it does not end."""
    value = 0
    shift = 0
    while at < end and shift < 70:
        byte = np.int64(file[at])
        at += 1
        if shift < 64:
            value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    return 0, -1


@device_function
def _int32(value: Int) -> Int:
    """The lower half of a number, as a signed one."""
    low = value & 0xFFFFFFFF
    return low - 0x100000000 if low >= 0x80000000 else low


@device_function
def _parse(file: Bytes, at: Int, end: Int) -> tuple[Int, Int, Int, Int, Int, Int]:
    """Channels, height, width, label, and where a plain Datum's pixels begin and how many there are.

    The beginning is -1 if it is none: not whole, encoded, or with a known field of an unusual type.
    """
    channels = height = width = label = size = begin = 0
    while at < end:
        tag, at = _varint(file, at, end)
        field, kind = tag >> 3, tag & 7
        if at < 0 or field <= 0 or field > 0x1FFFFFFF:
            return 0, 0, 0, 0, -1, 0
        if kind == 0:
            value, at = _varint(file, at, end)
            if at < 0 or field == 4 or field == 6 or (field == 7 and value != 0):
                return 0, 0, 0, 0, -1, 0
            if field == 1:
                channels = _int32(value)
            elif field == 2:
                height = _int32(value)
            elif field == 3:
                width = _int32(value)
            elif field == 5:
                label = _int32(value)
            continue
        if kind == 2:
            length, at = _varint(file, at, end)
            if at < 0 or length < 0 or length > end - at:
                return 0, 0, 0, 0, -1, 0
            if field == 4:
                begin, size = at, length
        elif kind == 5:
            length = 4
        elif kind == 1:
            length = 8
        else:
            return 0, 0, 0, 0, -1, 0
        if length > end - at or (field != 4 and field != 6 and field <= 8):
            return 0, 0, 0, 0, -1, 0
        if field == 4 and kind != 2:
            return 0, 0, 0, 0, -1, 0
        at += length
    return channels, height, width, label, begin, size


@device_function
def _is_image(
    channels: Int, height: Int, width: Int, size: Int, wanted_channels: Int, wanted_height: Int, wanted_width: Int,
    crop: Int, whole_height: Int, whole_width: Int,
) -> bool:  # fmt: skip
    """Whether these are the dimensions of `size` pixels, and of an image out of which what is wanted can be cut."""
    if channels != wanted_channels or height < wanted_height or width < wanted_width or height > size:
        return False
    if width > size // height or height * width > size // channels or channels * height * width != size:
        return False
    if crop == 0 and (height != wanted_height or width != wanted_width):
        return False
    return whole_height == 0 or (height == whole_height and width == whole_width)


@device_function
def _is_large_record(file: Bytes, at: Int, page: Int, page_size: Int, size: Int) -> bool:
    """Whether the header before a record with pages of its own says so."""
    if word(file, at - 16, 8) != page or word(file, at - 6, 2) != 4:
        return False
    return word(file, at - 4, 4) * page_size >= 16 + size


@kernel
def _copy_records(
    begin: Int, end: Int, file: Bytes, file_at: Int, page_size: Int, offsets: Words, sizes: Words, records: Words,
    samples: Words, block_at: Int, labels: Floats, crops: Ints, pending: Bytes, count: Int, slot_size: Int,
    crops_at: Int, pixels_at: Int, channels: Int, height: Int, width: Int, crop: Int, random_crop: Int, mirror: Int,
    whole_height: Int, whole_width: Int, key0: Int, key1: Int,
) -> None:  # fmt: skip
    """Items are samples, `count` in each slot; pending[i] becomes 0 when sample i is copied."""
    for i in range(begin, end):
        first, length = offsets[records[i]], sizes[records[i]]
        if first % page_size == 16 and not _is_large_record(file, first, first // page_size, page_size, length):
            continue
        c, h, w, label, pixels, size = _parse(file, first, first + length)
        if pixels < 0 or size <= 0:
            continue
        if not _is_image(c, h, w, size, channels, height, width, crop, whole_height, whole_width):
            continue
        mirrored, top, left = 0, 0, 0
        if crop != 0:
            top, left = (h - height) // 2, (w - width) // 2
        if mirror != 0 or random_crop != 0:
            sample = np.uint64(samples[i])
            words = philox(
                np.uint64(0), sample & _LOW, sample >> _HALF, np.uint64(SAMPLE_WORDS), np.uint64(key0), np.uint64(key1)
            )
            if mirror != 0:
                mirrored = np.int64((words[0] * np.uint64(2)) >> _HALF)
            if random_crop != 0:
                top = np.int64((words[1] * np.uint64(h - height + 1)) >> _HALF)
                left = np.int64((words[2] * np.uint64(w - width + 1)) >> _HALF)
        slot = i // count * slot_size
        n = i % count
        to = block_at + slot + pixels_at + n * channels * height * width
        if h == height and w == width:
            copy_bytes(to, file_at + pixels, size)
        else:
            for channel in range(channels):
                for y in range(height):
                    copy_bytes(to, file_at + pixels + (channel * h + top + y) * w + left, width)
                    to += width
        labels[slot // 4 + n] = np.float32(label)
        crop_index = (slot + crops_at) // 4 + 3 * n
        crops[crop_index], crops[crop_index + 1], crops[crop_index + 2] = mirrored, top, left
        pending[i] = 0


def copy_records(
    index: LmdbIndex, records: NDArray[np.int64], samples: NDArray[np.int64], transformer: Transformer, seed: int,
    stream: int, slot: ImageSlot, block: NDArray[np.uint8], threads: int,
) -> NDArray[np.uint8]:  # fmt: skip
    """Cut the images of some records into the slots of a block.

    What was copied counts only if the index's `check` passes afterwards: the file may change meanwhile, and what it
    has lost reads as zeros.

    Args:
        index: the records' offsets; `find` must have found them.
        records: their numbers, slot.count for each slot.
        samples: the global samples that they are.
        transformer: its crop and mirror settings; mean and scale are applied on the device.
        seed: of the solver.
        stream: of the layer.
        slot: the layout of a batch.
        block: the slots' memory.
        threads: how many share the work.

    Returns:
        For each sample 0 if it was copied to its slot, 1 if its record has to be parsed one by one.
    """
    pending = np.ones(records.size, np.uint8)
    numbers: tuple[Any, ...] = (
        slot.count, slot.size, slot.crops_at, slot.pixels_at, slot.channels, slot.height, slot.width,
        transformer.crop, int(transformer.random_crop), int(transformer.mirror), *transformer.whole_size,
        *key_of(transformer.seed(seed), stream),
    )  # fmt: skip
    if not _copy_records.should_compile(records.size, _COMPILING):
        return pending
    file = index.mapped()
    if file is None:
        return pending
    image = slot.channels * slot.height * slot.width
    _copy_records.run(
        threads, records.size, max(1, _GRAIN // image), file, address_of(file), index.page_size, index.offsets,
        index.sizes, np.ascontiguousarray(records), np.ascontiguousarray(samples), address_of(block), block, block,
        pending, *numbers,
    )  # fmt: skip
    return pending
