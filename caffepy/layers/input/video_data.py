"""VideoData: frames of a video file or of a camera, read by OpenCV, or the clips of a list."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from caffepy.data import random
from caffepy.data.clips import (
    ClipList,
    ClipLoader,
    ClipReader,
    ClipTransform,
    FrameClips,
    SegmentClips,
    SegmentTransform,
    VideoSource,
    is_of_segments,
)
from caffepy.data.images import Image
from caffepy.data.random import SampleRng
from caffepy.data.sampler import SampleLoader, Sampler
from caffepy.data.transform import DataTransformer
from caffepy.errors import DataError
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.input.prefetching import DescribingLoader, PrefetchingLayer, Source
from caffepy.layers.layer import register_layer


def clip_loader(
    layer: PrefetchingLayer,
    source: ClipList,
    reader: ClipReader,
    transform: ClipTransform,
    shuffle: bool,
    rand_skip: int,
    seed: int,
    stream: int,
) -> ClipLoader:
    """Return a loader of the samples that `reader` makes of a list.

    Raises:
        ConfigError: rand_skip exceeds the list.
    """
    if rand_skip > len(source):
        raise layer.error(f"rand_skip {rand_skip} is more than the {len(source)} lines of {source.description}")
    skip = random.rand_skip_count(seed, stream, rand_skip)
    order = Sampler(len(source), skip, shuffle, seed, stream)
    return ClipLoader(source, order, reader, transform, seed, stream, layer.where)


@register_layer("VideoData")
class VideoDataLayer(PrefetchingLayer):
    """Consecutive frames, and with a second top labels of 0 (NVIDIA Caffe's `video_data_layer.cpp`).

    Tops: (N, C, H, W), (N,).

    With `source` in video_data_param, clips and labels of a list (the `video_data_layer.cpp` of two forks):

    - C3D: (N, 3, new_length, H, W), (N,), or (N, num_of_labels) with `use_multiple_label`. A line is a video, or with
      `use_image` a folder with frames 000001.jpg, …; the first frame (a video's is 0), which a video with
      `use_temporal_jitter` lacks; and the label. With `use_temporal_jitter` and `use_image` the number is that of the
      frames, and the first one is random. `sampling_rate` is the distance between frames.
    - TSN, if one of modality, num_segments, name_pattern, grayscale and encoded is given: (N, C, H, W), (N,), with
      C = 3 new_length num_segments for RGB, 2 new_length num_segments for FLOW. A line is a folder, its number of
      frames, and the label. Frames are consecutive within a segment.

    transform_param gives crop_size, mirror, mean and scale; for TSN also fix_crop, more_fix_crop, multi_scale,
    scale_ratios, max_distort and is_flow. In TRAIN a clip that cannot be read is replaced by the next one.

    Raises:
        ConfigError: `video_file` is missing, several devices read one camera, or a setting of clips is wrong.
        DataError: the video cannot be opened, or has no more frames; the list or, in TEST, a clip cannot be read.
    """

    tops = (1, 2)

    @classmethod
    def told_size(cls, layer: caffe_pb2.LayerParameter, nvidia: bool) -> tuple[int, int, str] | None:
        param = layer.video_data_param
        told = super().told_size(layer, False)  # applies `resize_param` in both dialects
        if told is None and param.new_height and param.new_width:
            return param.new_height, param.new_width, "new_height and new_width"
        return told

    @classmethod
    def told_image(cls, layer: caffe_pb2.LayerParameter, height: int, width: int) -> tuple[int, ...]:
        """Return (C, H, W), with C3D's `source` (3, frames, H, W), with TSN's (channels of all frames, H, W)."""
        param = layer.video_data_param
        if not param.HasField("source"):
            return super().told_image(layer, height, width)
        if not is_of_segments(param):
            return 3, param.new_length, height, width
        colors = 2 if param.modality == param.FLOW else 1 if param.grayscale else 3
        return colors * param.new_length * param.num_segments, height, width

    def batch_size(self) -> int:
        param = self.param.video_data_param
        return param.batch_size if param.HasField("source") else self.param.data_param.batch_size

    def prefetch_depth(self) -> int:
        return self.param.data_param.prefetch

    def open(self) -> tuple[Source, list[tuple[int, ...]]]:
        param, context = self.param.video_data_param, self.context
        if param.HasField("source"):
            return self._open_clips()
        is_file = param.video_type == caffe_pb2.VideoDataParameter.VIDEO
        if is_file and not param.video_file:
            raise self.error("video_type: VIDEO needs video_file")
        if not is_file and context.shard.world_size > 1:
            raise self.error("a camera serves one device; train or test on one, or set video_type: VIDEO")
        self._transformer = DataTransformer(
            self.param.transform_param, context.phase, context.resolve, self.where, context.nvidia, annotated=True
        )
        self._video = VideoSource(context.resolve(param.video_file) if is_file else None, param.device_id)
        try:
            shape = self._loader_of(0, 0).sample_shape()
        except BaseException:
            self._video.close()
            raise
        return self._video, [shape, ()][: len(self.param.top)]

    def _open_clips(self) -> tuple[Source, list[tuple[int, ...]]]:
        param, context = self.param.video_data_param, self.context
        segments = is_of_segments(param)
        make = SegmentTransform if segments else ClipTransform
        self._clips = make(self.param.transform_param, context.phase, context.resolve, self.where)
        reader = SegmentClips if segments else FrameClips
        self._reader: ClipReader = reader(param, self._clips).read
        path = context.resolve(param.source)
        self._list = ClipList(path) if segments else FrameClips.source(path, param)
        return self._list, self._clip_loader(0, 0).first_shapes()[: len(self.param.top)]

    def _clip_loader(self, seed: int, stream: int) -> ClipLoader:
        param = self.param.video_data_param
        return clip_loader(self, self._list, self._reader, self._clips, param.shuffle, param.rand_skip, seed, stream)

    def _loader_of(self, seed: int, stream: int) -> VideoLoader:
        skip = self.param.video_data_param.skip_frames
        return VideoLoader(self._video, self._transformer, skip, seed, stream, self.where)

    def make_loader(self) -> DescribingLoader:
        stream = self.random_stream()
        clips = self.param.video_data_param.HasField("source")
        return (self._clip_loader if clips else self._loader_of)(stream.seed, stream.stream)

    def epoch_size(self) -> int | None:
        if self.param.video_data_param.HasField("source"):
            return super().epoch_size()
        if self.param.video_data_param.video_type != caffe_pb2.VideoDataParameter.VIDEO:
            return None
        return super().epoch_size()


# -- batches -------------------------------------------------------------------------------------------


class VideoLoader(SampleLoader):
    """Fills batches with frames: sample s is frame s * (skip + 1) + skip.

    Args:
        source: the frames.
        transformer: applied to each frame.
        skip: number of frames to skip before each.
        seed: of the solver.
        stream: random stream of the layer.
        where: the layer, for messages.
    """

    def __init__(
        self, source: VideoSource, transformer: DataTransformer, skip: int, seed: int, stream: int, where: str
    ) -> None:
        super().__init__(where, self._transformed, lambda s: f"frame {self._number(s)} of {source.description}")
        self._source = source
        self._transformer = transformer
        self._skip = skip
        self._key = (seed, stream)

    def _number(self, sample: int) -> int:
        return sample * (self._skip + 1) + self._skip

    def _transformed(self, record: int, sample: int) -> list[NDArray[np.float32]]:
        """Return a frame and its label, 0."""
        image = self._frame(sample)
        out = np.empty(self._transformer.output_shape(image.shape), np.float32)
        crop_params = self._transformer.draw_crops(*self._key, np.array([sample], np.int64))
        self._transformer.apply(image, crop_params, 0, out)
        return [out, np.zeros((), np.float32)]

    def _frame(self, sample: int) -> Image:
        if self._source.is_camera:
            for _ in range(self._skip):
                self._source.frame(1)
            image = self._source.frame(1)
        else:
            image = self._source.frame(self._number(sample))
        return self._transformer.preprocess(
            image, SampleRng(self._transformer.seed(self._key[0]), self._key[1], sample)
        )

    def sample_shape(self) -> tuple[int, int, int]:
        """Return the shape of a frame after the transformation."""
        try:
            first = self._transformer.preprocess(self._source.frame(0), SampleRng(*self._key, 0))
            return self._transformer.output_shape(first.shape)
        except DataError as error:
            raise DataError(f"{self.where}: {self._source.description}: frame 0 {error}") from error
