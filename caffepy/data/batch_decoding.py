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
from caffepy.data.images.jpeg import plain_jpeg_size
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
        count, total = block.slot.count, len(block.pending)
        if block.slot.channels != _CHANNELS:
            return
        parts = [
            (first, min(first + _PART, slot + count))
            for slot in range(0, total, count)
            for first in range(slot, slot + count, _PART)
        ]
        self._workers.run(lambda number: self._decode_part(loader, block, *parts[number]), range(len(parts)))

    def _decode_part(self, loader: ImageLoader, block: Block, first: int, end: int) -> None:
        """Decode the samples [first, end) of one slot."""
        slot, files, labels = block.slot, [], []
        places = np.zeros((end - first, 5), np.int64)
        for i in range(first, end):
            file, label = self._prepare(loader, block, i, places[i - first])
            files.append(file)
            labels.append(label)
        if all(file is None for file in files):
            return
        start = perf_counter()
        number, index = divmod(first, slot.count)
        pixels = block.parts[number][2][index : index + end - first]
        decoder = self._decoders.get()
        try:
            decoded = decoder.decode(files, places, pixels)
        finally:
            self._decoders.put(decoder)
        loader.stages.add(DECODING, start)
        for i, done in enumerate(decoded):
            if done:
                loader.mark_filled(first + i, block, int(places[i, 2]), int(places[i, 3]), labels[i])

    def _prepare(self, loader: ImageLoader, block: Block, i: int, place: np.ndarray) -> tuple[np.ndarray | None, float]:
        """Return the file of sample i, None if the loader must decode it, and its label; set its place."""
        if not block.pending[i]:
            return None, 0.0
        try:
            data, label = loader.encoded_file(i, block)
        except (CaffepyError, OSError, ValueError, MemoryError):  # the loader raises it again and reports it
            return None, 0.0
        size = None if data is None else plain_jpeg_size(data, self._transformer.nvidia)
        if data is None or size is None or size[0] * size[1] > MAX_PIXELS:
            return None, 0.0
        rows, columns, interpolation = self._transformer.draw_size(*size, block.rngs[i].copy() if block.rngs else None)
        slot = block.slot
        enlarges = rows > size[0] or columns > size[1]
        exact = self._transformer.crop or (rows, columns) == (slot.height, slot.width)
        fits = slot.height <= rows <= _MAX_SIDE and slot.width <= columns <= _MAX_SIDE
        if not (exact and fits) or (interpolation == AREA and enlarges):
            return None, 0.0
        place[:] = rows, columns, *self._transformer.crop_offset(rows, columns, block.crop_params, i), interpolation
        return np.frombuffer(data, np.uint8), label

    def close(self) -> None:
        """Stop the threads and free the decoders' memory. Idempotent."""
        self._workers.close()
        while not self._decoders.empty():
            self._decoders.get().close()
