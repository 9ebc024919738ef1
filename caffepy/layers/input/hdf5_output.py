"""HDF5Output."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from caffepy.errors import RunError
from caffepy.layers.core.base import Blobs, Layer, LayerContext, register_layer
from caffepy.proto import caffe_pb2

log = logging.getLogger(__name__)


@register_layer("HDF5Output")
class HDF5OutputLayer(Layer):
    """Writes its bottoms to `file_name` as the datasets "data" and "label" (Caffe's `hdf5_output_layer.cpp`).

    Rank 0 writes the file in every pass and replaces the last one (Caffe fails at the second pass). The file is
    complete when the pass returns. As in Caffe, datasets have the bottoms' shapes with at least four axes.

    Raises:
        ConfigError: `file_name` is missing.
        ShapeError: the bottoms differ in N.
        RunError: the file cannot be written.
    """

    bottoms = (2, 2)
    tops = (0, 0)

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        if not self.param.hdf5_output_param.file_name:
            raise self.error("hdf5_output_param.file_name must name the file to write")
        self._path = Path(self.param.hdf5_output_param.file_name)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        if not bottom[0].shape or not bottom[1].shape or bottom[0].shape[0] != bottom[1].shape[0]:
            raise self.shape_error("both bottoms must have the same first axis, N", *bottom)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if self.context.shard.rank != 0 or not self.backend.holds_values:
            return
        self._write({name: blob.host_data() for name, blob in zip(("data", "label"), bottom, strict=True)})

    def _write(self, arrays: dict[str, Any]) -> None:
        import h5py

        from caffepy.files import atomic_write

        try:
            with atomic_write(self._path) as path, h5py.File(path, "w") as file:
                for name, values in arrays.items():
                    file[name] = values.reshape(values.shape + (1,) * (4 - values.ndim))
        except OSError as error:
            raise RunError(f"{self.where}: '{self._path}' cannot be written: {error}") from error
        log.debug("layer '%s' wrote %d rows to %s", self.name, len(arrays["data"]), self._path)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        for blob, needs_gradient in zip(bottom, propagate_down, strict=True):
            if needs_gradient:
                self.backend.fill(blob.diff, 0)

    @classmethod
    def depends_on_earlier_passes(cls, param: caffe_pb2.LayerParameter, context: LayerContext) -> bool:
        """In TEST: each pass replaces the file of the last one."""
        return context.phase == caffe_pb2.TEST

    def has_side_effects(self) -> bool:
        return True

    def capture_blocker(self) -> str | None:
        return "it writes a file"
