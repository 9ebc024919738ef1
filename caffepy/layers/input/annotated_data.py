"""AnnotatedData: images and the boxes in them from an LMDB, for SSD."""

from __future__ import annotations

from caffepy.backend.input_ring import ByteImages
from caffepy.data.images.annotations import COLUMNS
from caffepy.data.loaders.annotated import LABEL_SHAPE, AnnotatedLoader, AnnotatedSettings, first_boxes
from caffepy.data.transform import Transformer
from caffepy.data.transforms.sampler import check_samplers
from caffepy.layers.core.base import register_layer
from caffepy.layers.input.data import DataLayer
from caffepy.layers.input.prefetching import Source
from caffepy.proto import caffe_pb2


@register_layer("AnnotatedData")
class AnnotatedDataLayer(DataLayer):
    """Images and boxes from a database of AnnotatedDatums (NVIDIA Caffe's `annotated_data_layer.cpp`).

    Tops: (N, C, H, W), and the boxes of all images (1, 1, boxes, 8): index of the image, label, instance, xmin, ymin,
    xmax, ymax in parts of width and height, difficult; one row of -1 if there are none. Records without a type of
    annotation give their labels, (N, 1, 1, 1), instead. On a GPU in training rows of image -1 fill the boxes up to a
    number that seldom changes.
    """

    made_by = "`caffepy convert_annoset` makes LMDBs of images with boxes"

    def open(self) -> tuple[Source, list[tuple[int, ...]]]:
        check_samplers(self.param.annotated_data_param.batch_sampler, self.where)
        resize = self.param.transform_param.resize_param
        if resize.resize_mode == caffe_pb2.ResizeParameter.FIT_SMALL_SIZE and self.batch_size() != 1:
            raise self.error("resize_mode: FIT_SMALL_SIZE gives images of different sizes; set batch_size: 1")
        return super().open()

    def shapes(self) -> list[tuple[int, ...]]:
        boxes = first_boxes(self._records, self.where)
        self._has_boxes = boxes is not None or self.param.annotated_data_param.HasField("anno_type")
        second = (1, max(boxes or 0, 1), COLUMNS) if self._has_boxes else LABEL_SHAPE
        return [self.image_loader(0, 0).sample_shape(), second]

    def batch_shape(self, index: int, sample_shape: tuple[int, ...]) -> tuple[int, ...]:
        if index == 1 and sample_shape != LABEL_SHAPE:
            return (1, *sample_shape)
        return super().batch_shape(index, sample_shape)

    def empty_value(self, index: int) -> float:
        return -1.0 if index == 1 and self._has_boxes else 0.0  # rows of -1: no boxes

    def make_transformer(self) -> Transformer:
        param, context = self.param.transform_param, self.context
        return Transformer(param, context.phase, context.resolve, self.where, context.nvidia, annotated=True)

    def byte_images(self, count: int) -> ByteImages | None:
        return None

    def image_loader(self, seed: int, stream: int) -> AnnotatedLoader:
        param = self.param.annotated_data_param
        fill_up = self.backend.asynchronous and self.context.phase == caffe_pb2.TRAIN
        needs_type = self._has_boxes and not param.HasField("anno_type")
        settings = AnnotatedSettings(
            self.param.transform_param, list(param.batch_sampler), self._has_boxes, needs_type, fill_up
        )
        threads = self.threads(self.param.data_param.threads)
        order = self.record_order(seed, stream)
        return AnnotatedLoader(
            self._records, order, self._transformer, seed, stream, self.where, threads, settings=settings
        )
