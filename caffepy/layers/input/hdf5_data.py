"""HDF5Data: rows of datasets."""

from __future__ import annotations

from caffepy.data.sources.hdf5 import Hdf5Loader, Hdf5Source
from caffepy.layers.core.base import register_layer
from caffepy.layers.input.prefetching import DescribingLoader, PrefetchingLayer, Source


@register_layer("HDF5Data")
class HDF5DataLayer(PrefetchingLayer):
    """Rows of the datasets that have the tops' names (Caffe's `hdf5_data_layer.cpp`). Tops: (N, …) each."""

    tops = (1, None)
    supports_half = False

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
