"""Decoding of a loader's images in parts of batches: which images, and with which of several decoders.

`caffepy.layers.input.images` makes it; `caffepy.data.loader` calls it. Images that are not plain JPEGs stay
pending, as do images that the decoders refuse. The loader decodes pending images one by one with OpenCV.
"""

from __future__ import annotations

from collections.abc import Sequence
from queue import SimpleQueue
from time import perf_counter

import numpy as np

from caffepy.backend.image_decoder import AREA, ImageDecoder
from caffepy.data.images.datum import MAX_PIXELS
from caffepy.data.images.jpeg import jpeg_size
from caffepy.data.loader import Block, BlockDecoder, ImageLoader
from caffepy.data.transform import Transformer
from caffepy.data.workers import Workers
from caffepy.errors import CaffepyError
from caffepy.stages import DECODING

_PART = 64
"""Most images of a part."""
_CHANNELS = 3
_MAX_SIDE = 1 << 16
"""Most pixels of a resized image's side, as in `random_resize`."""


class BatchDecoding(BlockDecoder):
    """Decodes parts of a loader's blocks.

    Args:
        decoders: work at the same time: while some decode, threads prepare parts for the others.
        transformer: the loader's; its `host_only` is empty.
    """

    def __init__(self, decoders: Sequence[ImageDecoder], transformer: Transformer) -> None:
        self._transformer = transformer
        self._decoders: SimpleQueue[ImageDecoder] = SimpleQueue()
        for decoder in decoders:
            self._decoders.put(decoder)
        self._workers = Workers(len(decoders), "decode")

    def decode(self, loader: ImageLoader, block: Block) -> None:
        """Fill the pending samples of a block that are plain JPEGs."""
        if block.slot.channels == _CHANNELS:
            ranges = block.ranges(_PART)
            self._workers.run(lambda number: self._decode_part(loader, block, ranges[number]), range(len(ranges)))

    def _decode_part(self, loader: ImageLoader, block: Block, samples: range) -> None:
        """Decode samples of one slot."""
        places = np.zeros((len(samples), 5), np.int64)
        prepared = [self._prepare(loader, block, i, place) for i, place in zip(samples, places, strict=True)]
        files = [file for file, _ in prepared]
        if all(file is None for file in files):
            return
        start = perf_counter()
        decoder = self._decoders.get()
        try:
            decoded = decoder.decode(files, places, block.pixels(samples))
        finally:
            self._decoders.put(decoder)
        loader.stages.add(DECODING, start)
        for i, done, (_, label), place in zip(samples, decoded, prepared, places, strict=True):
            if done:
                loader.mark_filled(i, block, int(place[2]), int(place[3]), label)

    def _prepare(
        self, loader: ImageLoader, block: Block, i: int, place: np.ndarray
    ) -> tuple[np.ndarray | None, float | None]:
        """Return the file of sample i, None if the loader must decode it, and its label; set its place.

        The label is None if it is in the slot.
        """
        if not block.pending[i]:
            return None, None
        bulk = block.bulk
        located = None if bulk is None else bulk.plain_jpeg(i)
        if bulk is not None and located and (corner := bulk.corner(i)):
            place[:4] = *located[1:], *corner
            return located[0], None
        try:
            data, label = loader.encoded_file(i, block)
        except (CaffepyError, OSError, ValueError, MemoryError):  # the loader raises it again and reports it
            return None, None
        if data is None:
            return None, None
        height, width, plain = (*located[1:], 1) if located else jpeg_size(data, 0, len(data), self._transformer.nvidia)
        if not plain or height * width > MAX_PIXELS:
            return None, None
        rng = block.rngs[i].copy() if block.rngs else None
        rows, columns, interpolation = self._transformer.draw_size(height, width, rng)
        slot = block.slot
        enlarges = rows > height or columns > width
        exact = self._transformer.crop or (rows, columns) == (slot.height, slot.width)
        fits = slot.height <= rows <= _MAX_SIDE and slot.width <= columns <= _MAX_SIDE
        if not (exact and fits) or (interpolation == AREA and enlarges):
            return None, None
        place[:] = rows, columns, *self._transformer.crop_offset(rows, columns, block.crop_params, i), interpolation
        return np.frombuffer(data, np.uint8), label

    def close(self) -> None:
        """Stop the threads and free the decoders' memory. Idempotent."""
        self._workers.close()
        while not self._decoders.empty():
            self._decoders.get().close()
