"""ImageGtData: images with labels of anchors (MS-CNN)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from caffepy.data.prefetch import Batch
from caffepy.data.random import SampleRng
from caffepy.data.sampler import Sampler
from caffepy.data.transforms.pixel_boxes import EXACT
from caffepy.data.transforms.pixels import rounded
from caffepy.errors import DataError
from caffepy.forks.rcnn.object_windows import (
    CHANNELS,
    Floats,
    LabelMap,
    Matching,
    Normaliser,
    ObjectWindowLoader,
    ObjectWindowSource,
    Scene,
    Truth,
    center_of,
    is_outside,
    label_anchors,
    map_shapes,
    open_object_windows,
    place,
    random_center,
    read_label_maps,
    read_normaliser,
)
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.input.prefetching import DescribingLoader, PrefetchingLayer, Source, seeded_stream
from caffepy.layers.layer import register_layer

_f32 = np.float32
_COLUMNS = 7
_NO_OBJECT = (0, 1, 1, 2, 2, 1, 1)
"""The row of a batch without objects: an ignored object."""
_IGNORED, _PICKUP = 0.4, 0.2
_STEPS = 2
"""Scales in a factor of 2."""
_ASPECT_STEP = 0.05


@register_layer("ImageGtData")
class ImageGtDataLayer(PrefetchingLayer):
    """Images, labels of anchors, and optionally their objects (MS-CNN's `image_gt_data_layer.cpp`; Cai et al. 2016).

    Tops: images (N, 3, H, W); for each `downsample_rate` a map (N, 6, H / rate, W / rate) with the channels label, x
    and y of the object's center, width, height, overlap; with `output_gt_boxes` the objects of the batch (G, 7, 1, 1)
    as (image, x1, y1, x2, y2, label, ignored). H x W is the crop, or the resized image. An anchor that overlaps an
    object by more than `fg_threshold` gets its label. Objects outside the crop, or smaller than min_gt_width or
    min_gt_height, are ignored: their anchors have label 0 and the overlap, and DetectionLoss does not count them.
    Images are mirrored at random (`transform_param.mirror`), half of them rescaled such that an object gets a random
    size (`do_multiple_scale`), and cropped near an object. The source is a window file.

    Raises:
        ConfigError: a setting is missing or out of range.
        DataError: the window file or an image cannot be read.
    """

    tops = (2, None)

    @classmethod
    def told_size(cls, layer: caffe_pb2.LayerParameter, nvidia: bool) -> tuple[int, int, str] | None:
        size = crop_size(layer.image_gt_data_param)
        return None if size is None else (*size, "crop_height and crop_width or resize_height and resize_width")

    @classmethod
    def label_shapes(cls, layer: caffe_pb2.LayerParameter, image: Sequence[int]) -> list[tuple[int, ...]]:
        param = layer.image_gt_data_param
        maps = map_shapes(param.downsample_rate, image)
        return [*maps, (_COLUMNS, 1, 1)] if param.output_gt_boxes else maps

    @classmethod
    def object_list(cls, layer: caffe_pb2.LayerParameter, shapes: Mapping[str, Sequence[int]]) -> int | None:
        return len(layer.top) - 1 if layer.image_gt_data_param.output_gt_boxes else None

    def batch_size(self) -> int:
        return self.param.image_gt_data_param.batch_size

    def open(self) -> tuple[Source, list[tuple[int, ...]]]:
        param = self.param.image_gt_data_param
        if param.coord_num != 4:
            raise self.error(f"coord_num is {param.coord_num}; boxes have 4 numbers")
        maps = read_label_maps(self, param.field_w, param.field_h, param.downsample_rate, "downsample_rate")
        if len(self.param.top) != 1 + len(maps) + param.output_gt_boxes:
            raise self.error(
                f"has {len(self.param.top)} tops; it needs one for images, {len(maps)} for labels, and one more with "
                "output_gt_boxes"
            )
        normaliser = read_normaliser(self, param.scale * self.param.transform_param.scale)
        if param.do_multiple_scale and not 0 < param.min_scale <= param.max_scale:
            raise self.error("do_multiple_scale needs min_scale and max_scale, above 0 in ascending order")
        self._windows = open_object_windows(self, param.source, param.root_folder, False)
        height, width = crop_size(param) or self._windows.entries[-1].size
        self._settings = ImageGtSettings(
            param, maps, (height, width), normaliser, self.param.transform_param.mirror, self.context.nvidia
        )
        shapes: list[tuple[int, ...]] = [(CHANNELS, *one.shape(height, width)) for one in maps]
        objects: list[tuple[int, ...]] = [(_COLUMNS, 1, 1)]
        return self._windows, [(3, height, width), *shapes, *objects[: param.output_gt_boxes]]

    def batch_shape(self, index: int, sample_shape: tuple[int, ...]) -> tuple[int, ...]:
        if self.param.image_gt_data_param.output_gt_boxes and index == len(self.param.top) - 1:
            return (1, *sample_shape)
        return super().batch_shape(index, sample_shape)

    def make_loader(self) -> DescribingLoader:
        stream = seeded_stream(self)
        return ImageGtLoader(self._windows, self._settings, stream.seed, stream.stream, self.where, self.threads(0))


def crop_size(param: caffe_pb2.ImageGtDataParameter) -> tuple[int, int] | None:
    """Return the height and width of the images: of the crop, or of the resized image; None if neither is given."""
    for sides in ((param.crop_height, param.crop_width), (param.resize_height, param.resize_width)):
        if all(sides):
            return sides
    return None


@dataclass(frozen=True)
class ImageGtSettings:
    """Settings of ImageGtData.

    Args:
        param: of the prototxt.
        maps: of anchors.
        size: height and width of the images.
        normaliser: of pixels.
        mirror: whether to mirror at random.
        nvidia: whether images are decoded as by NVIDIA Caffe.
    """

    param: caffe_pb2.ImageGtDataParameter
    maps: list[LabelMap]
    size: tuple[int, int]
    normaliser: Normaliser
    mirror: bool
    nvidia: bool


class ImageGtLoader(ObjectWindowLoader):
    """Fills batches of ImageGtData; a `Loader`.

    Args:
        source: the images.
        settings: of the layer.
        seed: of the solver, or random_seed.
        stream: random stream of the layer.
        where: the layer, for messages.
        threads: number of decoder threads.
    """

    def __init__(
        self, source: ObjectWindowSource, settings: ImageGtSettings, seed: int, stream: int, where: str,
        threads: int = 1,
    ) -> None:  # fmt: skip
        times = [settings.param.fg_img_multiple if not entry.flags[:, 0].all() else 1 for entry in source.entries]
        self._images = np.repeat(np.arange(len(source)), times)
        if not len(self._images):
            raise DataError(f"{where}: fg_img_multiple is 0, and each image of {source.description} has an object")
        order = Sampler(len(self._images), 0, settings.param.shuffle, seed, stream)
        super().__init__(source, order, where, threads)
        self._settings = settings
        self._key = (seed, stream)

    def image_of(self, record: int) -> int:
        return int(self._images[record])

    def load(self, first: int, count: int, batch: Batch) -> None:
        """Fill `batch` with the global samples [first, first + count)."""
        settings = self._settings
        images = batch.array(0, (count, 3, *settings.size))
        labels = [
            batch.array(1 + i, (count, CHANNELS, *one.shape(*settings.size))) for i, one in enumerate(settings.maps)
        ]
        rows: list[Floats] = [np.empty((0, _COLUMNS), _f32)] * count

        def fill(index: int, number: int) -> None:
            rng = SampleRng(*self._key, first + index)
            truth = self._put(number, rng, images[index], [one[index] for one in labels])
            of_image = np.full((len(truth.labels), 1), index, _f32)
            rows[index] = np.column_stack([of_image, truth.boxes, truth.labels, truth.ignored]).astype(_f32)

        self.fill_all(first, count, fill)
        if settings.param.output_gt_boxes:
            found = np.concatenate(rows)
            found = found if len(found) else np.array([_NO_OBJECT], _f32)
            batch.array(1 + len(labels), (len(found), _COLUMNS, 1, 1))[...] = found[:, :, None, None]

    def _put(self, number: int, rng: SampleRng, image: Floats, labels: list[Floats]) -> Truth:
        """Write one image and its labels, and return its objects."""
        settings, entry = self._settings, self.source.entries[number]
        param = settings.param
        scene = Scene(self.source.read(number, settings.nvidia), entry.boxes, entry.ignored)
        if settings.mirror and rng.below(2):
            scene = scene.mirrored()
        if param.HasField("resize_width") and param.HasField("resize_height"):
            scene = scene.resized(param.resize_height, param.resize_width)
        factors, center = (1.0, 1.0), random_center(scene.size, settings.size, rng)
        if len(scene.boxes):
            box = scene.boxes[rng.below(len(scene.boxes))]
            center = center_of(box)
            if param.do_multiple_scale and rng.below(2):
                factors = random_factors(param, box, rng)
        placed = place(scene, factors, center, settings.size, rng)
        placed.put(settings.normaliser, image)
        boxes = placed.scene.boxes
        small = is_outside(boxes, (param.min_gt_width, param.min_gt_height), settings.size)
        truth = Truth(entry.labels, boxes, entry.flags[:, 0] | small)
        label_anchors(settings.maps, Matching(EXACT, param.fg_threshold, _IGNORED, _PICKUP), truth, placed, labels)
        return truth


def random_factors(param: caffe_pb2.ImageGtDataParameter, box: Floats, rng: SampleRng) -> tuple[float, float]:
    """Return factors of width and height that give an object one of the scales from min_scale to max_scale.

    The scales are half a factor of 2 apart. The object's own is the one whose square is nearest to its area.
    """
    width, height = float(box[2] - box[0]), float(box[3] - box[1])
    least, most = param.min_scale, param.max_scale
    steps = np.arange(rounded(_STEPS * np.log2(_f32(most) / _f32(least)) + 1)) / _STEPS
    areas = (least * 2.0**steps) ** 2
    own = np.argmax(np.minimum(areas, width * height) / np.maximum(areas, max(width * height, 1e-6)))
    factor = float(2.0 ** (steps[rng.below(len(steps))] - steps[own]))
    factors = [factor, factor]
    if param.HasField("min_whaspect") and param.HasField("max_whaspect") and rng.below(2) and width > 0 < height:
        count = rounded((param.max_whaspect - param.min_whaspect) / _ASPECT_STEP)
        change = (rng.below(count) * _ASPECT_STEP + param.min_whaspect) / (width / height)
        axis = 0 if rng.below(2) else 1
        changed = factor * change if axis == 0 else factor / change
        if least * 0.8 <= (width, height)[axis] * changed <= most * 1.2:
            factors[axis] = changed
    return factors[0], factors[1]
