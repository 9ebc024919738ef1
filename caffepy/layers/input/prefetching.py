"""The base class of data layers: sharding schedule, prefetch thread, copies to the device, position in a snapshot.

Batches are copied from the host to the tops through a ring of slots on the device.
"""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Protocol

import numpy as np

from caffepy.backend.interface import Backend
from caffepy.backend.types import ByteImages, Counter, ImageSlot, InputRing, RandomStream, aligned_size
from caffepy.data.prefetch import Batch, Loader, Prefetcher
from caffepy.data.sharding import TestSchedule, TrainSchedule
from caffepy.errors import AbortedError, RunError
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.layer import Blobs, Layer
from caffepy.logs.performance_report import COPYING, Waits
from caffepy.utils.clocks import suspend_aware_seconds

logger = logging.getLogger(__name__)

_MAX_COPYING_THREADS = 8
"""Memory bandwidth limits readers that only copy: more threads copy no faster."""

_LEAST_ROWS = 16
"""Rows that a batch with a variable number of boxes has at least in training on a GPU, so that its shape seldom changes
and a captured graph can be replayed for other batches."""
_CLOSE_SECONDS = 2.0
"""Limit of the wait for the reader thread when the layer is closed. The thread is a daemon: a dead network drive may
block it for ever."""


class Source(Protocol):
    """The records of a data layer. `PrefetchingLayer.setup` opens it, `PrefetchingLayer.close` closes it."""

    def fingerprint(self) -> dict[str, str]:
        """Return properties by which ranks compare their sources (`caffepy.data.sources.databases.RecordSource`)."""

    def __len__(self) -> int:
        """Return the number of records."""

    def close(self) -> None:
        """Close files and mappings. Idempotent."""


class DescribingLoader(Loader, Protocol):
    """A loader that can name records."""

    def describe(self, sample: int) -> str:
        """Return the name of the record of a global sample, for messages. Thread-safe."""


def seeded_stream(layer: Layer) -> RandomStream:
    """Return a data layer's random stream, with transform_param's random_seed as its seed if that is at least 0."""
    stream, seed = layer.random_stream(), layer.param.transform_param.random_seed
    return stream if seed < 0 else replace(stream, seed=seed)


