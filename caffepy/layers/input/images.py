"""The base class of data layers that read images: their loader, and what decodes its images."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Sequence
from time import monotonic

from caffepy.backend.input_ring import ByteImages
from caffepy.data.batch_decoding import BatchDecoding
from caffepy.data.loader import MOST_DECODING_THREADS, ImageLoader
from caffepy.data.prefetch import Batch, Loader, Prefetcher
from caffepy.data.transform import Transformer
from caffepy.errors import MissingExtraError
from caffepy.files import working_folder
from caffepy.layers.core.base import Blobs
from caffepy.layers.input.prefetching import DescribingLoader, PrefetchingLayer
from caffepy.layers.input.process_loader import ProcessLoader, reading_task
from caffepy.proto import caffe_pb2
from caffepy.stages import DECODING

logger = logging.getLogger(__name__)

_DECODERS = 4
"""Decoders of a GPU that work at the same time."""
_FIRST_PASSES, _JUDGED_PASSES = 20, 100
"""With `decode: AUTO`: passes that are not judged, because threads and kernels start, and the passes after them."""
_MAX_WAIT = 0.05
"""With `decode: AUTO`: share of the time that training may wait for the CPU's decoding."""


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
        loader = self.image_loader(stream.seed, stream.stream)
        self._passes = 0
        self._judged_from: tuple[float, float] | None = None
        self._judges = False
        wanted = self._wanted_decoder()
        if wanted != "cpu" and (reason := self._host_only()):
            logger.warning("%s: the CPU decodes: %s", self.where, reason)
            wanted = "cpu"
        if wanted == "gpu":
            self._decode_on_device(loader)
            logger.info("%s: the GPU decodes plain JPEGs, as decode says", self.where)
        elif wanted == "auto":
            self._judges = loader.threads <= MOST_DECODING_THREADS
            if not self._judges:
                logger.info("%s: the CPU decodes: %d cores outdo a GPU's JPEG engines", self.where, loader.threads)
        return loader

    def loaders(self, loader: DescribingLoader) -> Sequence[Loader]:
        """Return the layer's loader, or in training processes, if threads would wait for Python's lock (the GIL)."""
        assert isinstance(loader, ImageLoader)
        self._processes = []
        several = loader.threads > 1 and self.context.phase == caffe_pb2.TRAIN and not self._judges
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

    def _decode_on_device(self, loader: ImageLoader) -> None:
        decoders = [self.backend.image_decoder() for _ in range(_DECODERS)]
        loader.decode_with(BatchDecoding(decoders, self._transformer))

    def _wanted_decoder(self) -> str:
        """Return cpu, gpu or auto; in a test auto is cpu."""
        field = self.param.transform_param.decode
        wanted = self.context.decode or caffe_pb2.TransformationParameter.Decoder.Name(field).lower()
        return "cpu" if wanted == "auto" and self.context.phase == caffe_pb2.TEST else wanted

    def _host_only(self) -> str:
        """Return why only the host can decode this layer's images; empty: the device can."""
        if not self.backend.decodes_images:
            return f"{self.backend.name} cannot"
        if field := self._transformer.host_only():
            return f"{field} is applied on the CPU only"
        return "" if self.byte_images(1) is not None else f"the transformation of {self.param.type} is the CPU's"

    def next_batch(self, number: int) -> tuple[Prefetcher, Batch]:
        found = super().next_batch(number)
        if self._judges:
            self._judge(found[1].passes)
        return found

    def _judge(self, passes: int) -> None:
        """Let the GPU decode if the first batches came late because of the CPU's decoding (`decode: AUTO`)."""
        self._passes += passes
        now, waited = monotonic(), self.waited()[DECODING]
        if self._judged_from is None and self._passes >= _FIRST_PASSES:
            self._judged_from = now, waited
        if self._judged_from is None or self._passes < _FIRST_PASSES + _JUDGED_PASSES:
            return
        self._judges = False
        seconds = now - self._judged_from[0]
        share = (waited - self._judged_from[1]) / seconds if seconds > 0 else 0.0
        if share <= _MAX_WAIT:
            logger.info("%s: the CPU decodes: training waits %.0f %% of the time for it", self.where, 100 * share)
            return
        loader = self._loader
        assert isinstance(loader, ImageLoader)
        try:
            self._decode_on_device(loader)
        except MissingExtraError as error:
            logger.warning("%s: the CPU decodes, and training waits for it: %s", self.where, error)
        else:
            logger.info(
                "%s: the GPU decodes from now on: training waited %.0f %% of the time for the CPU",
                self.where,
                100 * share,
            )

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
