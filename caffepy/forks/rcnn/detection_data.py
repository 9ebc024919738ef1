"""Images of window files with objects and labels of anchors: DetectionData and EvalData, and MS-CNN's ImageGtData.

DetectionData and EvalData are Cascade R-CNN's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from caffepy.data.boxes import CORNERS, EXACT
from caffepy.data.images import rounded
from caffepy.data.prefetch import Batch
from caffepy.data.random import SampleRng
from caffepy.data.sampler import SampleLoader, Sampler
from caffepy.data.transforms.im_transforms import check_distort, distort
from caffepy.errors import DataError
from caffepy.forks.rcnn.object_windows import (
    CHANNELS,
    Floats,
    LabelMap,
    Matching,
    Normaliser,
    ObjectWindowSource,
    Placed,
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
from caffepy.formats.blobs import check_shape
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.input.prefetching import DescribingLoader, PrefetchingLayer, Source, seeded_stream
from caffepy.layers.layer import register_layer

_f32 = np.float32
COLUMNS = 8
_NO_OBJECT = (-1,) * COLUMNS
"""The row of a batch without objects."""
_STEP = 32
"""Sides of resized images are multiples of this."""
_ORDERS = ("random", "random_aspect", "random_mix_aspect")
_DRAWS_ORDER, _DRAWS_RATIO = 1 << 31, 1 << 30
"""Change the random stream for what belongs to no single sample."""


def to_step(size: float) -> int:
    """Return the multiple of 32 nearest to a size."""
    return rounded(size / _STEP) * _STEP


def told_side_lengths(
    param: caffe_pb2.DetectionDataParameter | caffe_pb2.EvalDataParameter,
) -> tuple[int, int, str] | None:
    """Return the height and width of the images, wide ones where both are possible, and the fields that tell them."""
    sides = (
        ("crop_height", "crop_width"),
        ("crop_short_size", "crop_long_size"),
        ("resize_height", "resize_width"),
        ("short_size", "long_size"),
    )
    for height, width in sides:
        if height in param.DESCRIPTOR.fields_by_name and getattr(param, height) and getattr(param, width):
            return getattr(param, height), getattr(param, width), f"{height} and {width}"
    return None


# -- the base of DetectionData and ImageGtData ---------------------------------------------------------


class AnchorLabelsLayer(PrefetchingLayer):
    """A layer of images, labels of anchors, and optionally their objects."""

    parameter: ClassVar[str]
    """The layer's message in the prototxt."""
    stride_field: ClassVar[str]
    """The field of the message that has a stride for each map."""
    columns: ClassVar[int]
    """Numbers of an object."""

    @classmethod
    def label_shapes(cls, layer: caffe_pb2.LayerParameter, image: Sequence[int]) -> list[tuple[int, ...]]:
        param = getattr(layer, cls.parameter)
        maps = map_shapes(getattr(param, cls.stride_field), image)
        return [*maps, (cls.columns, 1, 1)] if param.output_gt_boxes else maps

    @classmethod
    def object_list(cls, layer: caffe_pb2.LayerParameter, shapes: Mapping[str, Sequence[int]]) -> int | None:
        return len(layer.top) - 1 if getattr(layer, cls.parameter).output_gt_boxes else None

    @property
    def settings(self) -> Any:
        """The layer's message in the prototxt."""
        return getattr(self.param, self.parameter)

    def batch_size(self) -> int:
        return int(self.settings.batch_size)

    def batch_shape(self, index: int, sample_shape: tuple[int, ...]) -> tuple[int, ...]:
        if self.settings.output_gt_boxes and index == len(self.param.top) - 1:
            return (1, *sample_shape)
        return super().batch_shape(index, sample_shape)

    def read_maps(self) -> list[LabelMap]:
        """Return the maps of anchors.

        Raises:
            ConfigError: coord_num is not 4, or there are more or fewer tops than maps, images and objects need.
        """
        param = self.settings
        if param.coord_num != 4:
            raise self.error(f"coord_num is {param.coord_num}; boxes have 4 numbers")
        strides = getattr(param, self.stride_field)
        maps = read_label_maps(self, param.field_w, param.field_h, strides, self.stride_field)
        if len(self.param.top) != 1 + len(maps) + param.output_gt_boxes:
            raise self.error(
                f"has {len(self.param.top)} tops; it needs one for images, {len(maps)} for labels, and one more with "
                "output_gt_boxes"
            )
        return maps

    def sample_shapes(self, maps: Sequence[LabelMap], height: int, width: int) -> list[tuple[int, ...]]:
        """Return the shapes of the tops of one image of height x width."""
        shapes: list[tuple[int, ...]] = [(3, height, width), *((CHANNELS, *one.shape(height, width)) for one in maps)]
        return [*shapes, (self.columns, 1, 1)] if self.settings.output_gt_boxes else shapes


