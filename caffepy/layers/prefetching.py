"""What data layers that read ahead have in common: their schedule, their prefetch thread, their place in a snapshot."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol

from caffepy.data.prefetch import Batch, Loader, Prefetcher
from caffepy.data.schedule import TestSchedule, TrainSchedule
from caffepy.errors import AbortedError, RunError
from caffepy.layers.base import Blobs, Layer
from caffepy.proto import caffe_pb2

logger = logging.getLogger(__name__)


class Source(Protocol):
    """What a data layer opens in `setup` and closes in `close`."""

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

    def prefetch_depth(self) -> int:
        """Batches to read ahead."""
        return self.depth

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self._closed = False
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
        prefetcher = self._started()
        batch = prefetcher.get(self.context.passes.number)
        self._hand_over(batch, top)
        prefetcher.release(batch)

    def _hand_over(self, batch: Batch, top: Blobs) -> None:
        for blob, array in zip(top, batch.arrays, strict=True):
            blob.reshape(array.shape)
            self.backend.from_host(array, blob.data)

    def _started(self) -> Prefetcher:
        if self._closed:
            raise AbortedError(f"layer '{self.name}' ({self.type}): closed")
        if self._prefetcher is None:
            self._loader = self.make_loader()
            self._prefetcher = Prefetcher(
                self._loader,
                self.schedule.first_sample,
                self._count,
                tops=len(self.param.top),
                first_pass=self.context.passes.number,
                depth=self.prefetch_depth(),
                where=f"layer '{self.name}' ({self.type})",
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
            self._prefetcher = None
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
        source = getattr(self, "_source", None)
        if source is not None and ended:  # a thread that still reads would fall into unmapped memory
            self._source = None
            source.close()
