"""Bulk copy of Datums from a memory-mapped LMDB into a uint8 batch: one kernel parses, checks, crops and copies.

It parses Datum's wire format without protobuf. Encoded images are located, and the loader decodes them; a second kernel
copies the crops of decoded images. The loader also handles records that are damaged or are not images of the expected
size, and raises errors that name the record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.backend.cpu.jit.deferred import compiled_part
from caffepy.backend.cpu.jit.kernel import Bytes, Floats, Int, Ints, Words, device_function, kernel
from caffepy.backend.cpu.jit.vector import copy_bytes, octets
from caffepy.backend.cpu.random import philox
from caffepy.backend.types import ImageSlot, host_address
from caffepy.data import images
from caffepy.data.images import MAX_PIXELS
from caffepy.data.random import SAMPLE_WORDS, key_of
from caffepy.data.sources import lmdb_index
from caffepy.data.sources.lmdb_index import LmdbIndex
from caffepy.data.transform import DataTransformer

_MIN_THREAD_BYTES = 1 << 22
"""Minimum bytes per thread."""
_COMPILE_COST_IMAGES = 32_768
"""Images that the loader copies one by one while the kernel is compiled, about 1 s."""
_COMPILE_COST_FILES = 8_192
"""Encoded images for which many threads wait as long for Python's lock when records are parsed one by one."""
_FOUND = 6
"""Numbers of a sample in `BulkCopy.found`."""
word = compiled_part(lmdb_index.word)
jpeg_size = compiled_part(images.jpeg_size)
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)


@device_function
def _varint(file: Bytes, at: Int, end: Int) -> tuple[Int, Int]:
    """Return a varint as 64 bits and the offset after it; the offset is -1 if the varint does not end."""
    value: Int = 0
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
    """Return the lower 32 bits as a signed number."""
    low = value & 0xFFFFFFFF
    return low - 0x100000000 if low >= 0x80000000 else low


@device_function
def _parse(file: Bytes, at: Int, end: Int) -> tuple[Int, Int, Int, Int, Int, Int, Int]:
    """Return channels, height, width, label, 1 if the Datum is encoded, and offset and size of its data."""
    # The offset is -1 if the Datum is damaged or has a known field of an unexpected type.
    channels = height = width = label = encoded = size = begin = 0
    while at < end:
        tag, at = _varint(file, at, end)
        field, kind = tag >> 3, tag & 7
        if at < 0 or field <= 0 or field > 0x1FFFFFFF:
            return 0, 0, 0, 0, 0, -1, 0
        if kind == 0:
            value, at = _varint(file, at, end)
            if at < 0 or field == 4 or field == 6:
                return 0, 0, 0, 0, 0, -1, 0
            if field == 1:
                channels = _int32(value)
            elif field == 2:
                height = _int32(value)
            elif field == 3:
                width = _int32(value)
            elif field == 5:
                label = _int32(value)
            elif field == 7:
                encoded = 1 if value != 0 else 0
            continue
        if kind == 2:
            length, at = _varint(file, at, end)
            if at < 0 or length < 0 or length > end - at:
                return 0, 0, 0, 0, 0, -1, 0
            if field == 4:
                begin, size = at, length
        elif kind == 5:
            length = 4
        elif kind == 1:
            length = 8
        else:
            return 0, 0, 0, 0, 0, -1, 0
        if length > end - at or (field != 4 and field != 6 and field <= 8):
            return 0, 0, 0, 0, 0, -1, 0
        if field == 4 and kind != 2:
            return 0, 0, 0, 0, 0, -1, 0
        at += length
    return channels, height, width, label, encoded, begin, size


@device_function
def _is_image(
    channels: Int,
    height: Int,
    width: Int,
    size: Int,
    crop_channels: Int,
    crop_height: Int,
    crop_width: Int,
    crop: Int,
    mean_height: Int,
    mean_width: Int,
) -> bool:
    """Return whether the dimensions match `size` pixels and the image contains the crop."""
    if channels != crop_channels or height < crop_height or width < crop_width or height > size:
        return False
    if width > size // height or height * width > size // channels or channels * height * width != size:
        return False
    if crop == 0 and (height != crop_height or width != crop_width):
        return False
    return mean_height == 0 or (height == mean_height and width == mean_width)


