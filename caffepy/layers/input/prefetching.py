"""What data layers that read ahead have in common: their schedule, their prefetch thread, their place in a snapshot."""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol

from caffepy.awake import awake_seconds
from caffepy.backend.input_ring import ByteImages, InputRing
from caffepy.data.prefetch import Batch, Loader, Prefetcher
from caffepy.data.schedule import TestSchedule, TrainSchedule
from caffepy.errors import AbortedError, RunError
from caffepy.layers.core.base import Blobs, Layer
from caffepy.layers.input.feeding import (
    ByteTransfer,
    FloatTransfer,
    HostToDeviceTransfer,
    expected_bytes,
    passes_together,
)
from caffepy.proto import caffe_pb2

logger = logging.getLogger(__name__)

_MOST_THREADS = 8
"""More threads than this copy no faster from one memory."""


class Source(Protocol):
    """What a data layer opens in `setup` and closes in `close`."""

    def fingerprint(self) -> dict[str, str]:
        """What tells it from another source of the same name; see `caffepy.data.sources.source.RecordSource`."""

    def close(self) -> None:
        """Give back what is open. Callable twice."""


class DescribingLoader(Loader, Protocol):
    """A loader that can name records."""

    def describe(self, sample: int) -> str:
        """What messages call a global sample; may be called by any thread."""


