"""The base class of data layers that read images."""

from __future__ import annotations

from abc import abstractmethod

from caffepy.backend.input_ring import ByteImages
from caffepy.data.loader import ImageLoader
from caffepy.data.transform import Transformer
from caffepy.layers.input.prefetching import DescribingLoader, PrefetchingLayer


class ImagesLayer(PrefetchingLayer):
    """A data layer whose records are images."""

    _transformer: Transformer

    @abstractmethod
    def image_loader(self, seed: int, stream: int) -> ImageLoader:
        """Return a loader. Crops, mirroring and order follow from `seed` and `stream`."""

    def make_transformer(self) -> Transformer:
        """Return the transformation of `transform_param`."""
        param, context = self.param.transform_param, self.context
        return Transformer(param, context.phase, context.resolve, self.where, context.nvidia)

    def make_loader(self) -> DescribingLoader:
        stream = self.random_stream()
        return self.image_loader(stream.seed, stream.stream)

    def stage_totals(self) -> dict[str, float]:
        return self._loader.stages.totals() if isinstance(self._loader, ImageLoader) else {}

    def byte_images(self, count: int) -> ByteImages | None:
        return self.image_loader(0, 0).byte_images(count)

    def fingerprint(self) -> dict[str, str]:
        return {**super().fingerprint(), **self._transformer.fingerprint()}
