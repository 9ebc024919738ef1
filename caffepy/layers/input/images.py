"""Data and ImageData, and the base class of layers that read images: their loader, its threads or processes."""

from __future__ import annotations

import logging
import math
import os
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from caffepy.backend.types import ByteImages
from caffepy.data import random
from caffepy.data.datum import parse_datum
from caffepy.data.loader import DatumLoader, ImageCache, ImageFileLoader, ImageLoader, shared_cache
from caffepy.data.prefetch import Loader
from caffepy.data.sampler import Sampler
from caffepy.data.sources.databases import LevelDbSource, LmdbSource, RecordSource, is_leveldb
from caffepy.data.sources.image_list import ImageListSource
from caffepy.data.transform import DataTransformer, both_sides
from caffepy.errors import DataError
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.input.prefetching import DescribingLoader, PrefetchingLayer, Source
from caffepy.layers.input.process_loader import ProcessLoader, reading_task
from caffepy.layers.layer import Blobs, register_layer
from caffepy.utils.files import working_folder

logger = logging.getLogger(__name__)


class ImagesLayer(PrefetchingLayer):
    """A data layer whose records are images."""

    _transformer: DataTransformer

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self._folder = working_folder()
        self._processes: list[ProcessLoader] = []
        super().setup(bottom, top)

    @abstractmethod
    def image_loader(self, seed: int, stream: int) -> ImageLoader:
        """Return a loader. Crops, mirroring and order follow from `seed` and `stream`."""

    def make_transformer(self) -> DataTransformer:
        """Return the transformation of `transform_param`."""
        param, context = self.param.transform_param, self.context
        return DataTransformer(param, context.phase, context.resolve, self.where, context.nvidia)

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


def open_records(path: Path, leveldb: bool, where: str, made_by: str) -> RecordSource:
    """Open a database. An LMDB is recognised by its files, because the default of `backend` is LevelDB.

    Args:
        path: the folder.
        leveldb: whether the prototxt's backend is LEVELDB.
        where: the layer, for messages.
        made_by: advice where there is no database.

    Raises:
        DataError: the database does not exist or cannot be read.
    """
    if not os.path.lexists(path):
        kind = "database" if leveldb else "LMDB"  # the default of `backend` is LevelDB
        raise DataError(f"{where}: {kind} '{path}' does not exist (looked from {working_folder()}); {made_by}")
    if os.path.exists(path / "data.mdb") or not (leveldb or is_leveldb(path)):
        try:
            return LmdbSource(path)
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
    return LevelDbSource(path)


@register_layer("Data")
class DataLayer(ImagesLayer):
    """Images, and with a second top labels, from a database of Datums (Caffe's `data_layer.cpp`).

    Tops: (N, C, H, W), (N,).

    Raises:
        ConfigError: a setting is missing or contradictory.
        DataError: the database does not exist, or it or a record cannot be read.
    """

    tops: ClassVar[tuple[int, int | None]] = (1, 2)
    made_by = "`caffepy data mnist` and `caffepy convert_imageset` make such databases"
    """The command that makes such a database, for messages."""

    def batch_size(self) -> int:
        return self.param.data_param.batch_size

    def prefetch_depth(self) -> int:
        return self.param.data_param.prefetch

    def open(self) -> tuple[Source, list[tuple[int, ...]]]:
        param = self.param.data_param
        if not param.source:
            raise self.error("data_param.source must name an LMDB or a LevelDB")
        if param.force_encoded_color:
            logger.warning(
                "%s: force_encoded_color has no effect, as in Caffe; use transform_param's force_color", self.where
            )
        self._transformer = self.make_transformer()
        self._records: RecordSource = self._open_records(self.context.resolve(param.source))
        try:
            return self._records, self.shapes()[: len(self.param.top)]
        except BaseException:
            self._records.close()
            raise

    def shapes(self) -> list[tuple[int, ...]]:
        """Return the shape of one sample of each top. Called when the records are open."""
        return [self.image_loader(0, 0).sample_shape(), ()]

    def _open_records(self, path: Path) -> RecordSource:
        leveldb = self.param.data_param.backend == caffe_pb2.DataParameter.LEVELDB
        return open_records(path, leveldb, self.where, self.made_by)

    def record_order(self, seed: int, stream: int) -> Sampler:
        """Return the order in which the records are read."""
        param = self.param.data_param
        skip = random.rand_skip_count(seed, stream, param.rand_skip)
        shuffle = param.shuffle and self.context.phase == caffe_pb2.TRAIN
        return Sampler(len(self._records), skip, shuffle, seed, stream)

    def image_loader(self, seed: int, stream: int) -> ImageLoader:
        threads = self.threads(self.param.data_param.threads, self._first_is_encoded())
        order = self.record_order(seed, stream)
        return DatumLoader(self._records, order, self._transformer, seed, stream, self.where, threads)

    def _first_is_encoded(self) -> bool:
        try:
            return parse_datum(self._records.read(0))[0].encoded
        except DataError:
            return False  # the loader raises the error with the record's name


