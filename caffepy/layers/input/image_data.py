"""ImageData: images from a list of files."""

from __future__ import annotations

from caffepy.data import random
from caffepy.data.loader import ImageFileLoader, ImageLoader
from caffepy.data.order import RecordOrder
from caffepy.data.sources.image_list import ImageListSource
from caffepy.layers.core.base import register_layer
from caffepy.layers.input.images import ImagesLayer
from caffepy.layers.input.prefetching import Source


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
        self._transformer = self.make_transformer()
        self._list = ImageListSource(self.context.resolve(param.source), param.root_folder)
        if param.rand_skip > len(self._list):
            raise self.error(
                f"rand_skip {param.rand_skip} is more than the {len(self._list)} images of '{param.source}'"
            )
        return self._list, [self.image_loader(0, 0).sample_shape(), ()]

    def image_loader(self, seed: int, stream: int) -> ImageLoader:
        param = self.param.image_data_param
        skip = random.skip(seed, stream, param.rand_skip) if param.rand_skip else 0
        order = RecordOrder(len(self._list), skip, param.shuffle, seed, stream)
        size = (param.new_height, param.new_width) if param.new_height else None
        threads = self.threads(param.threads if param.HasField("threads") else 0)
        return ImageFileLoader(
            self._list, order, self._transformer, seed, stream, self.where, threads, color=param.is_color, size=size
        )
