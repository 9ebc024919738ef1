"""Layers that have no bottoms: where a net's data come from."""

from __future__ import annotations

import zlib
from abc import abstractmethod
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from caffepy.backend.input_ring import ByteImages
from caffepy.backend.types import RandomStream
from caffepy.blob import check_shape
from caffepy.data import random
from caffepy.data.loader import DatumLoader, ImageFileLoader, ImageLoader
from caffepy.data.order import RecordOrder
from caffepy.data.sources.hdf5 import Hdf5Loader, Hdf5Source
from caffepy.data.sources.image_list import ImageListSource
from caffepy.data.sources.lmdb import LmdbSource
from caffepy.data.sources.source import RecordSource
from caffepy.data.transform import Transformer
from caffepy.errors import DataError
from caffepy.layers.core.base import Blobs, Layer, register_layer
from caffepy.layers.input.prefetching import DescribingLoader, PrefetchingLayer, Source
from caffepy.proto import caffe_pb2

T = TypeVar("T")


@register_layer("Input")
class InputLayer(Layer):
    """Tops that somebody else fills (Caffe's `input_layer.cpp`): one shape for each of them, or one for all."""

    half = True
    exact_tops = 1
    bottoms = (0, 0)
    tops = (1, None)
    has_backward = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        shapes = self.param.input_param.shape
        if len(shapes) not in (0, 1, len(top)):
            raise self.error(
                f"input_param.shape must be given once, once for each of the {len(top)} tops, or not at all; "
                f"it is given {len(shapes)} times"
            )
        for i, blob in enumerate(top):
            if shapes:
                blob.reshape(tuple(shapes[i if len(shapes) > 1 else 0].dim))

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        """The tops keep the shapes that they were given."""

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        """There is nothing to compute."""


@register_layer("DummyData")
class DummyDataLayer(Layer):
    """Tops made by fillers (Caffe's `dummy_data_layer.cpp`).

    Constant tops are filled once, random ones in every pass; their numbers depend on the global number of each sample.
    Shapes are those of one device, as in both Caffes: they are never divided.
    """

    half = True
    exact_tops = 1
    bottoms = (0, 0)
    tops = (1, None)
    has_backward = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.dummy_data_param
        fillers = list(param.data_filler) or [caffe_pb2.FillerParameter(type="constant")]
        if len(fillers) not in (1, len(top)):
            raise self.error(
                f"data_filler must be given once or once for each of the {len(top)} tops; "
                f"it is given {len(fillers)} times"
            )
        self._fillers = fillers * len(top) if len(fillers) == 1 else fillers
        self._filled: list[tuple[int, ...] | None] = [None] * len(top)
        for blob, shape in zip(top, self._shapes(len(top)), strict=True):
            check_shape(shape, f"layer '{self.name}' ({self.type})")
            blob.reshape(shape)
        batch = top[0].shape[0] if top[0].shape else 1
        if self.context.first_sample is None:
            shard = self.context.shard
            self.context.first_sample = lambda number: (number * shard.world_size + shard.rank) * batch

    def _shapes(self, tops: int) -> list[tuple[int, ...]]:
        param = self.param.dummy_data_param
        legacy = {name: list(getattr(param, name)) for name in ("num", "channels", "height", "width")}
        if not any(legacy.values()):
            shapes = [tuple(shape.dim) for shape in param.shape]
            return self._one_each("shape", shapes, tops)
        if param.shape:
            raise self.error("dummy_data_param has both shape and num, channels, height, width; keep shape")
        return list(zip(*(self._one_each(name, sizes, tops) for name, sizes in legacy.items()), strict=True))

    def _one_each(self, field: str, values: list[T], tops: int) -> list[T]:
        if len(values) not in (1, tops):
            raise self.error(
                f"dummy_data_param.{field} must be given once or once for each of the {tops} tops; "
                f"it is given {len(values)} times"
            )
        return values if len(values) == tops else values * tops

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        """The tops keep the shapes that they were given."""

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        for i, (filler, blob) in enumerate(zip(self._fillers, top, strict=True)):
            if filler.type == "constant":
                if self._filled[i] != blob.shape:
                    self.backend.fill(blob.data, filler.value)
                    self._filled[i] = blob.shape
            else:
                self.backend.from_host(self._random(i, filler, blob.shape), blob.data)

    def capture_blocker(self) -> str | None:
        drawn = any(filler.type != "constant" for filler in self._fillers)
        return "it fills its tops with random numbers on the host in every pass" if drawn else None

    def _random(self, index: int, filler: caffe_pb2.FillerParameter, shape: tuple[int, ...]) -> NDArray[np.float32]:
        from caffepy.fillers import fill

        where = f"layer '{self.name}' ({self.type})"
        values = np.empty(shape, np.float32)
        samples = values.reshape(shape[0] if shape else 1, *shape[1:])
        first = self.first_sample()
        for i in range(len(samples)):
            key = zlib.crc32(f"{self.name}/{index}/{first + i}".encode())
            samples[i] = fill(filler, (1, *shape[1:]), RandomStream(self.context.seed, key), where)[0]
        return values