@register_layer("ImageData")
class ImageDataLayer(ImagesLayer):
    """Images and labels from a list of files (Caffe's `image_data_layer.cpp`). Tops: (N, C, H, W), (N,).

    channel-pruning's `new_dim` is the length to which the shorter side is resized, the longer one rounded, and
    `bicubic` resizes so by bicubic interpolation (`io.cpp` of caffe-pro).

    Raises:
        ConfigError: a setting is missing or contradictory.
        DataError: the list or an image cannot be read.
    """

    tops = (2, 2)

    @classmethod
    def told_image(cls, layer: caffe_pb2.LayerParameter, height: int, width: int) -> tuple[int, ...]:
        if not layer.image_data_param.is_color:
            return 1, height, width
        return super().told_image(layer, height, width)

    def batch_size(self) -> int:
        return self.param.image_data_param.batch_size

    def open(self) -> tuple[Source, list[tuple[int, ...]]]:
        param = self.param.image_data_param
        self._size = both_sides(param.new_height, param.new_width, self.where)
        if param.new_dim and (param.new_height or param.short_side):
            raise self.error("give new_dim, short_side, or new_height and new_width; only one of them")
        self._transformer = self.make_transformer()
        self._list = ImageListSource(self.context.resolve(param.source), param.root_folder)
        self._cache = self._open_cache()
        if param.rand_skip > len(self._list):
            raise self.error(
                f"rand_skip {param.rand_skip} is more than the {len(self._list)} images of '{param.source}'"
            )
        shape = self.image_loader(0, 0).sample_shape()
        if param.precache and self._cache is not None:
            self._fill_cache()
        return self._list, [shape, ()]

    def _open_cache(self) -> ImageCache | None:
        """Return the cache of decoded images. Layers of the process with the same decoding settings share it."""
        param = self.param.image_data_param
        if not (param.cache or param.precache):
            return None
        sizes = (param.new_height, param.new_width, param.short_side, param.new_dim, param.bicubic)
        return shared_cache((*sizes, param.is_color, self.context.nvidia))

    def _fill_cache(self) -> None:
        loader = self.image_loader(0, 0)
        loader.fill_cache()
        loader.close()

    def image_loader(self, seed: int, stream: int) -> ImageFileLoader:
        param = self.param.image_data_param
        skip = random.rand_skip_count(seed, stream, param.rand_skip)
        total = len(self._list)
        order = Sampler(self._epoch_images(total), skip, param.shuffle, seed, stream, total)
        threads = self.threads(param.threads if param.HasField("threads") else 0)
        return ImageFileLoader(
            self._list,
            order,
            self._transformer,
            seed,
            stream,
            self.where,
            threads,
            color=param.is_color,
            size=self._size,
            short_side=param.short_side,
            cache=self._cache,
            new_dim=param.new_dim,
            bicubic=param.bicubic,
        )

    def _epoch_images(self, total: int) -> int:
        """Return the number of images in an epoch: in TRAIN total / dataset_share_per_node if that is above 1."""
        share = self.param.image_data_param.dataset_share_per_node
        if not share > 1 or self.context.phase != caffe_pb2.TRAIN:
            return total
        return max(math.floor(total / share + 0.5), 1)
