"""ImageData: images from a list of files."""

from __future__ import annotations

import math

from caffepy.data import random
from caffepy.data.images.cache import ImageCache, shared_cache
from caffepy.data.loader import ImageFileLoader
from caffepy.data.order import RecordOrder
from caffepy.data.sources.image_list import ImageListSource
from caffepy.layers.core.base import register_layer
from caffepy.layers.input.images import ImagesLayer
from caffepy.layers.input.prefetching import Source
from caffepy.proto import caffe_pb2


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
        if bool(param.new_height) != bool(param.new_width):
            raise self.error("new_height and new_width must be set together")
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
        skip = random.rand_skip_count(seed, stream, param.rand_skip) if param.rand_skip else 0
        total = len(self._list)
        order = RecordOrder(self._epoch_images(total), skip, param.shuffle, seed, stream, total)
        size = (param.new_height, param.new_width) if param.new_height else None
        threads = self.threads(param.threads if param.HasField("threads") else 0)
        return ImageFileLoader(
            self._list, order, self._transformer, seed, stream, self.where, threads,
            color=param.is_color, size=size, short_side=param.short_side, cache=self._cache,
            new_dim=param.new_dim, bicubic=param.bicubic,
        )  # fmt: skip

    def _epoch_images(self, total: int) -> int:
        """Return the number of images in an epoch: in TRAIN total / dataset_share_per_node if that is above 1."""
        share = self.param.image_data_param.dataset_share_per_node
        if not share > 1 or self.context.phase != caffe_pb2.TRAIN:
            return total
        return max(math.floor(total / share + 0.5), 1)