class PrefetchingLayer(Layer):
    """A layer whose tops are read from somewhere by a thread of its own.

    In training the tops hold this device's part of the global batch, in testing one batch of those that this device
    scores; see `caffepy.data.schedule`. Seed and pass number are looked at when the first batch is asked for, so a
    snapshot may be restored until then.
    """

    half = True
    exact_tops = 1
    bottoms = (0, 0)
    has_backward = False
    feeds = True
    depth: ClassVar[int] = 4
    """Batches read ahead, where the prototxt does not say."""

    @abstractmethod
    def batch_size(self) -> int:
        """The prototxt's batch_size."""

    @abstractmethod
    def open(self) -> tuple[Source, list[tuple[int, ...]]]:
        """The source, and the shape of one sample of each top."""

    @abstractmethod
    def make_loader(self) -> DescribingLoader:
        """What fills this layer's batches; called when the seed is settled."""

    def byte_images(self, count: int) -> ByteImages | None:
        """How batches of `count` records come if these are images of bytes; None: as floats."""
        return None

    def fingerprint(self) -> dict[str, str]:
        """What tells the layer's data from others of the same name, by what messages call it.

        Raises:
            DataError: the source cannot be read.
        """
        return {} if self._source is None else self._source.fingerprint()

    def threads(self, asked: int) -> int:
        """How many threads read, given the prototxt's number (0: automatic).

        A GPU leaves the cores of its process to the readers; on the CPU they belong to the solver.
        """
        if asked:
            return asked
        from caffepy.backend.cpu.jit.threads import cpu_count

        shared = cpu_count() // max(self.context.shard.devices_per_rank, 1)
        return min(max(shared - 1, 1), _MOST_THREADS) if self.backend.asynchronous else 1

    def prefetch_depth(self) -> int:
        """Batches to read ahead."""
        return self.depth

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self._closed = False
        self._tops = list(top)
        self._batch: Batch | None = None
        self._form: HostToDeviceTransfer | None = None
        self._images: ByteImages | None = None
        self._taken: HostToDeviceTransfer | None = None
        """The form that the last `forward` took."""
        self._fed: dict[int, HostToDeviceTransfer] = {}
        """How the passes that were fed, and not consumed yet, came."""
        self._restarted = False
        self._waited = 0.0
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
        for blob, shape in zip(top, self._sample_shapes(), strict=True):
            blob.reshape((self._count, *shape))
        if self._root:
            logger.info("output data size: %s", ",".join(map(str, top[0].shape)))
        if self.context.first_sample is None:
            self.context.first_sample = lambda number: self.schedule.first_sample(number)
            self.context.describe_sample = self.describe_sample

    def _sample_shapes(self) -> Sequence[tuple[int, ...]]:
        shapes = self.context.sample_shapes.get(self.name)
        if shapes is None:
            self._source, shapes = self.open()
        return shapes

    def _warn_if_rounded(self, size: int) -> None:
        shard = self.context.shard
        divided = self.context.phase == caffe_pb2.TRAIN and not shard.per_device_batch
        if divided and size % shard.devices_per_rank and self._root:
            logger.warning(
                "layer '%s': batch_size %d cannot be divided among %d devices; rounded up to %d a device, %d in all",
                self.name, size, shard.devices_per_rank, self._count, self._count * shard.devices_per_rank,
            )  # fmt: skip

    @property
    def _root(self) -> bool:
        return self.context.shard.rank == 0 and self.backend.holds_values

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        """The tops have their shapes from `setup` and take those of each batch."""

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        """Make the tops of what was fed. Without a net that feeds it the layer feeds itself."""
        if not self.backend.holds_values:
            for blob in top:
                self.backend.fill(blob.data, 0.0)
            return
        counter, number = self.counter(), self.context.passes.number
        alone = isinstance(counter, tuple) and number not in self._fed
        if alone:
            self.feed(number)
        form = self._fed.get(number, self._form)
        assert form is not None, f"layer '{self.name}': forward before any feed"
        _reshape(top, form)
        form.take(counter, top)
        self._taken = form
        if alone:
            self.consumed(number)

    # -- from the host to the device -----------------------------------------------------------------

    def feed(self, number: int) -> None:
        if number in self._fed or not self.backend.holds_values:
            return
        if self._closed:
            raise AbortedError(f"layer '{self.name}' ({self.type}): closed")
        batch = self._batch
        if batch is None or not batch.number <= number < batch.number + batch.passes:
            self._batch = batch = self._bring(number)
        assert self._form is not None
        self._fed[number] = self._form
        _reshape(self._tops, self._form)

    def ring_bytes(self) -> int:
        """Device memory that batches pass through on their way to the tops; until the first one came, an estimate."""
        if self._form is not None:
            return self._form.ring.slot_size * self._form.ring.slots
        can_be_bytes = type(self).byte_images is not PrefetchingLayer.byte_images
        return expected_bytes([top.shape for top in self._tops], can_be_bytes, self.context.iter_size)

    def consumed(self, number: int) -> None:
        form = self._fed.pop(number, None)
        if form is None:
            return
        form.ring.consumed(number)
        present = self._form is not None and form.ring is self._form.ring
        if not present and all(other.ring is not form.ring for other in self._fed.values()):
            form.ring.close()

    def outdated(self) -> bool:
        return self._taken is not None and self._form is not self._taken

    def known_until(self, number: int) -> int:
        return number if self._batch is None else max(number, self._batch.number + self._batch.passes)

    @property
    def waited(self) -> float:
        """Seconds that this layer's solver has waited for batches to be read."""
        return self._waited + (self._prefetcher.waited if self._prefetcher is not None else 0.0)

    def _bring(self, number: int) -> Batch:
        """Get the batch that begins with pass `number` and put it on its way to the device."""
        prefetcher = self._started()
        batch = prefetcher.get(number)
        form = self._form_of(batch)
        self._wait_for_room(form.ring)
        form.put(batch, lambda: prefetcher.release(batch))
        self._form = form
        return batch

    def _form_of(self, batch: Batch) -> HostToDeviceTransfer:
        """The form that takes a batch: the present one if it fits."""
        form, ahead = self._form, self.context.iter_size
        if self._restarted and form is not None:
            form.ring.restart()
        self._restarted = False
        if batch.slot is not None:
            if not isinstance(form, ByteTransfer):
                assert self._images is not None
                form = ByteTransfer(self.backend, self._images, len(self._tops), ahead)
            return form
        shapes = [array.shape for array in batch.arrays]
        if not isinstance(form, FloatTransfer) or form.shapes != shapes:
            form = FloatTransfer(self.backend, shapes, ahead, form.ring if isinstance(form, FloatTransfer) else None)
        return form

    def _wait_for_room(self, ring: InputRing) -> None:
        """Wait while the device is a whole ring behind: not without end, and not after `close`."""
        started = awake_seconds()
        while not ring.ready():
            if self._closed:
                raise AbortedError(f"layer '{self.name}' ({self.type}): closed while waiting for the device")
            if awake_seconds() > started + self.context.timeout:
                raise RunError(
                    f"layer '{self.name}' ({self.type}): {self.backend.name} has taken no input for "
                    f"{self.context.timeout:.0f} s"
                )
            time.sleep(0.0002)

    def _started(self) -> Prefetcher:
        if self._prefetcher is None:
            self._loader = self.make_loader()
            self._images = self.byte_images(self._count)
            slot = None if self._images is None else self._images.slot
            self._prefetcher = Prefetcher(
                self._loader,
                self.schedule.first_sample,
                self._count,
                tops=len(self.param.top),
                first_pass=self.context.passes.number,
                depth=self.prefetch_depth(),
                where=f"layer '{self.name}' ({self.type})",
                slot=slot,
                block=1 if slot is None else passes_together(slot),
                memory=self.backend.host_memory,
                timeout=self.context.timeout,
            )
        return self._prefetcher

    # -- the place among the samples -----------------------------------------------------------------

    @property
    def schedule(self) -> TrainSchedule | TestSchedule:
        """Which samples this device takes; begins at the pass in which it is first asked for."""
        if self._schedule is None:
            shard, first_pass = self.context.shard, self.context.passes.number
            if self.context.phase == caffe_pb2.TRAIN:
                self._schedule = TrainSchedule(shard, self.batch_size(), self._start, first_pass)
            else:
                self._schedule = TestSchedule(shard, self.batch_size(), self.context.test_iter, self._start, first_pass)
        return self._schedule

    def position(self) -> int:
        """The global sample number at which the next pass (training) or the present test begins on all devices."""
        return self.schedule.position(self.context.passes.number)

    def seek(self, position: int) -> None:
        """Let the next pass begin at global sample `position` on all devices; what was read ahead is dropped."""
        if self._prefetcher is not None:
            if not self._prefetcher.close():  # two threads at one cursor would read anything
                raise RunError(f"layer '{self.name}' ({self.type}): still reading; is the disk or network drive there?")
            self._waited += self._prefetcher.waited
            self._prefetcher = None
        self._batch = None
        self._fed.clear()
        self._restarted = True
        self._start = position
        self._schedule = None

    def describe_sample(self, number: int, place: int) -> str:
        """What messages call the sample at `place` of this device's batch of pass `number`."""
        loader = self._loader or self.make_loader()
        return loader.describe(self.schedule.first_sample(number) + place)

    def close(self) -> None:
        self._closed = True
        prefetcher, self._prefetcher = getattr(self, "_prefetcher", None), None
        ended = prefetcher is None or prefetcher.close()
        for form in (getattr(self, "_form", None), *getattr(self, "_fed", {}).values()):
            if form is not None:
                form.ring.close()
        source = getattr(self, "_source", None)
        if source is not None and ended:  # a thread that still reads would fall into unmapped memory
            self._source = None
            source.close()


def _reshape(tops: Blobs, form: HostToDeviceTransfer) -> None:
    for blob, shape in zip(tops, form.shapes, strict=True):
        blob.reshape(shape)