def object_rows(boxes: Floats, labels: Floats, *flags: NDArray[np.bool_]) -> Floats:
    """Return a row (x1, y1, x2, y2, label, flags) for each object of an image."""
    return np.column_stack([boxes, labels, *flags]).astype(_f32)


@dataclass(frozen=True)
class AnchorSettings:
    """Settings of a layer with labels of anchors.

    Args:
        param: of the prototxt.
        maps: of anchors.
        size: height and width of the images; (0, 0): the first image of a batch gives them.
        normaliser: of pixels.
        mirror: whether to mirror at random.
        nvidia: whether images are decoded as by NVIDIA Caffe.
    """

    param: Any
    maps: list[LabelMap]
    size: tuple[int, int]
    normaliser: Normaliser
    mirror: bool
    nvidia: bool


class AnchorLoader(SampleLoader):
    """Fills batches of images, labels of anchors, and objects.

    Args:
        source: the images.
        settings: of the layer.
        key: seed of the solver, or random_seed, and random stream of the layer.
        where: the layer, for messages.
        threads: number of decoder threads.
        order: of the records.
        no_object: the row of a batch without objects.
        images: the image of each record; None: that of its number.
    """

    def __init__(
        self,
        source: ObjectWindowSource,
        settings: AnchorSettings,
        key: tuple[int, int],
        where: str,
        threads: int,
        order: Sampler,
        no_object: Sequence[float],
        images: NDArray[np.int64] | None = None,
    ) -> None:
        self._images = np.arange(len(source)) if images is None else images
        objects = (1 + len(settings.maps), no_object)
        super().__init__(where, self._tops, lambda n: source.name(self.image_of(n)), order, threads, objects)
        self.source, self._settings, self._key = source, settings, key

    def image_of(self, record: int) -> int:
        """Return the number of a record's image."""
        return int(self._images[record])

    def _tops(self, record: int, sample: int) -> list[Floats]:
        """Return an image, its labels, and the rows of its objects."""
        raise NotImplementedError


# -- DetectionData -------------------------------------------------------------------------------------


