"""Data: images from an LMDB or LevelDB."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import ClassVar

from caffepy.data import random
from caffepy.data.images.datum import parse_datum
from caffepy.data.loader import DatumLoader, ImageLoader
from caffepy.data.order import RecordOrder
from caffepy.data.sources.leveldb import LevelDbSource, is_leveldb
from caffepy.data.sources.lmdb import LmdbSource
from caffepy.data.sources.source import RecordSource
from caffepy.errors import DataError
from caffepy.files import working_folder
from caffepy.layers.core.base import register_layer
from caffepy.layers.input.images import ImagesLayer
from caffepy.layers.input.prefetching import Source
from caffepy.proto import caffe_pb2

logger = logging.getLogger(__name__)


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

    def record_order(self, seed: int, stream: int) -> RecordOrder:
        """Return the order in which the records are read."""
        param = self.param.data_param
        skip = random.rand_skip_count(seed, stream, param.rand_skip) if param.rand_skip else 0
        shuffle = param.shuffle and self.context.phase == caffe_pb2.TRAIN
        return RecordOrder(len(self._records), skip, shuffle, seed, stream)

    def image_loader(self, seed: int, stream: int) -> ImageLoader:
        threads = self.threads(self.param.data_param.threads, self._first_is_encoded())
        order = self.record_order(seed, stream)
        return DatumLoader(self._records, order, self._transformer, seed, stream, self.where, threads)

    def _first_is_encoded(self) -> bool:
        try:
            return parse_datum(self._records.read(0))[0].encoded
        except DataError:
            return False  # the loader raises the error with the record's name
