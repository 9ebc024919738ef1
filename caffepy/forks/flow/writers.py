"""FLOWriter and ImgWriter: files of flows and images, of FlowNet 2."""

from __future__ import annotations

import logging
import struct
from pathlib import Path
from typing import Any

import numpy as np

from caffepy.errors import RunError
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.layer import Blobs, Layer, LayerContext, register_layer
from caffepy.utils.files import atomic_write

logger = logging.getLogger(__name__)

FLO_MAGIC = b"PIEH"
"""The first bytes of a .flo file."""


class WriterLayer(Layer):
    """Writes each sample of its bottom (N, C, H, W) to a file.

    The file is `file`, or `folder`/`prefix`ITERATION`suffix`.EXTENSION, with the iteration in seven digits, and for N >
    1 with the sample's number, (000), behind it. The folder is made. In training rank 0 writes, in a test each rank its
    own batches.

    Raises:
        ShapeError: the bottom has another number of channels.
        RunError: a file cannot be written.
    """

    tops = (0, 0)
    channels: tuple[int, ...] = ()
    """The numbers of channels that the layer accepts."""

    def extension(self, channels: int) -> str:
        """Return the files' extension."""
        raise NotImplementedError

    def content(self, sample: Any) -> bytes:
        """Return the file of a sample (C, H, W)."""
        raise NotImplementedError

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        if len(bottom[0].shape) != 4 or bottom[0].shape[1] not in self.channels:
            wanted = " or ".join(map(str, self.channels))
            raise self.shape_error(f"the bottom must have four axes, (N, C, H, W), and {wanted} channels", bottom[0])

    def _iteration(self, samples: int) -> int:
        if self.context.phase == caffe_pb2.TEST and self.context.first_sample is not None:
            return self.first_sample() // max(samples, 1)
        return self.context.passes.number // max(self.context.iter_size, 1)

    def _path(self, number: int, bottom: Blobs) -> Path:
        param, samples = self.param.writer_param, bottom[0].shape[0]
        if param.file:
            return Path(param.file)
        index = f"({number:03d})" if samples > 1 else ""
        name = f"{param.prefix}{self._iteration(samples):07d}{index}{param.suffix}"
        return Path(param.folder or ".") / f"{name}.{self.extension(bottom[0].shape[1])}"

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        training = self.context.phase == caffe_pb2.TRAIN
        if not self.backend.holds_values or (training and self.context.shard.rank != 0):
            return
        for number, sample in enumerate(bottom[0].host_data()):
            path = self._path(number, bottom)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with atomic_write(path, durable=False) as file:
                    file.write(self.content(sample))
            except OSError as error:
                raise RunError(f"{self.where}: '{path}' cannot be written: {error}") from error
            logger.info("%s: saved %s", self.where, path)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if propagate_down[0]:
            self.backend.fill(bottom[0].diff, 0)

    @classmethod
    def depends_on_earlier_passes(cls, param: caffe_pb2.LayerParameter, context: LayerContext) -> bool:
        """In TEST with a single file, which each pass replaces."""
        return context.phase == caffe_pb2.TEST and bool(param.writer_param.file)

    def has_side_effects(self) -> bool:
        return True

    def capture_blocker(self) -> str | None:
        return "it writes a file"


@register_layer("FLOWriter")
class FLOWriterLayer(WriterLayer):
    """Writes each flow (N, 2, H, W) as a .flo file of the Middlebury benchmark (FlowNet 2's `flowriter_layer.cpp`).

    The file is `file`, or `folder`/`prefix`ITERATION`suffix`.flo, with the iteration in seven digits, and for N > 1
    with the sample's number, (000), behind it. The folder is made. In training rank 0 writes, in a test each rank its
    own batches.

    Raises:
        ShapeError: the bottom does not have two channels.
        RunError: a file cannot be written.
    """

    channels = (2,)

    def extension(self, channels: int) -> str:
        return "flo"

    def content(self, sample: Any) -> bytes:
        _, height, width = sample.shape
        values: bytes = sample.transpose(1, 2, 0).astype("<f4").tobytes()
        return FLO_MAGIC + struct.pack("<ii", width, height) + values


@register_layer("ImgWriter")
class ImgWriterLayer(WriterLayer):
    """Writes each image (N, 1, H, W) as .pgm or (N, 3, H, W), blue first, as .ppm.

    Source: FlowNet 2's `imgwriter_layer.cpp`. Values are multiplied by `scale`, or with `normalize` mapped such that
    the image's least value is 0 and its largest is 255, limited to [0, 255] and rounded down. Names as FLOWriter's.

    Raises:
        ShapeError: the bottom does not have one or three channels.
        RunError: a file cannot be written.
    """

    channels = (1, 3)

    def extension(self, channels: int) -> str:
        return "pgm" if channels == 1 else "ppm"

    def content(self, sample: Any) -> bytes:
        channels, height, width = sample.shape
        param = self.param.writer_param
        values = sample.astype(np.float64) * param.scale
        if param.normalize:
            low, high = float(sample.min()), float(sample.max())
            values = 255 * (sample.astype(np.float64) - low) / ((high - low) or 1)
        pixels = np.nan_to_num(np.clip(values, 0, 255)).astype(np.uint8)[::-1].transpose(1, 2, 0)
        kind = "P5" if channels == 1 else "P6"
        return f"{kind}\n{width} {height}\n255\n".encode() + np.ascontiguousarray(pixels).tobytes()
