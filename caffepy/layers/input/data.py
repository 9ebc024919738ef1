"""Data: images from an LMDB."""

from __future__ import annotations

import os
from pathlib import Path

from caffepy.data import random
from caffepy.data.loader import DatumLoader, ImageLoader
from caffepy.data.order import RecordOrder
from caffepy.data.sources.lmdb import LmdbSource
from caffepy.data.sources.source import RecordSource
from caffepy.errors import DataError
from caffepy.layers.core.base import register_layer
from caffepy.layers.input.images import ImagesLayer
from caffepy.layers.input.prefetching import Source
from caffepy.proto import caffe_pb2


@register_layer("Data")
class DataLayer(ImagesLayer):
    """Images, and their labels if there is a second top, from an LMDB of Datums (Caffe's `data_layer.cpp`).

    Tops: (N, C, H, W), (N,).
    """

    tops = (1, 2)

    def batch_size(self) -> int:
        return self.param.data_param.batch_size

    def prefetch_depth(self) -> int:
        return self.param.data_param.prefetch

    def open(self) -> tuple[Source, list[tuple[int, ...]]]:
        param = self.param.data_param
        if not param.source:
            raise self.error("data_param.source must name an LMDB")
        self._transformer = self.make_transformer()
        self._records: RecordSource = LmdbSource(self._check_backend(self.context.resolve(param.source)))
        try:
            shape = self.image_loader(0, 0).sample_shape()
        except BaseException:
            self._records.close()
            raise
        return self._records, [shape, ()][: len(self.param.top)]

    def _check_backend(self, path: Path) -> Path:
        """The default of `backend` is LevelDB, so an LMDB is taken as one whatever the prototxt says."""
        param = self.param.data_param
        if param.backend != caffe_pb2.DataParameter.LMDB and not os.path.exists(path / "data.mdb"):
            default = "" if param.HasField("backend") else " (the default)"
            raise DataError(
                f"{self.where}: backend: LEVELDB{default} is not supported, and '{path}' is no LMDB; convert it to "
                "LMDB (convert_imageset --backend=lmdb) and set data_param { backend: LMDB }"
            )
        return path

    def image_loader(self, seed: int, stream: int) -> ImageLoader:
        param = self.param.data_param
        skip = random.skip(seed, stream, param.rand_skip) if param.rand_skip else 0
        shuffle = param.shuffle and self.context.phase == caffe_pb2.TRAIN
        order = RecordOrder(len(self._records), skip, shuffle, seed, stream)
        threads = self.threads(param.threads)
        return DatumLoader(self._records, order, self._transformer, seed, stream, self.where, threads)
