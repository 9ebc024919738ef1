"""AnnotatedData: images and their boxes from an LMDB, for SSD.

The augmentation distorts, expands, samples, resizes, crops and mirrors. Defined by NVIDIA Caffe's
`annotated_data_layer.cpp` and `data_transformer.cpp`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.backend.types import ByteImages
from caffepy.data.images import Image, recompress, to_image, to_pixels, without_ipp
from caffepy.data.loader import DatumLoader, Shape
from caffepy.data.prefetch import Batch
from caffepy.data.random import SampleRng, sample_rngs
from caffepy.data.sources.databases import RecordSource
from caffepy.data.transform import CropParams, DataTransformer
from caffepy.data.transforms.boxes import (
    COLUMNS,
    Annotations,
    Floats,
    check_samplers,
    clip,
    crop_annotations,
    extrapolate_annotations,
    jitter_patch,
    mirror_annotations,
    parse_annotated_datum,
    resize_annotations,
    sample_patch,
)
from caffepy.data.transforms.canvas import Canvas, canvas_part
from caffepy.data.transforms.im_transforms import choose_resize, distort
from caffepy.errors import DataError
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.input.images import DataLayer
from caffepy.layers.input.prefetching import Source
from caffepy.layers.layer import register_layer
from caffepy.logs.performance_report import TRANSFORMING


@register_layer("AnnotatedData")
class AnnotatedDataLayer(DataLayer):
    """Images and boxes from a database of AnnotatedDatums (NVIDIA Caffe's `annotated_data_layer.cpp`).

    Tops: images (N, C, H, W), and the boxes of all images (1, 1, boxes, 8) with the columns image index, label,
    instance, xmin, ymin, xmax, ymax as fractions of width and height, difficult; one row of -1 if there are no boxes.
    For records without a type of annotation the second top holds labels, (N, 1, 1, 1). In training on a GPU, rows with
    image -1 pad the boxes to a power of two, so that captured graphs stay valid. As in Caffe, an encoded image is
    compressed to JPEG after its colours, its canvas and its patch; `recompress: false` leaves that out.

    As in MobileNet-YOLO's `annotated_data_layer.cpp`: With yolo_data_type 1 the second top is (N, 1, 300, 5) with rows
    class from 0, center x, center y, width, height, and then rows of 0. Without a batch_sampler, yolo_data_jitter or
    yolo_data_type 1 cuts off up to yolo_data_jitter of the width and of the height. Of several resize_param one is
    selected by `prob` for 10 batches of the training.

    Raises:
        ConfigError: FIT_SMALL_SIZE is used with a batch_size other than 1, or yolo_data_jitter is not from 0 to 1.
        DataError: a record cannot be read or transformed, or has no annotation while others have.
    """

    made_by = "`caffepy convert_annoset` makes LMDBs of images with boxes"

    @classmethod
    def told_size(cls, layer: caffe_pb2.LayerParameter, nvidia: bool) -> tuple[int, int, str] | None:
        return super().told_size(layer, False)  # applies `resize_param` in both dialects

    @classmethod
    def label_shapes(cls, layer: caffe_pb2.LayerParameter, image: Sequence[int]) -> list[tuple[int, ...]]:
        return [(1, 1, COLUMNS)] * (len(layer.top) - 1)

    @classmethod
    def object_list(cls, layer: caffe_pb2.LayerParameter, shapes: Mapping[str, Sequence[int]]) -> int | None:
        if layer.annotated_data_param.yolo_data_type == 1 or len(layer.top) < 2:
            return None
        return 1 if shapes.get(layer.top[1], (1,))[-1] > 1 else None

    def open(self) -> tuple[Source, list[tuple[int, ...]]]:
        param = self.param.annotated_data_param
        check_samplers(param.batch_sampler, self.where)
        if not 0 <= param.yolo_data_jitter < 1:
            raise self.error(f"yolo_data_jitter is {param.yolo_data_jitter:g}; it must be at least 0 and below 1")
        resizes = self.param.transform_param.resize_param
        fits = any(resize.resize_mode == caffe_pb2.ResizeParameter.FIT_SMALL_SIZE for resize in resizes)
        if fits and self.batch_size() != 1:
            raise self.error("resize_mode: FIT_SMALL_SIZE gives images of different sizes; set batch_size: 1")
        return super().open()

    def shapes(self) -> list[tuple[int, ...]]:
        boxes = first_boxes(self._records, self.where)
        self._has_boxes = boxes is not None or self.param.annotated_data_param.HasField("anno_type")
        if self._has_boxes and self._yolo:
            return [self.image_loader(0, 0).sample_shape(), YOLO_SHAPE]
        second = (1, max(boxes or 0, 1), COLUMNS) if self._has_boxes else LABEL_SHAPE
        return [self.image_loader(0, 0).sample_shape(), second]

    def batch_shape(self, index: int, sample_shape: tuple[int, ...]) -> tuple[int, ...]:
        if index == 1 and sample_shape not in (LABEL_SHAPE, YOLO_SHAPE):
            return (1, *sample_shape)
        return super().batch_shape(index, sample_shape)

    @property
    def _yolo(self) -> bool:
        """Whether the second top holds YOLO's rows."""
        return self.param.annotated_data_param.yolo_data_type == 1

    def make_transformer(self) -> DataTransformer:
        param, context = self.param.transform_param, self.context
        return DataTransformer(param, context.phase, context.resolve, self.where, context.nvidia, annotated=True)

    def byte_images(self, count: int) -> ByteImages | None:
        return None

    def image_loader(self, seed: int, stream: int) -> AnnotatedLoader:
        param = self.param.annotated_data_param
        needs_type = self._has_boxes and not param.HasField("anno_type")
        training = self.context.phase == caffe_pb2.TRAIN
        settings = AnnotatedSettings(
            self.param.transform_param,
            list(param.batch_sampler),
            self._has_boxes,
            needs_type,
            yolo=self._yolo,
            difficult=param.train_diffcult,
            jitter=param.yolo_data_jitter if self._yolo or param.HasField("yolo_data_jitter") else 0.0,
            devices=self.context.shard.parts if training else None,
            recompress=param.recompress,
        )
        threads = self.threads(self.param.data_param.threads)
        order = self.record_order(seed, stream)
        return AnnotatedLoader(
            self._records, order, self._transformer, seed, stream, self.where, threads, settings=settings
        )


# -- batches -------------------------------------------------------------------------------------------


_f32 = np.float32
_MAX_PIXELS = 1 << 26
LABEL_SHAPE = (1, 1, 1)
"""Shape of one image's label, for records without boxes."""
YOLO_BOXES = 300
"""Boxes of an image with yolo_data_type 1."""
YOLO_SHAPE = (1, YOLO_BOXES, 5)
"""Shape of one image's boxes with yolo_data_type 1."""
_MAX_TRIALS = 64
"""Trials of a sampler whose random words are computed together; more are rare."""
_RESIZE_BATCHES = 10
"""Batches for which one of several resize_param is used."""


@dataclass(frozen=True)
class AnnotatedSettings:
    """Settings of AnnotatedData in addition to `DataTransformer`'s.

    Args:
        transform: the layer's transform_param.
        samplers: the prototxt's batch_sampler.
        has_boxes: whether the second top holds boxes; else it holds the labels of Datums.
        needs_type: whether each record must have a type of annotation.
        yolo: whether the second top holds YOLO's rows.
        difficult: whether YOLO's rows include boxes marked difficult.
        jitter: part of the sides that a random crop may cut off; 0: no such crop. Samplers replace it.
        devices: devices that divide a batch of the training; None: this is a test.
        recompress: whether encoded images are compressed to JPEG after each change.
    """

    transform: caffe_pb2.TransformationParameter
    samplers: Sequence[caffe_pb2.BatchSampler] = ()
    has_boxes: bool = True
    needs_type: bool = False
    yolo: bool = False
    difficult: bool = True
    jitter: float = 0.0
    devices: int | None = None
    recompress: bool = True


@dataclass(frozen=True)
class Sample:
    """An image with its boxes during augmentation.

    Args:
        image: (C, H, W).
        annotations: its boxes.
        encoded: whether the record holds a compressed image (JPEG, PNG).
        label: the Datum's.
        canvas: a larger canvas on which the image lies and that is not drawn yet; None: there is none.
    """

    image: Image
    annotations: Annotations
    encoded: bool
    label: float = 0.0
    canvas: Canvas | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the canvas, or of the image without one."""
        return (self.canvas.rows, self.canvas.columns) if self.canvas else (self.image.shape[1], self.image.shape[2])


def first_boxes(source: RecordSource, where: str) -> int | None:
    """Return the number of boxes in the first record; None if it has no type of annotation.

    Raises:
        DataError: the record cannot be read.
    """
    try:
        parsed, annotations = parse_annotated_datum(source.read(0))
    except DataError as error:
        raise DataError(f"{where}: {source.description}: {source.record_name(0)} {error}") from error
    return len(annotations) if parsed.HasField("type") else None


class AnnotatedLoader(DatumLoader):
    """Loads AnnotatedDatums.

    Args:
        settings: of the layer.
        args: of `DatumLoader`.
    """

    def __init__(self, *args: Any, settings: AnnotatedSettings) -> None:
        super().__init__(*args)
        self._settings = settings
        self._transformer.center_crops_mean = True
        trials = sum(min(sampler.max_trials, _MAX_TRIALS) for sampler in settings.samplers)
        self._word_blocks = 16 + trials
        """Blocks of random words for the colours and the patch: a trial takes four words."""
        self._resize = 0

    def limited_by_gil(self) -> bool:
        return True

    # -- the first record ----------------------------------------------------------------------------

    def _first_image(self) -> tuple[Image, Shape]:
        try:
            sample = self._sample_of(0)
            sample = replace(sample, image=self._transformer.preprocess(sample.image, self._rng(0), sample.encoded))
            return sample.image, self._transformer.output_shape(sample.image.shape)
        except DataError as error:
            raise self._add_record_name(error, 0) from error

    @cached_property
    def _first_is_encoded(self) -> bool:
        return parse_annotated_datum(self._source.read(0))[0].datum.encoded

    # -- batches -------------------------------------------------------------------------------------

    def load(self, first: int, count: int, batch: Batch) -> None:
        self._set_channels()
        self._resize = self._choose_resize(first, count)
        samples = np.arange(first, first + count, dtype=np.int64)
        crop_params = self._transformer.draw_crops(self._seed, self._stream, samples)
        records = self._order.records_of(samples)
        results: list[Annotations | None] = [None] * count
        labels = np.empty(count, np.float32)
        rngs = [self._rngs_of(samples, stage, blocks) for stage, blocks in ((0, self._word_blocks), (1, 16))]

        def fill(index: int) -> None:
            with without_ipp():
                fill_one(index)

        def fill_one(index: int) -> None:
            number = self._record = int(records[index])
            try:
                sample = self._augmented(number, rngs[0][index])
                start = perf_counter()
                labels[index] = sample.label
                image, height, width = sample.image, *sample.image.shape[1:]
                image = self._transformer.preprocess(image, rngs[1][index], sample.encoded, self._resize)
                sample = replace(sample, image=image)
                self._put(image, index, count, crop_params, batch)
                results[index] = self._transform_boxes(sample, index, crop_params, height, width)
                self.stages.add(TRANSFORMING, start)
            except DataError as error:
                raise self._add_record_name(error, number) from error

        fill(0)  # sets the batch's shape
        self._run(fill, range(1, count))
        if len(batch.arrays) > 1 and self._settings.has_boxes:
            put = self._put_yolo_rows if self._settings.yolo else self._put_boxes
            put([annotations for annotations in results if annotations is not None], batch)
        elif len(batch.arrays) > 1:
            batch.array(1, (count, *LABEL_SHAPE))[...] = labels.reshape(count, *LABEL_SHAPE)
        self._order.prepare_next_epoch()

    def _choose_resize(self, first: int, count: int) -> int:
        """Return the index of the resize_param for the batch of `count` samples from `first` on."""
        resizes, devices = self._settings.transform.resize_param, self._settings.devices
        if len(resizes) < 2 or devices is None:
            return 0
        return choose_resize(resizes, self._rng(first // (count * devices) // _RESIZE_BATCHES, stage=2))

    def _rngs_of(self, samples: NDArray[np.int64], stage: int, blocks: int) -> list[SampleRng]:
        """Return `_rng` of several samples, with the first 4 * `blocks` words of each."""
        seed = self._transformer.seed(self._seed)
        return sample_rngs(seed, self._stream ^ (stage << 31), samples, blocks)

    def _rng(self, sample: int, stage: int = 0) -> SampleRng:
        """Return random numbers: of a sample for colours and patch (stage 0), size and noise (1), of a batch (2)."""
        return SampleRng(self._transformer.seed(self._seed), self._stream ^ (stage << 31), sample)

    def _put_boxes(self, results: list[Annotations], batch: Batch) -> None:
        rows = np.concatenate([annotations.rows(item) for item, annotations in enumerate(results)])
        count = batch.padded_rows(max(len(rows), 1))  # MultiBoxLoss ignores rows of image -1
        top = batch.array(1, (1, 1, count, COLUMNS))[0, 0]
        top[...] = -1
        top[: len(rows)] = rows

    def _put_yolo_rows(self, results: list[Annotations], batch: Batch) -> None:
        top = batch.array(1, (len(results), *YOLO_SHAPE))
        top[...] = 0
        for image, found in zip(top, results, strict=True):
            rows = found.yolo_rows(self._settings.difficult)
            if len(rows) > YOLO_BOXES:
                self._warn_once(f"images with more than {YOLO_BOXES} boxes keep the first {YOLO_BOXES}")
            image[0, : len(rows)] = rows[:YOLO_BOXES]

    # -- one sample ----------------------------------------------------------------------------------

    def _sample_of(self, number: int) -> Sample:
        """Read a record."""
        parsed, annotations = parse_annotated_datum(self._source.read(number))
        if self._settings.needs_type and not parsed.HasField("type"):
            raise DataError(
                "has no type of annotation, but others have; rebuild the database with `caffepy convert_annoset`"
            )
        datum = parsed.datum
        return Sample(self.image_of(datum, datum.data), annotations, datum.encoded, datum.label)

    def _augmented(self, number: int, rng: SampleRng) -> Sample:
        """Read a record, distort its colours, expand it to a larger canvas and crop a patch."""
        sample = self._sample_of(number)
        self._check_channels(sample.image)
        transform = self._settings.transform
        if transform.HasField("distort_param"):
            sample = self._distorted(sample, rng)
        if transform.HasField("expand_param"):
            sample = self._expanded(sample, rng)
        patch = self._patch(sample, rng)
        if patch is not None:
            return self._cropped(sample, clip(patch))
        return sample if sample.canvas is None else replace(sample, image=self._part(sample, 0, 0, *sample.size))

    def _patch(self, sample: Sample, rng: SampleRng) -> Floats | None:
        """Return the part of the image to keep; None: all of it."""
        if self._settings.samplers:
            return sample_patch(self._settings.samplers, sample.annotations.boxes, rng)
        if not self._settings.jitter:
            return None
        resizes = self._settings.transform.resize_param
        mode = resizes[self._resize].resize_mode if resizes else caffe_pb2.ResizeParameter.WARP
        keeps_ratio = mode == caffe_pb2.ResizeParameter.FIT_LARGE_SIZE_AND_PAD
        return jitter_patch(self._settings.jitter, keeps_ratio, rng)

    def _distorted(self, sample: Sample, rng: SampleRng) -> Sample:
        if not sample.encoded:
            self._warn_once("distort_param affects encoded records only, as in Caffe")
            return sample
        image = to_image(distort(to_pixels(sample.image), self._settings.transform.distort_param, rng))
        return self._recompressed(replace(sample, image=image))

    def _recompressed(self, sample: Sample) -> Sample:
        """Compress an encoded record's image to JPEG and decode it, as Caffe does after each change."""
        return replace(sample, image=recompress(sample.image)) if self._recompresses(sample) else sample

    def _recompresses(self, sample: Sample) -> bool:
        return sample.encoded and self._settings.recompress

    def _constraint(self) -> caffe_pb2.EmitConstraint | None:
        transform = self._settings.transform
        return transform.emit_constraint if transform.HasField("emit_constraint") else None

    def _expanded(self, sample: Sample, rng: SampleRng) -> Sample:
        """Place the image at random on a canvas of the mean's colour, up to max_expand_ratio times as large."""
        # `_part` draws the canvas, because a patch may need little of it.
        param = self._settings.transform.expand_param
        if rng.uniform(0, 1) > param.prob or abs(param.max_expand_ratio - 1) < 1e-2:
            return sample
        ratio = _f32(rng.uniform(1, param.max_expand_ratio))
        height, width = sample.size
        rows, columns = int(_f32(height) * ratio), int(_f32(width) * ratio)
        if rows * columns > _MAX_PIXELS:
            raise DataError(
                f"is {height} x {width} and would be expanded to {rows} x {columns}; lower max_expand_ratio"
            )
        top = math.floor(rng.uniform(0, rows - height))
        left = math.floor(rng.uniform(0, columns - width))
        size = np.array([width, height, width, height], np.float32)
        box = np.array([-left, -top, columns - left, rows - top], np.float32) / size
        annotations = crop_annotations(sample.annotations, box, self._constraint())
        return replace(sample, annotations=annotations, canvas=Canvas(rows, columns, top, left))

    def _part(self, sample: Sample, top: int, left: int, rows: int, columns: int) -> Image:
        """Return a part of the image, or of its canvas, which Caffe compresses after the expansion."""
        if sample.canvas is None:
            return sample.image[:, top : top + rows, left : left + columns]
        color = np.clip(np.rint(self._transformer.channel_means(sample.image.shape[0])), 0, 255)
        return canvas_part(sample.image, sample.canvas, color, (top, left, rows, columns), self._recompresses(sample))

    def _cropped(self, sample: Sample, patch: Floats) -> Sample:
        """Crop the image to a patch within it."""
        height, width = sample.size
        corners = patch * np.array([width, height, width, height], np.float32)
        left, top = (min(int(corner), size - 1) for corner, size in zip(corners[:2], (width, height), strict=True))
        columns, rows = (max(int(side), 1) for side in corners[2:] - corners[:2])
        image = self._part(sample, top, left, rows, columns)
        annotations = crop_annotations(sample.annotations, patch, self._constraint())
        return self._recompressed(replace(sample, image=image, annotations=annotations, canvas=None))

    def _transform_boxes(
        self, sample: Sample, index: int, crop_params: CropParams, height: int, width: int
    ) -> Annotations:
        """Return the boxes after resizing, cropping and mirroring of an image of height x width."""
        transform, annotations = self._settings.transform, sample.annotations
        resize = transform.resize_param[self._resize] if transform.resize_param else None
        if resize is not None:
            annotations = resize_annotations(annotations, resize, height, width)
        _, rows, columns = sample.image.shape
        top, left = self._transformer.crop_offset(rows, columns, crop_params, index)
        _, out_rows, out_columns = self._transformer.output_shape(sample.image.shape)
        size = np.array([columns, rows, columns, rows], np.float32)
        crop = np.array([left, top, left + out_columns, top + out_rows], np.float32) / size
        annotations = crop_annotations(annotations, crop, self._constraint())
        if crop_params.mirror[index]:
            annotations = mirror_annotations(annotations)
        if resize is not None:
            annotations = extrapolate_annotations(annotations, resize, height, width, crop)
        return annotations