@register_layer("DetectionData")
class DetectionDataLayer(AnchorLabelsLayer):
    """Images, labels of anchors, and optionally their objects (Cascade R-CNN's `detection_data_layer.cpp`).

    Tops: images (N, 3, H, W); for each `stride` a map (N, 6, H / stride, W / stride) as ImageGtData's, with widths and
    heights that include the last pixel; with `output_gt_boxes` the objects of the batch (G, 8, 1, 1) as (image, x1, y1,
    x2, y2, label, ignored, difficult), a row of -1 if there are none. Images are distorted (`distort_param`), mirrored,
    resized to `resize_width` x `resize_height`, by `resize_ratio` or to a shorter side of `short_size`, rescaled at
    random (min_scale and max_scale of an object, or low_scale_ratio and high_scale_ratio), and cropped or padded. H x W
    is the crop, the resized size, or from the batch's first image: its orientation decides whether `short_size` (or
    `crop_short_size`) is the height or the width, in multiples of 32; otherwise its own size. The source is a window
    file. Each epoch has a new order (`shuffle`).

    Raises:
        ConfigError: a setting is missing, out of range or contradicts another.
        DataError: the window file or an image cannot be read.
    """

    tops = (1, None)
    parameter, stride_field, columns = "detection_data_param", "stride", COLUMNS

    @classmethod
    def told_size(cls, layer: caffe_pb2.LayerParameter, nvidia: bool) -> tuple[int, int, str] | None:
        return told_side_lengths(layer.detection_data_param)

    def open(self) -> tuple[Source, list[tuple[int, ...]]]:
        param = self.param.detection_data_param
        maps = self.read_maps()
        check_detection_data(self, param)
        normaliser = read_normaliser(self, self.param.transform_param.scale)
        self._windows = open_object_windows(self, param.source, param.root_folder, True)
        mirror, nvidia = self.param.transform_param.mirror, self.context.nvidia
        self._settings = AnchorSettings(param, maps, (0, 0), normaliser, mirror, nvidia)
        sizes = Sizes(param, 1.0)
        height, width = sizes.canvas(sizes.resized(self._windows.entries[0].size))
        return self._windows, self.sample_shapes(maps, height, width)

    def make_loader(self) -> DescribingLoader:
        stream = seeded_stream(self)
        key, order = (stream.seed, stream.stream), image_order(self.settings, self._windows, stream.seed, stream.stream)
        return DetectionDataLoader(self._windows, self._settings, key, self.where, self.threads(0), order, _NO_OBJECT)


def check_detection_data(layer: DetectionDataLayer, param: caffe_pb2.DetectionDataParameter) -> None:
    """Check the fields of DetectionData.

    Raises:
        ConfigError: fields contradict each other, or a value is out of range.
    """
    for first, second in (
        ("resize_width", "resize_height"),
        ("crop_width", "crop_height"),
        ("short_size", "long_size"),
        ("crop_short_size", "crop_long_size"),
        ("min_scale", "max_scale"),
        ("low_scale_ratio", "high_scale_ratio"),
        ("min_whaspect", "max_whaspect"),
    ):
        if param.HasField(first) != param.HasField(second):
            raise layer.error(f"needs {first} and {second}, or neither")
        if param.HasField(first) and not min(getattr(param, first), getattr(param, second)) > 0:
            raise layer.error(f"{first} and {second} must be above 0")
    for rivals in (
        ("resize_width", "resize_ratio", "short_size"),
        ("crop_width", "crop_short_size"),
        ("min_scale", "low_scale_ratio"),
    ):
        given = [field for field in rivals if param.HasField(field)]
        if len(given) > 1:
            raise layer.error(f"has both {given[0]} and {given[1]}; keep one of them")
    for lower, upper in (("min_scale", "max_scale"), ("low_scale_ratio", "high_scale_ratio")):
        if getattr(param, lower) > getattr(param, upper):
            raise layer.error(f"{lower} is more than {upper}")
    _check_values(layer, param)
    check_distort(param.distort_param, layer.where)


def _check_values(layer: DetectionDataLayer, param: caffe_pb2.DetectionDataParameter) -> None:
    """Check single fields of DetectionData."""
    if param.HasField("resize_ratio") and not param.resize_ratio > 0:
        raise layer.error(f"resize_ratio is {param.resize_ratio:g}; it must be above 0")
    if not param.fg_threshold > 0 or not all(ratio > 0 for ratio in param.template_ratio):
        raise layer.error("fg_threshold and template_ratio must be above 0")
    if param.HasField("shuffle") and param.shuffle not in _ORDERS:
        raise layer.error(f"shuffle is '{param.shuffle}'; it must be one of {', '.join(_ORDERS)}")


