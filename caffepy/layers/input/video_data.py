"""VideoData: frames of a video file or of a camera."""

from __future__ import annotations

from caffepy.data.loaders.video import VideoLoader
from caffepy.data.sources.video import VideoSource
from caffepy.data.transform import Transformer
from caffepy.layers.core.base import register_layer
from caffepy.layers.input.prefetching import DescribingLoader, PrefetchingLayer, Source
from caffepy.proto import caffe_pb2


@register_layer("VideoData")
class VideoDataLayer(PrefetchingLayer):
    """Frames in their order, and labels of 0 if there is a second top (NVIDIA Caffe's `video_data_layer.cpp`).

    Tops: (N, C, H, W), (N,). When a file has no more frames the run ends with an error that says so.
    """

    tops = (1, 2)

    def batch_size(self) -> int:
        return self.param.data_param.batch_size

    def prefetch_depth(self) -> int:
        return self.param.data_param.prefetch

    def open(self) -> tuple[Source, list[tuple[int, ...]]]:
        param, context = self.param.video_data_param, self.context
        self._where = f"layer '{self.name}' ({self.type})"
        is_file = param.video_type == caffe_pb2.VideoDataParameter.VIDEO
        if is_file and not param.video_file:
            raise self.error("video_type: VIDEO needs video_file")
        if not is_file and context.shard.world_size > 1:
            raise self.error("a camera serves one device; train or test on one, or set video_type: VIDEO")
        self._transformer = Transformer(
            self.param.transform_param, context.phase, context.resolve, self._where, context.nvidia, annotated=True
        )
        self._video = VideoSource(context.resolve(param.video_file) if is_file else None, param.device_id)
        try:
            shape = self._loader_of(0, 0).sample_shape()
        except BaseException:
            self._video.close()
            raise
        return self._video, [shape, ()][: len(self.param.top)]

    def _loader_of(self, seed: int, stream: int) -> VideoLoader:
        skip = self.param.video_data_param.skip_frames
        return VideoLoader(self._video, self._transformer, skip, seed, stream, self._where)

    def make_loader(self) -> DescribingLoader:
        stream = self.random_stream()
        return self._loader_of(stream.seed, stream.stream)

    def epoch_size(self) -> int | None:
        if self.param.video_data_param.video_type != caffe_pb2.VideoDataParameter.VIDEO:
            return None
        return super().epoch_size()
