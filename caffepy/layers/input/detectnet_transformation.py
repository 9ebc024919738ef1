"""DetectNetTransformation: random changes of images, and coverage maps of the boxes in them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from caffepy.data.images.mean import read_mean
from caffepy.data.transforms.coverage import CoverageMap
from caffepy.data.transforms.detectnet import Augmentation, augment_boxes, augment_image, choose
from caffepy.data.transforms.draws import Draws
from caffepy.data.transforms.pixels import call, to_pixels
from caffepy.errors import DataError
from caffepy.layers.core.base import Blobs, Layer, register_layer
from caffepy.proto import caffe_pb2

_COLUMNS = 16
"""Of a label: left, top, width, height, alpha, class, and ten that are not read."""
_CLASS = 5


@register_layer("DetectNetTransformation")
class DetectNetTransformationLayer(Layer):
    """Augmented images and their ground truth for DetectNet (NVIDIA Caffe's `detectnet_transform_layer.cpp`).

    Bottoms: images (N, 3, H, W); labels (N, 1, rows, 16), whose first row holds the number of boxes and 16. Tops:
    (N, 3, image_size_y, image_size_x); (N, 8 + classes, rows, columns of the grid), see `CoverageMap`. Images change at
    random in training and are resized in testing. Computed on the host.
    """

    bottoms = (2, 2)
    tops = (2, 2)
    has_backward = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.detectnet_groundtruth_param
        if min(param.stride, param.image_size_x, param.image_size_y) < 1:
            raise self.error("detectnet_groundtruth_param needs stride, image_size_x and image_size_y of at least 1")
        transform = self.param.transform_param
        if len(transform.mean_value) not in (0, 1, 3):
            raise self.error(f"transform_param has {len(transform.mean_value)} mean_value; give 1 or 3")
        self._mean_file = None
        if transform.HasField("mean_file"):
            self._mean_file = read_mean(self.context.resolve(transform.mean_file))
            if self._mean_file.shape[0] != 3:
                raise self.error(f"the mean in mean_file has {self._mean_file.shape[0]} channels, but images have 3")
        self._output = (param.image_size_y, param.image_size_x)
        self._coverage = CoverageMap(param)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        images, labels = bottom[0].shape, bottom[1].shape
        if len(images) != 4 or images[1] != 3:
            raise self.shape_error("needs images of 3 channels", bottom[0])
        if len(labels) != 4 or labels[0] != images[0] or labels[1] != 1 or labels[3] != _COLUMNS:
            raise self.shape_error(f"needs labels of shape N 1 rows {_COLUMNS}", bottom[0], bottom[1])
        top[0].reshape((images[0], 3, *self._output))
        top[1].reshape((images[0], *self._coverage.shape))

    def capture_blocker(self) -> str | None:
        return "it transforms images on the host"

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if not self.backend.holds_values:
            return
        images, labels = (self.backend.to_host(blob.data) for blob in bottom)
        size = (images.shape[2], images.shape[3])
        mean, first = self._mean(size), self._first_sample(len(images))
        data = np.empty(top[0].shape, np.float32)
        maps = np.empty(top[1].shape, np.float32)
        for index, (image, rows) in enumerate(zip(images, labels, strict=True)):
            boxes = self._boxes(rows[0], index)
            chosen = self._choose(size, first + index)
            pixels = augment_image(to_pixels(image), chosen, mean, self._output)
            data[index] = pixels.transpose(2, 0, 1)
            maps[index] = self._coverage.generate(augment_boxes(boxes[:, :4], chosen, size), self._classes(boxes))
        self.backend.from_host(data, top[0].data)
        self.backend.from_host(maps, top[1].data)

    def _first_sample(self, count: int) -> int:
        """Of this pass; without a data layer that numbers them, as if each pass brought new ones."""
        if self.context.first_sample is not None:
            return self.first_sample()
        shard = self.context.shard
        return (self.context.passes.number * shard.world_size + shard.rank) * count

    def _choose(self, size: tuple[int, int], sample: int) -> Augmentation:
        if self.context.phase != caffe_pb2.TRAIN:
            return Augmentation(self._output)
        stream = self.random_stream()
        return choose(
            self.param.detectnet_augmentation_param, size, self._output, Draws(stream.seed, stream.stream, sample)
        )

    def _mean(self, size: tuple[int, int]) -> NDArray[np.float32]:
        if self._mean_file is None:
            return np.array(list(self.param.transform_param.mean_value) or [0], np.float32)
        from caffepy.data.images.datum import opencv

        return call("resize", to_pixels(self._mean_file), size[::-1], interpolation=opencv().INTER_CUBIC)

    def _boxes(self, rows: NDArray[np.float32], index: int) -> NDArray[np.float32]:
        """The labels of one image.

        Raises:
            DataError: their number or length is wrong, or one is no number.
        """
        count, length = rows[0, :2].tolist()
        name = f"layer '{self.name}' ({self.type}): '{self.param.bottom[1]}' of image {index} of the batch"
        if not (0 <= count <= len(rows) - 1) or int(length) != _COLUMNS:
            raise DataError(
                f"{name} begins with {count:g} and {length:g}; it must be the number of boxes, at most "
                f"{len(rows) - 1}, and {_COLUMNS}"
            )
        boxes = rows[1 : 1 + int(count)]
        if not np.isfinite(boxes[:, : _CLASS + 1]).all():
            raise DataError(f"{name} has a box or class that is no finite number")
        return boxes

    def _classes(self, boxes: NDArray[np.float32]) -> NDArray[np.int64]:
        return boxes[:, _CLASS].astype(np.int64)