@device_function
def _is_large_record(file: Bytes, at: Int, page: Int, page_size: Int, size: Int) -> bool:
    """Return whether the overflow page's header matches its page number and size."""
    if word(file, at - 16, 8) != page or word(file, at - 6, 2) != 4:
        return False
    return word(file, at - 4, 4) * page_size >= 16 + size


@kernel
def _copy_records(
    begin: Int,
    end: Int,
    file: Bytes,
    file_at: Int,
    page_size: Int,
    offsets: Words,
    sizes: Words,
    records: Words,
    samples: Words,
    block_at: Int,
    labels: Floats,
    crops: Ints,
    pending: Bytes,
    found: Words,
    nvidia: Int,
    copies: Int,
    count: Int,
    slot_size: Int,
    crops_at: Int,
    pixels_at: Int,
    channels: Int,
    height: Int,
    width: Int,
    crop: Int,
    random_crop: Int,
    mirror: Int,
    centered: Int,
    mean_height: Int,
    mean_width: Int,
    key0: Int,
    key1: Int,
) -> None:
    """Copy samples [begin, end), `count` in each slot; pending[i] becomes 0 for each copied sample."""
    # For an encoded image, its label is set, and the row i of `found` as `BulkCopy` describes. Without `copies`,
    # nothing else is done.
    for i in range(begin, end):
        first, length = offsets[records[i]], sizes[records[i]]
        if first % page_size == 16 and not _is_large_record(file, first, first // page_size, page_size, length):
            continue
        c, h, w, label, encoded, pixels, size = _parse(file, first, first + length)
        if pixels < 0 or size <= 0:
            continue
        slot = i // count * slot_size
        n = i % count
        row = _FOUND * i
        if encoded != 0:
            labels[slot // 4 + n] = np.float32(label)
            found[row], found[row + 1] = pixels, size
            h, w, plain = jpeg_size(file, pixels, pixels + size, nvidia)
            if plain == 0 or h * w > MAX_PIXELS:
                continue
            found[row + 2], found[row + 3] = h, w
            c, size = 3, 3 * h * w
        if copies == 0:
            continue
        if not _is_image(c, h, w, size, channels, height, width, crop, mean_height, mean_width):
            continue
        mirrored: Int = 0
        top: Int = 0
        left: Int = 0
        if crop != 0:
            top, left = (h - height) // 2, (w - width) // 2
        if mirror != 0 or random_crop != 0:
            sample = np.uint64(samples[i])
            words = philox(
                np.uint64(0), sample & _LOW, sample >> _SHIFT, np.uint64(SAMPLE_WORDS), np.uint64(key0), np.uint64(key1)
            )
            if mirror != 0:
                mirrored = np.int64((words[0] * np.uint64(2)) >> _SHIFT)
            if random_crop != 0:
                top = np.int64((words[1] * np.uint64(h - height + 1)) >> _SHIFT)
                left = np.int64((words[2] * np.uint64(w - width + 1)) >> _SHIFT)
        crop_index = (slot + crops_at) // 4 + 3 * n
        crops[crop_index], crops[crop_index + 1], crops[crop_index + 2] = mirrored, top, left
        if centered != 0:  # the mean's crop is at one place
            crops[crop_index + 1], crops[crop_index + 2] = 0, 0
        if encoded != 0:
            found[row + 4], found[row + 5] = top, left
            continue
        target = block_at + slot + pixels_at + n * channels * height * width
        if h == height and w == width:
            copy_bytes(target, file_at + pixels, size)
        else:
            for channel in range(channels):
                for y in range(height):
                    copy_bytes(target, file_at + pixels + (channel * h + top + y) * w + left, width)
                    target += width
        labels[slot // 4 + n] = np.float32(label)
        pending[i] = 0


@kernel
def _copy_crops(begin: Int, end: Int, images: Words, corners: Words, target: Int, height: Int, width: Int) -> None:
    """Copy crops to planes (3, height, width), one after the other; `images` are addresses and widths."""
    pixels = height * width
    for i in range(begin, end):
        image, columns = images[2 * i], images[2 * i + 1]
        if image == 0:
            continue
        top, left = corners[2 * i], corners[2 * i + 1]
        for y in range(height):
            source = octets(image + 3 * ((top + y) * columns + left))
            plane = octets(target + 3 * i * pixels + y * width)
            for x in range(width):
                plane[x] = source[3 * x]
                plane[pixels + x] = source[3 * x + 1]
                plane[2 * pixels + x] = source[3 * x + 2]


@dataclass(frozen=True)
class BulkCopy:
    """What `copy_records` did.

    Args:
        pending: one flag per sample: 0 if it was copied to its slot, 1 if the loader must handle its record.
        file: the mapped LMDB.
        found: int64, (N, 6). For an encoded image, whose label is set, offset and size of its file; for a plain JPEG
            (`images.jpeg_size`) also its height and width; and for one of the expected size that nothing changes
            before the crop, the crop's row and column, which are set in the slot too. Else sizes are 0, and row and
            column -1.
    """

    pending: NDArray[np.uint8]
    file: NDArray[np.uint8]
    found: NDArray[np.int64]

    def encoded(self, i: int) -> memoryview | None:
        """Return the encoded image of sample i, whose label is set; None if the kernel did not locate it."""
        begin, length = self.found[i, :2].tolist()
        return self.file[begin : begin + length].data if length else None

    def plain_jpeg(self, i: int) -> tuple[NDArray[np.uint8], int, int] | None:
        """Return file, height and width of sample i if it is a plain JPEG that the kernel located."""
        begin, length, height, width = self.found[i, :4].tolist()
        return (self.file[begin : begin + length], height, width) if height else None

    def corner(self, i: int) -> tuple[int, int] | None:
        """Return row and column of the crop of sample i if nothing changes its image before; the slot has them too."""
        top, left = self.found[i, 4:].tolist()
        return (top, left) if top >= 0 else None


def copy_records(
    index: LmdbIndex,
    records: NDArray[np.int64],
    samples: NDArray[np.int64],
    transformer: DataTransformer,
    seed: int,
    stream: int,
    slot: ImageSlot,
    block: NDArray[np.uint8],
    threads: int,
    encoded: bool,
) -> BulkCopy | None:
    """Copy the cropped images of records into the slots of a block, and locate encoded images.

    Returns None, and does nothing, as long as the kernel is not worth its compilation or the file cannot be mapped.

    Copies and located images are valid only if the index's `check` passes after their use: the file may change, and
    lost pages read as zeros. Images that the transformer preprocesses are not copied.

    Args:
        index: offsets of the records; `find` must have located them.
        records: record numbers, slot.count per slot.
        samples: global sample numbers of the records.
        transformer: provides the crop and mirror settings; the device applies mean and scale.
        seed: the solver's seed.
        stream: the layer's random stream.
        slot: layout of a batch.
        block: the slots' memory.
        threads: number of threads.
        encoded: whether most images are encoded.
    """
    centered = transformer.center_crops_mean
    settings: tuple[Any, ...] = (
        int(not transformer.preprocesses),
        slot.count,
        slot.size,
        slot.crops_at,
        slot.pixels_at,
        slot.channels,
        slot.height,
        slot.width,
        transformer.crop,
        int(transformer.random_crop),
        int(transformer.mirror),
        int(centered),
        *((0, 0) if centered else transformer.mean_size),
        *key_of(transformer.seed(seed), stream),
    )
    if not _copy_records.should_compile(records.size, _COMPILE_COST_FILES if encoded else _COMPILE_COST_IMAGES):
        return None
    file = index.mapped()
    if file is None:
        return None
    image_bytes = slot.channels * slot.height * slot.width
    pending = np.ones(records.size, np.uint8)
    found = np.tile(np.array([0, 0, 0, 0, -1, -1]), (records.size, 1))
    _copy_records.run(
        threads,
        records.size,
        max(1, _MIN_THREAD_BYTES // image_bytes),
        file,
        host_address(file),
        index.page_size,
        index.offsets,
        index.sizes,
        np.ascontiguousarray(records),
        np.ascontiguousarray(samples),
        host_address(block),
        block,
        block,
        pending,
        found,
        int(transformer.nvidia),
        *settings,
    )
    return BulkCopy(pending, file, found)


def copy_crops(
    images: Sequence[NDArray[np.uint8] | None], corners: NDArray[np.int64], pixels: NDArray[np.uint8]
) -> None:
    """Copy crops of images, without the GIL.

    Args:
        images: contiguous (H, W, 3); None: nothing to copy.
        corners: (N, 2), contiguous: row and column of each crop.
        pixels: receives the crops: (N, 3, h, w), contiguous.
    """
    count, _, height, width = pixels.shape
    places = [(0, 0) if image is None else (host_address(image), image.shape[1]) for image in images]
    table = np.array(places, np.int64)
    _copy_crops.run(1, count, count, table, corners, host_address(pixels), height, width)