@dataclass(frozen=True)
class Sizes:
    """The sizes of images and batches of DetectionData.

    Args:
        param: of the prototxt.
        ratio: one of template_ratio.
    """

    param: caffe_pb2.DetectionDataParameter
    ratio: float

    def resized(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the height and width to which an image of height x width is resized."""
        param = self.param
        if param.HasField("resize_width"):
            return param.resize_height, param.resize_width
        factor = 1.0
        if param.HasField("resize_ratio"):
            factor = param.resize_ratio
        elif param.HasField("short_size"):
            factor = float(_f32(to_step(param.short_size * self.ratio)) / _f32(min(size)))
        return rounded(_f32(size[0]) * _f32(factor)), rounded(_f32(size[1]) * _f32(factor))

    def canvas(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the height and width of the batch whose first image was resized to height x width."""
        param = self.param
        if param.HasField("crop_width"):
            return param.crop_height, param.crop_width
        if param.HasField("crop_short_size"):
            sides = (param.crop_short_size, param.crop_long_size)
            return sides[::-1] if size[0] >= size[1] or param.HasField("resize_width") else sides
        if param.HasField("resize_width"):
            return param.resize_height, param.resize_width
        if param.HasField("short_size"):
            short, long = (to_step(side * self.ratio) for side in (param.short_size, param.long_size))
            return (long, short) if size[0] >= size[1] else (short, long)
        return size


def image_order(param: caffe_pb2.DetectionDataParameter, source: ObjectWindowSource, seed: int, stream: int) -> Sampler:
    """Return the order of the images."""
    if param.HasField("shuffle") and param.shuffle != "random":
        tall = np.array([entry.size[0] >= entry.size[1] for entry in source.entries])
        group = param.mix_group_size if param.shuffle == "random_mix_aspect" else 0
        return AspectOrder(tall, group, seed, stream)
    return Sampler(len(source), 0, param.HasField("shuffle"), seed, stream)


class AspectOrder(Sampler):
    """A random order of tall and of wide images apart, all of one kind first, or in turn by groups.

    Args:
        tall: which images are at least as high as wide.
        group: images of a group; 0: all of one kind first.
        seed: the solver's seed.
        stream: the layer's random stream.
    """

    def __init__(self, tall: NDArray[np.bool_], group: int, seed: int, stream: int) -> None:
        super().__init__(len(tall), 0, True, seed, stream)
        self._tall, self._group = tall, group

    def order_of(self, epoch: int) -> NDArray[np.int64]:
        tall, group = self._tall, self._group
        order = super().order_of(epoch)
        kinds = [order[tall[order]], order[~tall[order]]]
        if SampleRng(self._seed, self._stream ^ _DRAWS_ORDER, epoch).below(2):
            kinds.reverse()
        if not group:
            return np.concatenate(kinds)
        parts: list[NDArray[np.int64]] = []
        used = [0, 0]
        while used[0] < len(kinds[0]) and used[1] < len(kinds[1]):
            which = len(parts) % 2
            parts.append(kinds[which][used[which] : used[which] + group])
            used[which] += len(parts[-1])
        return np.concatenate([*parts, *(kind[begin:] for kind, begin in zip(kinds, used, strict=True))])


class DetectionDataLoader(AnchorLoader):
    """Fills batches of DetectionData."""

    _sizes: Sizes
    _canvas: tuple[int, int] = (0, 0)

    def load(self, first: int, count: int, batch: Batch) -> None:
        self._sizes, self._canvas = Sizes(self._settings.param, self._ratio(first)), (0, 0)
        super().load(first, count, batch)

    def _ratio(self, first: int) -> float:
        """Return the template_ratio of the batch that begins with a sample."""
        ratios = self._settings.param.template_ratio
        seed, stream = self._key
        return ratios[SampleRng(seed, stream ^ _DRAWS_RATIO, first).below(len(ratios))] if ratios else 1.0

    def _scene(self, number: int, sizes: Sizes, rng: SampleRng) -> Scene:
        """Return an image, distorted, mirrored and resized, with its boxes."""
        settings, scene = self._settings, self.source.scene(number, self._settings.nvidia)
        if settings.param.HasField("distort_param"):
            scene = replace(scene, pixels=distort(scene.pixels, settings.param.distort_param, rng))
        if settings.mirror and rng.below(2):
            scene = scene.mirrored()
        return scene.resized(*sizes.resized(scene.size))

    def _tops(self, number: int, sample: int) -> list[Floats]:
        """Return an image, its labels, and the rows of its objects."""
        settings, entry, rng = self._settings, self.source.entries[number], SampleRng(*self._key, sample)
        scene, param = self._scene(number, self._sizes, rng), settings.param
        if self._canvas == (0, 0):  # the first image sets the shape of the batch
            self._canvas = self._sizes.canvas(scene.size)
            check_shape((3, *self._canvas), self.where)
        canvas = self._canvas
        placed = self._place(scene, canvas, rng)
        boxes = placed.scene.boxes
        ignored = entry.flags[:, 0] | is_outside(boxes, (param.min_gt_width, param.min_gt_height), canvas)
        matching = Matching(
            CORNERS,
            param.fg_threshold,
            param.ignore_fg_threshold,
            param.pickup_iou_thr,
            param.anchor_ignore_margin_ratio if param.HasField("anchor_ignore_margin_ratio") else None,
            param.anchor_ignore_iou_thr if param.HasField("anchor_ignore_iou_thr") else None,
        )
        labels = label_anchors(settings.maps, matching, Truth(entry.labels, boxes, ignored), placed, canvas)
        rows = object_rows(boxes, entry.labels, ignored, entry.flags[:, 1])
        return [placed.image(settings.normaliser, canvas), *labels, rows]

    def _place(self, scene: Scene, canvas: tuple[int, int], rng: SampleRng) -> Placed:
        """Rescale an image at random, and crop it near an object."""
        param, box = self._settings.param, None
        center = random_center(scene.size, canvas, rng)
        if len(scene.boxes):
            box = scene.boxes[rng.below(len(scene.boxes))]
            center = center_of(box)
        rescales = param.HasField("min_scale") or param.HasField("low_scale_ratio")
        factors = (1.0, 1.0)
        if rescales and rng.uniform(0, 1) < param.multiscale_prob:
            factors = random_factors(param, box, rng)
        return place(scene, factors, center, canvas, rng)


def random_factors(param: caffe_pb2.DetectionDataParameter, box: Floats | None, rng: SampleRng) -> tuple[float, float]:
    """Return random factors of width and height, uniform in the logarithm; `box` is an object, None: there is none."""
    low, high = param.low_scale_ratio, param.high_scale_ratio
    if param.HasField("min_scale"):
        low = high = 2.0
        if box is not None:
            scale = float(np.sqrt((box[2] - box[0] + 1) * (box[3] - box[1] + 1)))
            low, high = param.min_scale / scale, param.max_scale / scale
    factor = 2.0 ** rng.uniform(float(np.log2(low)), float(np.log2(high)))
    if not param.HasField("min_whaspect"):
        return factor, factor
    aspect = 2.0 ** rng.uniform(float(np.log2(param.min_whaspect)), float(np.log2(param.max_whaspect)))
    return factor * aspect**0.5, factor / aspect**0.5


# -- EvalData ------------------------------------------------------------------------------------------


@register_layer("EvalData")
class EvalDataLayer(PrefetchingLayer):
    """The images of a window file in order, with their objects (Cascade R-CNN's `eval_data_layer.cpp`).

    Tops: images (N, 3, H, W); the objects of the batch (G, 8, 1, 1) as DetectionData's; optionally the heights and
    widths (N, 2, 1, 1). Images are resized to `resize_width` x `resize_height`, or to a shorter side of `short_size`
    with neither side above `long_size`; both sides are rounded to multiples of 32. Without resize_width and
    resize_height batch_size must be 1.

    Raises:
        ConfigError: a setting is missing or out of range.
        DataError: the window file or an image cannot be read.
    """

    tops = (2, 3)

    @classmethod
    def told_size(cls, layer: caffe_pb2.LayerParameter, nvidia: bool) -> tuple[int, int, str] | None:
        return told_side_lengths(layer.eval_data_param)

    @classmethod
    def label_shapes(cls, layer: caffe_pb2.LayerParameter, image: Sequence[int]) -> list[tuple[int, ...]]:
        sizes: list[tuple[int, ...]] = [(COLUMNS, 1, 1), (2, 1, 1)]
        return sizes[: len(layer.top) - 1]

    @classmethod
    def object_list(cls, layer: caffe_pb2.LayerParameter, shapes: Mapping[str, Sequence[int]]) -> int | None:
        return 1

    def batch_size(self) -> int:
        return self.param.eval_data_param.batch_size

    def open(self) -> tuple[Source, list[tuple[int, ...]]]:
        param = self.param.eval_data_param
        for first, second in (("resize_width", "resize_height"), ("short_size", "long_size")):
            if param.HasField(first) != param.HasField(second) or (
                param.HasField(first) and not min(getattr(param, first), getattr(param, second))
            ):
                raise self.error(f"needs {first} and {second}, above 0, or neither")
        if not param.HasField("resize_width") and param.batch_size != 1:
            raise self.error("its images have different sizes; set batch_size: 1, or resize_width and resize_height")
        self._normaliser = read_normaliser(self, self.param.transform_param.scale)
        self._windows = open_object_windows(self, param.source, param.root_folder, True)
        size = eval_size(param, self._windows.entries[0].size)
        shapes: list[tuple[int, ...]] = [(3, *size), (COLUMNS, 1, 1), (2, 1, 1)]
        return self._windows, shapes[: len(self.param.top)]

    def batch_shape(self, index: int, sample_shape: tuple[int, ...]) -> tuple[int, ...]:
        return (1, *sample_shape) if index == 1 else super().batch_shape(index, sample_shape)

    def make_loader(self) -> DescribingLoader:
        source = self._windows
        return SampleLoader(self.where, self._make_tops, source.name, Sampler(len(source)), objects=(1, _NO_OBJECT))

    def _make_tops(self, number: int, _: int) -> list[Floats]:
        """Return an image, the rows of its objects, and its height and width."""
        entry, scene = self._windows.entries[number], self._windows.scene(number, self.context.nvidia)
        scene = scene.resized(*eval_size(self.param.eval_data_param, scene.size))
        rows = object_rows(scene.boxes, entry.labels, entry.flags[:, 0], entry.flags[:, 1])
        return [self._normaliser.apply(scene.pixels), rows, np.array(scene.size, _f32).reshape(2, 1, 1)]


def eval_size(param: caffe_pb2.EvalDataParameter, size: tuple[int, int]) -> tuple[int, int]:
    """Return the height and width to which EvalData resizes an image of height x width, multiples of 32."""
    if param.HasField("resize_width"):
        size = (param.resize_height, param.resize_width)
    elif param.HasField("short_size"):
        factor = _f32(param.short_size) / _f32(min(size))
        size = (
            min(rounded(_f32(size[0]) * factor), param.long_size),
            min(rounded(_f32(size[1]) * factor), param.long_size),
        )
    return to_step(size[0]), to_step(size[1])


# -- ImageGtData ---------------------------------------------------------------------------------------

_COLUMNS = 7
_IGNORED_OBJECT = (0, 1, 1, 2, 2, 1, 1)
"""The row of a batch without objects."""
_IGNORED, _PICKUP = 0.4, 0.2
_STEPS = 2
"""Scales in a factor of 2."""
_ASPECT_STEP = 0.05


@register_layer("ImageGtData")
class ImageGtDataLayer(AnchorLabelsLayer):
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
    parameter, stride_field, columns = "image_gt_data_param", "downsample_rate", _COLUMNS

    @classmethod
    def told_size(cls, layer: caffe_pb2.LayerParameter, nvidia: bool) -> tuple[int, int, str] | None:
        size = crop_size(layer.image_gt_data_param)
        return None if size is None else (*size, "crop_height and crop_width or resize_height and resize_width")

    def open(self) -> tuple[Source, list[tuple[int, ...]]]:
        param = self.param.image_gt_data_param
        maps = self.read_maps()
        normaliser = read_normaliser(self, param.scale * self.param.transform_param.scale)
        if param.do_multiple_scale and not 0 < param.min_scale <= param.max_scale:
            raise self.error("do_multiple_scale needs min_scale and max_scale, above 0 in ascending order")
        self._windows = open_object_windows(self, param.source, param.root_folder, False)
        height, width = crop_size(param) or self._windows.entries[-1].size
        mirror, nvidia = self.param.transform_param.mirror, self.context.nvidia
        self._settings = AnchorSettings(param, maps, (height, width), normaliser, mirror, nvidia)
        return self._windows, self.sample_shapes(maps, height, width)

    def make_loader(self) -> DescribingLoader:
        stream = seeded_stream(self)
        source, key, param = self._windows, (stream.seed, stream.stream), self.settings
        times = [param.fg_img_multiple if not entry.flags[:, 0].all() else 1 for entry in source.entries]
        images = np.repeat(np.arange(len(source)), times)
        if not len(images):
            raise DataError(f"{self.where}: fg_img_multiple is 0, and each image of {source.description} has an object")
        order = Sampler(len(images), 0, param.shuffle, *key)
        threads = self.threads(0)
        return ImageGtLoader(source, self._settings, key, self.where, threads, order, _IGNORED_OBJECT, images)


def crop_size(param: caffe_pb2.ImageGtDataParameter) -> tuple[int, int] | None:
    """Return the height and width of the images: of the crop, or of the resized image; None if neither is given."""
    for sides in ((param.crop_height, param.crop_width), (param.resize_height, param.resize_width)):
        if all(sides):
            return sides
    return None


class ImageGtLoader(AnchorLoader):
    """Fills batches of ImageGtData."""

    def _tops(self, record: int, sample: int) -> list[Floats]:
        """Return an image, its labels, and the rows of its objects."""
        number, rng, settings = self.image_of(record), SampleRng(*self._key, sample), self._settings
        entry = self.source.entries[number]
        param = settings.param
        scene = self.source.scene(number, settings.nvidia)
        if settings.mirror and rng.below(2):
            scene = scene.mirrored()
        if param.HasField("resize_width") and param.HasField("resize_height"):
            scene = scene.resized(param.resize_height, param.resize_width)
        factors, center = (1.0, 1.0), random_center(scene.size, settings.size, rng)
        if len(scene.boxes):
            box = scene.boxes[rng.below(len(scene.boxes))]
            center = center_of(box)
            if param.do_multiple_scale and rng.below(2):
                factors = factors_of_scales(param, box, rng)
        placed = place(scene, factors, center, settings.size, rng)
        boxes = placed.scene.boxes
        small = is_outside(boxes, (param.min_gt_width, param.min_gt_height), settings.size)
        truth = Truth(entry.labels, boxes, entry.flags[:, 0] | small)
        matching = Matching(EXACT, param.fg_threshold, _IGNORED, _PICKUP)
        labels = label_anchors(settings.maps, matching, truth, placed, settings.size)
        rows = object_rows(truth.boxes, truth.labels, truth.ignored)
        return [placed.image(settings.normaliser, settings.size), *labels, rows]


def factors_of_scales(param: caffe_pb2.ImageGtDataParameter, box: Floats, rng: SampleRng) -> tuple[float, float]:
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
