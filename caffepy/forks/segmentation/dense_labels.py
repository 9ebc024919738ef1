"""DenseImageData, ImageSegData, ImageLabelmapData, SegData: images with a label for each pixel, from lists of files."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from caffepy.data import random
from caffepy.data.images import NEAREST, read_image, resize, sides, to_pixels
from caffepy.data.random import SampleRng
from caffepy.data.sampler import SampleLoader, Sampler
from caffepy.data.sources.databases import hash_of
from caffepy.data.sources.image_list import list_lines
from caffepy.data.transform import DataTransformer, both_sides
from caffepy.errors import DataError
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.input.prefetching import DescribingLoader, PrefetchingLayer, Source
from caffepy.layers.layer import register_layer
from caffepy.utils.options import whole

Size = tuple[int, int]
LabelType = caffe_pb2.ImageDataParameter
EDGE = 0.5
"""Labels above it are edges in ImageLabelmapData."""
BALANCE_DRAWS = 10
LARGEST_PART = 0.8
"""SegData draws another crop while one label fills more than this part of it."""


@dataclass(frozen=True)
class Pair:
    """An image with its labels.

    Args:
        pixels: (H, W, C), uint8 or float32.
        labels: (H, W), or smaller by a factor.
    """

    pixels: NDArray[np.generic]
    labels: NDArray[np.generic]

    @property
    def size(self) -> Size:
        """Height and width of the image."""
        return self.pixels.shape[0], self.pixels.shape[1]

    def mirrored(self) -> Pair:
        """Return both flipped left to right."""
        return Pair(self.pixels[:, ::-1], self.labels[:, ::-1])

    def cropped(self, size: Size, top: int, left: int) -> Pair:
        """Return the part of this size at an offset."""
        part = (slice(top, top + size[0]), slice(left, left + size[1]))
        return Pair(self.pixels[part], self.labels[part])

    def resized(self, size: Size) -> Pair:
        """Return the image resized bilinearly and the labels by nearest neighbour."""
        if size == self.size:
            return self
        labels = resize(np.ascontiguousarray(self.labels), *size, NEAREST)[:, :, 0]
        return Pair(resize(np.ascontiguousarray(self.pixels), *size), labels)


class LabelMapLayer(PrefetchingLayer):
    """A data layer whose lines name an image, and mostly an image of its labels.

    Crops and mirroring are drawn for each sample, the same for the image and its labels. The image is then
    (pixel - mean) * scale. Tops: (N, C, H, W), (N, 1, H, W). Without a crop or a new size, images may differ in size
    if batch_size is 1.
    """

    tops = (2, 2)

    parameter: ClassVar[str] = "image_data_param"
    """The layer's message in the prototxt."""

    @property
    def settings(self) -> Any:
        """The layer's message in the prototxt."""
        return getattr(self.param, self.parameter)

    def batch_size(self) -> int:
        return int(self.settings.batch_size)

    @abstractmethod
    def read(self, number: int) -> Pair:
        """Return line `number`'s image and labels, resized."""

    @abstractmethod
    def augment(self, pair: Pair, rng: SampleRng) -> Pair:
        """Return a crop, mirrored or not."""

    def check(self) -> None:
        """Check the settings.

        Raises:
            ConfigError: they contradict each other.
        """
        self._size = both_sides(self.settings.new_height, self.settings.new_width, self.where)

    needs_labels = True
    """Whether each line has a second word."""

    def open(self) -> tuple[Source, list[tuple[int, ...]]]:
        self.check()
        context, param = self.context, self.settings
        self._transformer = DataTransformer(
            self.param.transform_param, context.phase, context.resolve, self.where, context.nvidia
        )
        self.files = PairList(context.resolve(param.source), self.root_folder(), self.needs_labels)
        if self._rand_skip > len(self.files):
            raise self.error(
                f"rand_skip {self._rand_skip} is more than the {len(self.files)} images of '{param.source}'"
            )
        first = self._loader_of(0, 0).sample(0, 0)
        return self.files, [part.shape for part in first[: len(self.param.top)]]

    def root_folder(self) -> str:
        """Return what is put in front of the files' names."""
        return str(self.settings.root_folder)

    @property
    def _rand_skip(self) -> int:
        return getattr(self.settings, "rand_skip", 0)

    def make_loader(self) -> DescribingLoader:
        stream = self.random_stream()
        return self._loader_of(stream.seed, stream.stream)

    def _loader_of(self, seed: int, stream: int) -> SampleLoader:
        skip = random.rand_skip_count(seed, stream, self._rand_skip)
        order = Sampler(len(self.files), skip, self.settings.shuffle, seed, stream)
        key = (self._transformer.seed(seed), stream)
        return SampleLoader(
            self.where,
            lambda record, sample: self._make_sample(record, SampleRng(*key, sample)),
            self.files.name,
            order,
            self.threads(0),
        )

    def _make_sample(self, number: int, rng: SampleRng) -> list[NDArray[np.float32]]:
        """Return image and labels, and the image's height and width before the augmentation, at most the image's."""
        whole = self.read(number)
        transformer = self._transformer
        pair = whole
        if transformer.mean_size != (0, 0):  # the mean belongs to the whole image
            mean = transformer.mean((pair.pixels.shape[2], *pair.size))
            pair = replace(pair, pixels=pair.pixels.astype(np.float32) - mean.transpose(1, 2, 0))
        pair = self.augment(pair, rng)
        image = pair.pixels.transpose(2, 0, 1).astype(np.float32)
        if transformer.mean_size == (0, 0):
            image -= transformer.mean((image.shape[0], *pair.size))
        if transformer.scale != 1:
            image *= transformer.scale
        size = np.minimum(whole.size, image.shape[1:]).astype(np.float32).reshape(1, 1, 2)
        return [image, pair.labels[None].astype(np.float32), size]

    # -- for subclasses --------------------------------------------------------------------------------

    def decoded(self, number: int, color: bool, size: Size | None, factor: int = 1) -> Pair:
        """Return a line's image and labels, resized to `size`, the labels to size / factor."""
        pixels = self.decoded_image(number, color, size)
        labels = self.files.image(number, 1, False)
        if size is not None:
            small = (size[0] // factor, size[1] // factor)
            labels = resize(labels, *small, NEAREST)
        wanted = (pixels.shape[0] // factor, pixels.shape[1] // factor)
        if labels.shape[:2] != wanted:
            raise DataError(
                f"has {sides(labels.shape[:2])} labels for {sides(wanted)} pixels; both images must have one size"
            )
        return Pair(pixels, labels[:, :, 0])

    def decoded_image(self, number: int, color: bool, size: Size | None) -> NDArray[np.generic]:
        """Return a line's image (H, W, C), resized."""
        pixels = self.files.image(number, 0, color)
        return pixels if size is None else resize(pixels, *size)

    def crop_and_mirror(
        self, pair: Pair, rng: SampleRng, size: Size | None, mirror: bool, at_random: bool = True
    ) -> Pair:
        """Return the pair mirrored at random, then cropped at random or at the center.

        Raises:
            DataError: the image is smaller than the crop.
        """
        if mirror and rng.below(2):
            pair = pair.mirrored()
        if size is None:
            return pair
        free = tuple(have - want for have, want in zip(pair.size, size, strict=True))
        if min(free) < 0:
            raise DataError(f"is {sides(pair.size)}, smaller than the crop, {sides(size)}")
        top, left = (rng.below(f + 1) for f in free) if at_random else (f // 2 for f in free)
        return pair.cropped(size, top, left)


@register_layer("DenseImageData")
class DenseImageDataLayer(LabelMapLayer):
    """Images and images of labels (`dense_image_data_layer.cpp` of SegNet and ENet).

    Each line of `source` has the names of an image and of a gray image of its labels. `new_height` and `new_width`
    resize the image bilinearly and the labels by nearest neighbour. `crop_height` and `crop_width` crop at random and
    `mirror` flips, in both phases. `transform_param` has the mean and scale. ENet's `label_divide_factor` f makes the
    second top (N, 1, H / f, W / f).

    Raises:
        ConfigError: sizes are not set together, transform_param crops or mirrors, or label_divide_factor is combined
            with a crop.
        DataError: the list or an image cannot be read, or an image and its labels differ in size.
    """

    parameter = "dense_image_data_param"

    def check(self) -> None:
        super().check()
        param, transform = self.param.dense_image_data_param, self.param.transform_param
        self._crop = both_sides(param.crop_height, param.crop_width, self.where, "crop_height and crop_width")
        if transform.mirror or transform.crop_size:
            raise self.error("give mirror and the crop in dense_image_data_param, which moves the labels as well")
        if param.label_divide_factor < 1 or (param.label_divide_factor > 1 and self._crop):
            raise self.error("label_divide_factor must be at least 1, and 1 with a crop")

    def read(self, number: int) -> Pair:
        param = self.param.dense_image_data_param
        return self.decoded(number, param.is_color, self._size, param.label_divide_factor)

    def augment(self, pair: Pair, rng: SampleRng) -> Pair:
        return self.crop_and_mirror(pair, rng, self._crop, self.param.dense_image_data_param.mirror)


@register_layer("ImageSegData")
class ImageSegDataLayer(LabelMapLayer):
    """Images and labels of their pixels (`image_seg_data_layer.cpp` of DeepLab and PSPNet).

    `label_type` says what a line of `source` has behind the image's name: PIXEL the name of a gray image of labels,
    IMAGE one label for all pixels, NONE nothing, which makes all labels `ignore_label`. `has_label: false` is the
    old form of NONE. One of `scale_factors` is drawn; the image is resized by it bilinearly, the labels by nearest
    neighbour. Where the crop is larger, mean pixels and `ignore_label` fill the right and bottom. The crop
    (`crop_size`, or `crop_height` and `crop_width`) is random in TRAIN and at the center in TEST. `new_height` and
    `new_width` resize labels by nearest neighbour; DeepLab interpolates between their numbers. An optional third
    top (N, 1, 1, 2) has each image's height and width, at most the first top's.

    Raises:
        ConfigError: sizes are not set together, or there is a mean_file.
        DataError: the list or an image cannot be read, or an image and its labels differ in size.
    """

    tops = (2, 3)
    float32_tops_from = 1

    @property
    def _label_type(self) -> int:
        param = self.param.image_data_param
        if not param.has_label and not param.HasField("label_type"):
            return LabelType.NONE
        return int(param.label_type)

    @property
    def needs_labels(self) -> bool:  # type: ignore[override]
        return self._label_type != LabelType.NONE

    def check(self) -> None:
        super().check()
        param = self.param.transform_param
        if param.HasField("mean_file"):
            raise self.error("has no mean_file, because images differ in size; give mean_value")
        if param.crop_size and (param.crop_height or param.crop_width):
            raise self.error("transform_param has both crop_size and crop_height or crop_width; keep one kind")
        self._crop = both_sides(param.crop_height, param.crop_width, self.where, "crop_height and crop_width")
        if param.crop_size:
            self._crop = (param.crop_size, param.crop_size)
        if any(not factor > 0 for factor in param.scale_factors):
            raise self.error("scale_factors must be above 0")

    def read(self, number: int) -> Pair:
        param = self.param.image_data_param
        if self._label_type == LabelType.PIXEL:
            return self.decoded(number, param.is_color, self._size)
        pixels = self.decoded_image(number, param.is_color, self._size)
        label = param.ignore_label
        if self._label_type == LabelType.IMAGE:
            word = self.files.names[number][1]
            number_of_class = whole(word)
            if number_of_class is None:
                raise DataError(f"has '{word[:40]}' in place of a label; label_type: PIXEL reads an image of labels")
            label = number_of_class
        return Pair(pixels, np.full(pixels.shape[:2], label, np.uint8 if 0 <= label < 256 else np.float32))

    def augment(self, pair: Pair, rng: SampleRng) -> Pair:
        param = self.param.transform_param
        if param.scale_factors:
            factor = np.float32(param.scale_factors[rng.below(len(param.scale_factors))])
            pair = pair.resized((int(pair.size[0] * factor), int(pair.size[1] * factor)))
        if self._crop is not None:
            pair = self._padded(pair, self._crop)
        at_random = self.context.phase == caffe_pb2.TRAIN
        return self.crop_and_mirror(pair, rng, self._crop, param.mirror, at_random)

    def _padded(self, pair: Pair, crop: Size) -> Pair:
        """Fill the right and the bottom up to the crop's size."""
        rows, columns = (max(want - have, 0) for have, want in zip(pair.size, crop, strict=True))
        if not rows and not columns:
            return pair
        channels = pair.pixels.shape[2]
        pixels = np.empty((pair.size[0] + rows, pair.size[1] + columns, channels), np.float32)
        pixels[...] = self._transformer.channel_means(channels)
        pixels[: pair.size[0], : pair.size[1]] = pair.pixels
        labels = np.full(pixels.shape[:2], self.param.image_data_param.ignore_label, np.float32)
        labels[: pair.size[0], : pair.size[1]] = pair.labels
        return Pair(pixels, labels)


@register_layer("ImageLabelmapData")
class ImageLabelmapDataLayer(LabelMapLayer):
    """Images and maps of edges (`image_labelmap_data_layer.cpp` of HED and RCF).

    Each line of `source` has the names of an image and of a gray image. Labels are gray / 255, and 1 above 0.5. Both
    images are resized bilinearly. `crop_size` crops at random in TRAIN and at the center in TEST.

    Raises:
        ConfigError: new_height and new_width are not set together.
        DataError: the list or an image cannot be read, or an image and its map differ in size.
    """

    def read(self, number: int) -> Pair:
        pair = self.decoded(number, self.param.image_data_param.is_color, None)
        if self._size is not None:
            labels = resize(np.ascontiguousarray(pair.labels), *self._size)[:, :, 0]
            pair = Pair(resize(np.ascontiguousarray(pair.pixels), *self._size), labels)
        labels = pair.labels.astype(np.float32) / np.float32(255)
        return replace(pair, labels=np.where(labels > EDGE, np.float32(1), labels))

    def augment(self, pair: Pair, rng: SampleRng) -> Pair:
        param = self.param.transform_param
        crop = (param.crop_size, param.crop_size) if param.crop_size else None
        return self.crop_and_mirror(pair, rng, crop, param.mirror, self.context.phase == caffe_pb2.TRAIN)


@register_layer("SegData")
class SegDataLayer(LabelMapLayer):
    """One image and its labels in each pass (`seg_data_layer.cpp` of TSN's Caffe).

    Each line of `source` has the names of an image and of a gray image of its labels. Both are resized by a factor
    drawn from the two `scale_ratios` in steps of 0.001, the labels by nearest neighbour. The crop, at random in
    both phases, has the largest multiples of `stride` as height and width, at most `upper_size`, or `upper_height`
    and `upper_width`. With `balance` it is drawn again, up to ten times, while one label fills more than 80 % of
    it.

    Raises:
        ConfigError: scale_ratios are not two, or stride is below 1.
        DataError: the list or an image cannot be read, or an image and its labels differ in size.
    """

    parameter = "seg_data_param"

    def batch_size(self) -> int:
        return 1

    def root_folder(self) -> str:
        return self.param.seg_data_param.root_dir

    def check(self) -> None:
        param = self.param.transform_param
        ratios = list(param.scale_ratios)
        if len(ratios) not in (0, 2) or any(not ratio > 0 for ratio in ratios) or ratios != sorted(ratios):
            raise self.error("scale_ratios of transform_param must be two, above 0, the smaller one first")
        if param.stride < 1:
            raise self.error(f"stride of transform_param is {param.stride}; it must be at least 1")
        if param.HasField("mean_file"):
            raise self.error("has no mean_file, because images differ in size; give mean_value")

    def read(self, number: int) -> Pair:
        return self.decoded(number, True, None)

    def augment(self, pair: Pair, rng: SampleRng) -> Pair:
        found = self._draw(pair, rng)
        for _ in range(BALANCE_DRAWS if self.param.seg_data_param.balance else 0):
            counts = np.unique(found.labels, return_counts=True)[1]
            if counts.max(initial=0) <= LARGEST_PART * found.labels.size:
                break
            found = self._draw(pair, rng)
        return found

    def _draw(self, pair: Pair, rng: SampleRng) -> Pair:
        param = self.param.transform_param
        if param.scale_ratios:
            low, high = param.scale_ratios
            factor = low + rng.below(int((high - low) * 1000) + 1) / 1000
            pair = pair.resized((int(pair.size[0] * factor + 0.5), int(pair.size[1] * factor + 0.5)))
        crop = tuple(size // param.stride * param.stride for size in pair.size)
        if param.HasField("upper_size"):
            crop = tuple(min(size, param.upper_size) for size in crop)
        elif param.HasField("upper_height") and param.HasField("upper_width"):
            crop = (min(crop[0], param.upper_height), min(crop[1], param.upper_width))
        if min(crop) < 1:
            raise DataError(f"is {sides(pair.size)}, smaller than stride {param.stride}")
        return self.crop_and_mirror(pair, rng, (crop[0], crop[1]), param.mirror)


# -- files and batches -----------------------------------------------------------------------------------


class PairList:
    """The lines of a list: a file name, and a second word if `needs_second`.

    Args:
        path: the list.
        root: put in front of each file's name.
        needs_second: whether each line must have a second word.

    Raises:
        DataError: the list cannot be read, is empty, or has a line with a word too few.
    """

    def __init__(self, path: Path, root: str, needs_second: bool) -> None:
        self.description = f"image list '{path}'"
        self._root = root
        self.names: list[tuple[str, str]] = []
        for number, line in list_lines(path):
            words = line.split()
            if needs_second and len(words) < 2:
                raise DataError(f"'{path}':{number}: the line has one word; it needs an image and its labels")
            self.names.append((words[0], words[1] if len(words) > 1 else ""))
        if not self.names:
            raise DataError(f"{self.description} names no images")

    def __len__(self) -> int:
        return len(self.names)

    def image(self, number: int, which: int, color: bool) -> NDArray[np.generic]:
        """Return the first or second image of a line, (H, W, C).

        Raises:
            DataError: it cannot be read. The message follows the record's name.
        """
        name = self._root + self.names[number][which]
        try:
            return to_pixels(read_image(name, color, not color))
        except DataError as error:
            raise DataError(f"names '{name}', which {error}") from error

    def name(self, number: int) -> str:
        """Return a line's name for messages."""
        return f"record {number} ('{self.names[number][0]}') of {self.description}"

    def fingerprint(self) -> dict[str, str]:
        names = "\n".join(" ".join(pair) for pair in self.names)
        return {"the number of images": str(len(self)), "the hash of the names": hash_of(names.encode())}

    def close(self) -> None:
        """Do nothing: no file is open between reads."""
