"""The base class of data layers that read images: their loader, and the threads or processes that run it."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Sequence

from caffepy.backend.input_ring import ByteImages
from caffepy.data.loader import ImageLoader
from caffepy.data.prefetch import Loader
from caffepy.data.transform import Transformer
from caffepy.files import working_folder
from caffepy.layers.core.base import Blobs
from caffepy.layers.input.prefetching import DescribingLoader, PrefetchingLayer
from caffepy.layers.input.process_loader import ProcessLoader, reading_task
from caffepy.proto import caffe_pb2

logger = logging.getLogger(__name__)


class ImagesLayer(PrefetchingLayer):
    """A data layer whose records are images."""

    _transformer: Transformer

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self._folder = working_folder()
        self._processes: list[ProcessLoader] = []
        super().setup(bottom, top)

    @abstractmethod
    def image_loader(self, seed: int, stream: int) -> ImageLoader:
        """Return a loader. Crops, mirroring and order follow from `seed` and `stream`."""

    def make_transformer(self) -> Transformer:
        """Return the transformation of `transform_param`."""
        param, context = self.param.transform_param, self.context
        return Transformer(param, context.phase, context.resolve, self.where, context.nvidia)

    def make_loader(self) -> DescribingLoader:
        stream = self.random_stream()
        return self.image_loader(stream.seed, stream.stream)

    def loaders(self, loader: DescribingLoader) -> Sequence[Loader]:
        """Return the layer's loader, or in training processes, if threads would wait for Python's lock (the GIL)."""
        assert isinstance(loader, ImageLoader)
        self._processes = []
        several = loader.threads > 1 and self.context.phase == caffe_pb2.TRAIN
        if several and loader.limited_by_gil():
            stream, warned = self.random_stream(), set[str]()
            if (task := reading_task(self, self._folder, stream.seed, stream.stream)) is not None:
                self._processes = [ProcessLoader(task, loader, self.where, warned) for _ in range(loader.threads)]
                logger.info("%s: %d processes read the images", self.where, loader.threads)
        return self._processes or [loader]

    def close(self) -> None:
        for process in getattr(self, "_processes", []):  # nothing waits for the batches that they fill
            process.close()
        super().close()

    def stage_totals(self) -> dict[str, float]:
        if not isinstance(self._loader, ImageLoader):
            return {}
        totals = self._loader.stages.totals()
        for process in self._processes:
            for stage, seconds in process.stages.items():
                totals[stage] += seconds
        return totals

    def processor_seconds(self) -> float:
        return sum(process.processor_seconds for process in self._processes)

    def byte_images(self, count: int) -> ByteImages | None:
        return self.image_loader(0, 0).byte_images(count)

    def fingerprint(self) -> dict[str, str]:
        return {**super().fingerprint(), **self._transformer.fingerprint()}