class ImagesLayer(PrefetchingLayer):
    """A layer whose records are images."""

    _transformer: Transformer

    @abstractmethod
    def _loader_of(self, seed: int, stream: int) -> ImageLoader:
        """What fills batches with these random choices."""

    def make_loader(self) -> DescribingLoader:
        stream = self.random_stream()
        return self._loader_of(stream.seed, stream.stream)

    def byte_images(self, count: int) -> ByteImages | None:
        return self._loader_of(0, 0).byte_images(count)

    def fingerprint(self) -> dict[str, str]:
        return {**super().fingerprint(), **self._transformer.fingerprint()}


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
        self._transformer = _transformer(self)
        self._records: RecordSource = LmdbSource(self._check_backend(self.context.resolve(param.source)))
        try:
            shape = self._loader_of(0, 0).sample_shape()
        except BaseException:
            self._records.close()
            raise
        return self._records, [shape, ()][: len(self.param.top)]

    def _check_backend(self, path: Path) -> Path:
        """The default of `backend` is LevelDB, so an LMDB is taken as one whatever the prototxt says."""
        param = self.param.data_param
        if param.backend != caffe_pb2.DataParameter.LMDB and not (path / "data.mdb").exists():
            default = "" if param.HasField("backend") else " (the default)"
            raise DataError(
                f"{_where(self)}: backend: LEVELDB{default} is not supported, and '{path}' is no LMDB; convert it to "
                "LMDB (convert_imageset --backend=lmdb) and set data_param { backend: LMDB }"
            )
        return path

    def _loader_of(self, seed: int, stream: int) -> ImageLoader:
        param = self.param.data_param
        skip = random.skip(seed, stream, param.rand_skip) if param.rand_skip else 0
        shuffle = param.shuffle and self.context.phase == caffe_pb2.TRAIN
        order = RecordOrder(len(self._records), skip, shuffle, seed, stream)
        threads = self.threads(param.threads)
        return DatumLoader(self._records, order, self._transformer, seed, stream, _where(self), threads)


@register_layer("ImageData")
class ImageDataLayer(ImagesLayer):
    """Images and labels from a list of files (Caffe's `image_data_layer.cpp`). Tops: (N, C, H, W), (N,)."""

    tops = (2, 2)

    def batch_size(self) -> int:
        return self.param.image_data_param.batch_size

    def open(self) -> tuple[Source, list[tuple[int, ...]]]:
        param = self.param.image_data_param
        if bool(param.new_height) != bool(param.new_width):
            raise self.error("new_height and new_width must be set together")
        if param.short_side:
            raise self.error("image_data_param.short_side is not supported yet; set new_height and new_width")
        self._transformer = _transformer(self)
        self._list = ImageListSource(self.context.resolve(param.source), param.root_folder)
        if param.rand_skip > len(self._list):
            raise self.error(
                f"rand_skip {param.rand_skip} is more than the {len(self._list)} images of '{param.source}'"
            )
        return self._list, [self._loader_of(0, 0).sample_shape(), ()]

    def _loader_of(self, seed: int, stream: int) -> ImageLoader:
        param = self.param.image_data_param
        skip = random.skip(seed, stream, param.rand_skip) if param.rand_skip else 0
        order = RecordOrder(len(self._list), skip, param.shuffle, seed, stream)
        size = (param.new_height, param.new_width) if param.new_height else None
        threads = self.threads(param.threads if param.HasField("threads") else 0)
        return ImageFileLoader(
            self._list, order, self._transformer, seed, stream, _where(self), threads, color=param.is_color, size=size
        )


@register_layer("HDF5Data")
class HDF5DataLayer(PrefetchingLayer):
    """Rows of the datasets that have the tops' names (Caffe's `hdf5_data_layer.cpp`). Tops: (N, …) each."""

    tops = (1, None)
    half = False

    def batch_size(self) -> int:
        return self.param.hdf5_data_param.batch_size

    def open(self) -> tuple[Source, list[tuple[int, ...]]]:
        param = self.param.hdf5_data_param
        if self.param.HasField("transform_param"):
            raise self.error("HDF5 data are not transformed; remove transform_param")
        if not param.source:
            raise self.error("hdf5_data_param.source must name a list of HDF5 files")
        self._rows = Hdf5Source(self.context.resolve(param.source), self.param.top, self.context.resolve)
        return self._rows, self._rows.row_shapes

    def make_loader(self) -> DescribingLoader:
        stream = self.random_stream()
        return Hdf5Loader(self._rows, self.param.hdf5_data_param.shuffle, stream.seed, stream.stream)


def _where(layer: Layer) -> str:
    return f"layer '{layer.name}' ({layer.type})"


def _transformer(layer: Layer) -> Transformer:
    return Transformer(layer.param.transform_param, layer.context.phase, layer.context.resolve, _where(layer))