class PrefetchingLayer(Layer):
    """A layer whose batches are read by a prefetch thread.

    In training the tops hold this device's part of the global batch, in testing one of the batches that this device
    scores (`caffepy.data.sharding`). The layer reads seed and pass number at the first request of a batch: a snapshot
    can be restored before that.

    Raises:
        ConfigError: batch_size is missing, or the number of tops does not match the source.
        DataError: the source cannot be read.
        RunError: reading, or the wait for a free slot of the input ring, takes longer than the timeout.
    """

    supports_half = True
    float32_tops_from = 1
    bottoms = (0, 0)
    has_backward = False
    prefetches = True
    depth: ClassVar[int] = 4
    """Batches read ahead by default."""

    @abstractmethod
    def batch_size(self) -> int:
        """Return the prototxt's batch_size."""

    @abstractmethod
    def open(self) -> tuple[Source, list[tuple[int, ...]]]:
        """Open the source, and return it with the shape of one sample of each top."""

    @abstractmethod
    def make_loader(self) -> DescribingLoader:
        """Return the loader that fills the batches. Called after a snapshot was restored."""

    def loaders(self, loader: DescribingLoader) -> Sequence[Loader]:
        """Return the loaders that fill batches at the same time; `loader` is the layer's own."""
        return [loader]

    @classmethod
    def told_size(cls, layer: caffe_pb2.LayerParameter, nvidia: bool) -> tuple[int, int, str] | None:
        """Return the height and width that the fields fix for all images, and the names of these fields.

        Args:
            layer: the layer as its net gives it; it need not have a source.
            nvidia: the prototxt has NVIDIA's dialect, in which only SSD's layers apply `resize_param`.
        """
        transform, listed = layer.transform_param, layer.image_data_param
        resize = transform.resize_param[0] if transform.resize_param else caffe_pb2.ResizeParameter()
        applied = bool(transform.resize_param) and not nvidia
        fixed = applied and resize.resize_mode != caffe_pb2.ResizeParameter.FIT_SMALL_SIZE
        told = (
            (transform.crop_size, transform.crop_size, "crop_size"),
            (transform.crop_h, transform.crop_w, "crop_h and crop_w"),
            (resize.height if fixed else 0, resize.width if fixed else 0, "resize_param"),
            (listed.new_height, listed.new_width, "new_height and new_width"),
        )
        return next((size for size in told if size[0] and size[1]), None)

    @classmethod
    def told_image(cls, layer: caffe_pb2.LayerParameter, height: int, width: int) -> tuple[int, ...]:
        """Return the shape of a record of images of this size: (C, H, W).

        C is the number of values of `mean_value`, but 3 for one value or none, and 1 for gray images.
        """
        transform = layer.transform_param
        if transform.force_gray:
            return 1, height, width
        channels = len(transform.mean_value)
        return channels if channels > 1 else 3, height, width

    @classmethod
    def label_shapes(cls, layer: caffe_pb2.LayerParameter, image: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the shapes of the tops after the first, for a record of shape `image` and one object."""
        return [()] * (len(layer.top) - 1)

    @classmethod
    def object_list(cls, layer: caffe_pb2.LayerParameter, shapes: Mapping[str, Sequence[int]]) -> int | None:
        """Return the index of the top that holds one list of the objects of all images; None: there is none.

        Args:
            shapes: shape of one record by top.
        """
        return None

    def byte_images(self, count: int) -> ByteImages | None:
        """Return the layout of batches of `count` uint8 images; None: batches are float32."""
        return None

    def fingerprint(self) -> dict[str, str]:
        """Return properties by which ranks compare their data, as descriptions with values.

        Raises:
            DataError: the source cannot be read.
        """
        return {} if self._source is None else self._source.fingerprint()

    def threads(self, requested: int, decodes: bool = True) -> int:
        """Return the number of reader threads.

        With a GPU the readers use the cores of the process. On the CPU backend the solver uses them.

        Args:
            requested: the prototxt's; 0 for automatic.
            decodes: whether the threads decode images; else they only copy.
        """
        if requested:
            return requested
        from caffepy.backend.cpu.jit.deferred import cpu_count

        if not self.backend.asynchronous:
            return 1
        cores = max(cpu_count() // max(self.context.shard.devices_per_rank, 1), 1)
        return cores if decodes else min(max(cores - 1, 1), _MAX_COPYING_THREADS)

    def prefetch_depth(self) -> int:
        """Return the number of batches to read ahead."""
        return self.depth

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self._closed = False
        self._tops = list(top)
        self._copied_passes = range(0)
        """The passes of the batch that was copied last. (The batch's own numbers change when it is reused.)"""
        self._transfer: HostToDeviceTransfer | None = None
        self._images: ByteImages | None = None
        self._last_transfer: HostToDeviceTransfer | None = None
        """The transfer that the last `forward` read, and a captured graph still reads."""
        self._prefetched: dict[int, HostToDeviceTransfer] = {}
        """The transfer of each pass that is prefetched and not released."""
        self._restarted = False
        self._waits = Waits()
        self._prefetcher: Prefetcher | None = None
        self._loader: DescribingLoader | None = None
        self._schedule: TrainSchedule | TestSchedule | None = None
        self._start = 0
        self._source: Source | None = None
        size = self.batch_size()
        if size <= 0:
            raise self.error("batch_size must be given and positive")
        training = self.context.phase == caffe_pb2.TRAIN
        self._count = self.context.shard.device_batch(size) if training else size
        self._warn_if_rounded(size)
        shapes = self._sample_shapes()
        if len(shapes) != len(top):
            raise self.error(
                f"has {len(top)} tops, but the samples of its source have {len(shapes)} parts; use one top for each"
            )
        for index, (blob, shape) in enumerate(zip(top, shapes, strict=True)):
            blob.reshape(self.batch_shape(index, shape))
        if self._root:
            logger.info("output data size: %s", ",".join(map(str, top[0].shape)))
        if self.context.first_sample is None:
            self.context.first_sample = lambda number: self.schedule.first_sample(number)
            self.context.describe_sample = self.describe_sample

    def batch_shape(self, index: int, sample_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a top before the first batch, given the shape of one sample."""
        return (self._count, *sample_shape)

    def _sample_shapes(self) -> Sequence[tuple[int, ...]]:
        known = self.context.sample_shapes
        if all(name in known for name in self.param.top):
            return [known[name] for name in self.param.top]
        return self.open_source()

    def open_source(self) -> Sequence[tuple[int, ...]]:
        """Open the source and keep it; return the shape of one sample of each top.

        Raises:
            DataError: the source cannot be read.
        """
        self._source, shapes = self.open()
        return shapes

    def _warn_if_rounded(self, size: int) -> None:
        shard = self.context.shard
        divided = self.context.phase == caffe_pb2.TRAIN and not shard.per_device_batch
        if divided and size % shard.devices_per_rank and self._root:
            logger.warning(
                "layer '%s': batch_size %d cannot be divided among %d devices; rounded up to %d a device, %d in all",
                self.name,
                size,
                shard.devices_per_rank,
                self._count,
                self._count * shard.devices_per_rank,
            )

    @property
    def _root(self) -> bool:
        return self.context.shard.rank == 0 and self.backend.holds_values

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        """Does nothing: `setup` and each batch shape the tops."""

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        """Fill the tops from the prefetched batch. If the net has not prefetched it, the layer does so now."""
        if not self.backend.holds_values:
            for blob in top:
                self.backend.fill(blob.data, 0.0)
            return
        counter, number = self.counter(), self.context.passes.number
        not_prefetched = isinstance(counter, tuple) and number not in self._prefetched
        if not_prefetched:
            self.prefetch_to_device(number)
        transfer = self._prefetched.get(number, self._transfer)
        assert transfer is not None, f"layer '{self.name}': forward before any prefetch_to_device"
        _reshape(top, transfer)
        transfer.fill_tops(counter, top)
        self._last_transfer = transfer
        if not_prefetched:
            self.release_batch(number)

    # -- from the host to the device -----------------------------------------------------------------

    def prefetch_to_device(self, number: int) -> None:
        if number in self._prefetched or not self.backend.holds_values:
            return
        if self._closed:
            raise AbortedError(f"{self.where}: closed")
        if number not in self._copied_passes:
            self._copy_batch(number)
        assert self._transfer is not None
        self._prefetched[number] = self._transfer
        _reshape(self._tops, self._transfer)

    def ring_bytes(self) -> int:
        """Return the bytes of the device's input ring; before the first batch an estimate."""
        if self._transfer is not None:
            return self._transfer.ring.slot_size * self._transfer.ring.slots
        can_be_bytes = type(self).byte_images is not PrefetchingLayer.byte_images
        return expected_bytes([top.shape for top in self._tops], can_be_bytes, self.context.iter_size)

    def release_batch(self, number: int) -> None:
        transfer = self._prefetched.pop(number, None)
        if transfer is None:
            return
        transfer.ring.consumed(number)
        is_current = self._transfer is not None and transfer.ring is self._transfer.ring
        if not is_current and all(other.ring is not transfer.ring for other in self._prefetched.values()):
            transfer.ring.close()

    def transfer_changed(self) -> bool:
        return self._last_transfer is not None and self._transfer is not self._last_transfer

    def shapes_known_until(self, number: int) -> int:
        return max(number, self._copied_passes.stop)

    def waited(self) -> dict[str, float]:
        return dict(self._waits.seconds)

    def stage_totals(self) -> dict[str, float]:
        """Return the seconds of the reader's threads in each stage (`logs.performance_report`); empty: not measured."""
        return {}

    def processor_seconds(self) -> float:
        """Return the seconds of the processor that other processes have used to read for this layer."""
        return 0.0

    def batches_ahead(self) -> int:
        """Return the number of batches that are ready or being filled when training waits for none."""
        return self._start_prefetcher().depth

    def next_batch(self, number: int) -> tuple[Prefetcher, Batch]:
        """Wait for the batch that begins with pass `number`; return it with the prefetcher that takes it back."""
        prefetcher = self._start_prefetcher()
        before = prefetcher.waited
        try:
            return prefetcher, prefetcher.get(number)
        finally:
            self._waits.add(prefetcher.waited - before, self.stage_totals())

    def _copy_batch(self, number: int) -> None:
        """Start the copy of the batch that begins with pass `number` to the device."""
        prefetcher, batch = self.next_batch(number)
        transfer = self._transfer_for(batch)
        self._wait_for_free_slots(transfer.ring)
        self._copied_passes = range(batch.number, batch.number + batch.passes)
        transfer.put(batch, lambda: prefetcher.release(batch))
        self._transfer = transfer

    def _transfer_for(self, batch: Batch) -> HostToDeviceTransfer:
        """Return the transfer for a batch's layout: the current one if it fits, else a new one."""
        transfer, ahead = self._transfer, self.context.iter_size
        if self._restarted and transfer is not None:
            transfer.ring.restart()
        self._restarted = False
        if batch.slot is not None:
            if not isinstance(transfer, ByteTransfer):
                assert self._images is not None
                transfer = ByteTransfer(self.backend, self._images, len(self._tops), ahead)
            return transfer
        shapes = [array.shape for array in batch.arrays]
        if not isinstance(transfer, FloatTransfer) or transfer.shapes != shapes:
            ring = transfer.ring if isinstance(transfer, FloatTransfer) else None
            transfer = FloatTransfer(self.backend, shapes, ahead, ring)
        return transfer

    def _wait_for_free_slots(self, ring: InputRing) -> None:
        """Wait while the device reads every slot of the ring."""
        started = suspend_aware_seconds()
        while not ring.ready():
            if self._closed:
                raise AbortedError(f"{self.where}: closed while waiting for the device")
            if suspend_aware_seconds() > started + self.context.timeout:
                raise RunError(f"{self.where}: {self.backend.name} has taken no input for {self.context.timeout:.0f} s")
            time.sleep(0.0002)
        self._waits.seconds[COPYING] += suspend_aware_seconds() - started

    def _start_prefetcher(self) -> Prefetcher:
        if self._prefetcher is None:
            self._loader = self.make_loader()
            self._images = self.byte_images(self._count)
            slot = None if self._images is None else self._images.slot
            self._prefetcher = Prefetcher(
                self.loaders(self._loader),
                self.schedule.first_sample,
                self._count,
                tops=len(self.param.top),
                depth=self.prefetch_depth(),
                where=self.where,
                slot=slot,
                block=1 if slot is None else passes_per_block(slot),
                least_rows=_LEAST_ROWS if self.backend.asynchronous and self.context.phase == caffe_pb2.TRAIN else 0,
                memory=self.backend.host_memory,
                timeout=self.context.timeout,
                check_wait=self.context.check_wait,
            )
        return self._prefetcher

    # -- position among the samples -----------------------------------------------------------------

    @property
    def schedule(self) -> TrainSchedule | TestSchedule:
        """The schedule of samples of this device. The first access creates it: restore a snapshot before."""
        if self._schedule is None:
            shard, first_pass = self.context.shard, self.context.passes.number
            if self.context.phase == caffe_pb2.TRAIN:
                self._schedule = TrainSchedule(shard, self.batch_size(), self._start, first_pass)
            else:
                self._schedule = TestSchedule(shard, self.batch_size(), self.context.test_iter, self._start, first_pass)
        return self._schedule

    def epoch_size(self) -> int | None:
        return len(self._source) if self._source is not None else None

    def position(self) -> int:
        """Return the global number of the first sample of the next pass (TRAIN) or of the current test (TEST)."""
        return self.schedule.position(self.context.passes.number)

    def seek(self, position: int) -> None:
        """Continue with global sample `position` on all devices. Batches that were read ahead are dropped."""
        if self._prefetcher is not None:
            if not self._prefetcher.close():  # a second thread must not use the source at the same time
                raise RunError(f"{self.where}: still reading; is the disk or network drive there?")
            self._prefetcher = None
        self._copied_passes = range(0)
        self._prefetched.clear()
        self._restarted = True
        self._start = position
        self._schedule = None

    def describe_sample(self, number: int, index: int) -> str:
        """Return the name of the record at `index` of this device's batch of pass `number`, for messages."""
        loader = self._loader or self.make_loader()
        return loader.describe(self.schedule.first_sample(number) + index)

    def close(self) -> None:
        self._closed = True
        prefetcher, self._prefetcher = getattr(self, "_prefetcher", None), None
        stopped = prefetcher is None or prefetcher.close(_CLOSE_SECONDS)
        for transfer in (getattr(self, "_transfer", None), *getattr(self, "_prefetched", {}).values()):
            if transfer is not None:
                transfer.ring.close()
        source = getattr(self, "_source", None)
        if source is not None and stopped:  # a reader that is still running would access unmapped memory
            self._source = None
            source.close()


def _reshape(tops: Blobs, transfer: HostToDeviceTransfer) -> None:
    for blob, shape in zip(tops, transfer.shapes, strict=True):
        blob.reshape(shape)


# -- transfer to the device ----------------------------------------------------------------------------


_BLOCK_BYTES = 1 << 21
"""Bytes of a block of passes that are copied at once: small copies are dominated by the cost of their launch."""
_MAX_PASSES = 64
_MIN_BLOCKS = 4


def passes_per_block(slot: ImageSlot) -> int:
    """Return the number of passes that are copied at once, a power of two."""
    return 1 << min(max(_BLOCK_BYTES // slot.size, 1), _MAX_PASSES).bit_length() - 1


def blocks_needed(passes_ahead: int, block: int) -> int:
    """Return the number of blocks of a ring, a power of two, if `passes_ahead` passes are prefetched at once.

    The ring holds the batches of two consecutive iterations at the same time.
    """
    blocks = max(_MIN_BLOCKS, -(-2 * passes_ahead // block) + (block > 1))
    return 1 << (blocks - 1).bit_length()


def expected_bytes(shapes: Sequence[tuple[int, ...]], as_bytes: bool, passes_ahead: int) -> int:
    """Return an estimate of a ring's bytes for tops of these shapes, before the first batch."""
    if as_bytes and len(shapes[0]) == 4:
        slot = ImageSlot(*shapes[0])
        block = passes_per_block(slot)
        return slot.size * block * blocks_needed(passes_ahead, block)
    return sum(aligned_size(4 * math.prod(shape)) for shape in shapes) * blocks_needed(passes_ahead, 1)


class HostToDeviceTransfer(ABC):
    """Copies batches of one layout to slots on the device and fills the tops from the slots.

    Args:
        ring: the slots.
        shapes: of the tops.
    """

    def __init__(self, ring: InputRing, shapes: list[tuple[int, ...]]) -> None:
        self.ring = ring
        self.shapes = shapes

    @abstractmethod
    def put(self, batch: Batch, done: Callable[[], None]) -> None:
        """Start copying a batch to its slots; `done` is called when its host memory may be reused."""

    @abstractmethod
    def fill_tops(self, counter: Counter, tops: Blobs) -> None:
        """Fill the tops with the batch of the pass of `counter`."""


class ByteTransfer(HostToDeviceTransfer):
    """Images copied as uint8 and transformed on the device.

    Args:
        backend: of the tops.
        images: layout, mean and scale.
        tops: 1 for images, 2 for images and labels.
        passes_ahead: passes that are prefetched at once.
    """

    def __init__(self, backend: Backend, images: ByteImages, tops: int, passes_ahead: int) -> None:
        slot = images.slot
        block = passes_per_block(slot)
        ring = backend.input_ring(slot.size, block, blocks_needed(passes_ahead, block))
        super().__init__(ring, [slot.shape, (slot.count,)][:tops])
        self._backend = backend
        self._images = images
        self.slot = images.slot
        self._mean = backend.zeros(images.mean.shape)
        backend.from_host(images.mean, self._mean)

    def put(self, batch: Batch, done: Callable[[], None]) -> None:
        filled = batch.bytes[: batch.passes * self._images.slot.size]
        self.ring.put(batch.number, batch.passes, [(0, filled)], done)

    def fill_tops(self, counter: Counter, tops: Blobs) -> None:
        labels = tops[1].data if len(tops) > 1 else None
        images = self._images
        self._backend.take_images(self.ring, counter, images.slot, self._mean, images.scale, tops[0].data, labels)


class FloatTransfer(HostToDeviceTransfer):
    """Batches of float32 in the memory layout of the tops; a slot holds all tops of a pass.

    Args:
        backend: of the tops.
        shapes: of the tops.
        passes_ahead: passes that are prefetched at once.
        ring: of the last layout, which is reused if its slots are large enough.
    """

    def __init__(
        self, backend: Backend, shapes: list[tuple[int, ...]], passes_ahead: int, ring: InputRing | None = None
    ) -> None:
        sizes = [aligned_size(4 * int(np.prod(shape, dtype=np.int64))) for shape in shapes]
        if ring is None or ring.slot_size < sum(sizes) or ring.block > 1:
            ring = backend.input_ring(sum(sizes), 1, blocks_needed(passes_ahead, 1))
        super().__init__(ring, shapes)
        self._backend = backend
        self._offsets = [sum(sizes[:i]) for i in range(len(sizes))]

    def put(self, batch: Batch, done: Callable[[], None]) -> None:
        self.ring.put(batch.number, 1, list(zip(self._offsets, batch.array_bytes(), strict=True)), done)

    def fill_tops(self, counter: Counter, tops: Blobs) -> None:
        for offset, top in zip(self._offsets, tops, strict=True):
            self._backend.take_values(self.ring, counter, offset, top.data)
