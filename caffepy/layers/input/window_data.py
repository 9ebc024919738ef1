"""WindowData: windows of images, for R-CNN."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from caffepy.data.images.mean import read_mean
from caffepy.data.loaders.windows import WindowLoader, WindowSettings, window_mean
from caffepy.data.sources.windows import WindowSource
from caffepy.data.transform import check_transform
from caffepy.layers.core.base import register_layer
from caffepy.layers.input.prefetching import DescribingLoader, PrefetchingLayer, Source


@register_layer("WindowData")
class WindowDataLayer(PrefetchingLayer):
    """Random windows of images, fg_fraction of each batch foreground (Caffe's `window_data_layer.cpp`).

    Of every batch_size samples in a row the first are background and the last foreground. Tops: (N, 3, crop_size,
    crop_size), (N,).
    """

    tops = (2, 2)

    def batch_size(self) -> int:
        return self.param.window_data_param.batch_size

    def open(self) -> tuple[Source, list[tuple[int, ...]]]:
        param, where = self.param.window_data_param, f"layer '{self.name}' ({self.type})"
        check_transform(self.param.transform_param, where)
        self._settings = self._read_settings()
        self._windows = WindowSource(
            self.context.resolve(param.source), param.root_folder, (param.fg_threshold, param.bg_threshold),
            param.cache_images,
        )  # fmt: skip
        if self._windows.channels != 3:
            raise self.error(f"its images have {self._windows.channels} channels, but they are read in color, with 3")
        return self._windows, [(3, self._settings.crop, self._settings.crop), ()]

    def _read_settings(self) -> WindowSettings:
        param, transform = self.param.window_data_param, self.param.transform_param
        if param.crop_mode not in ("warp", "square"):
            raise self.error(f"crop_mode is '{param.crop_mode}'; give warp or square")
        crop = transform.crop_size or param.crop_size
        if crop <= 2 * param.context_pad:
            raise self.error(
                f"transform_param.crop_size {crop} must be more than twice context_pad {param.context_pad}"
            )
        if not 0 <= param.fg_fraction <= 1:
            raise self.error(f"fg_fraction is {param.fg_fraction:g}; give a part of the batch, from 0 to 1")
        return WindowSettings(
            param.batch_size, param.fg_fraction, crop, param.context_pad, param.crop_mode == "square",
            transform.mirror or param.mirror, self._read_mean(crop), param.scale * transform.scale, self.context.nvidia,
        )  # fmt: skip

    def _read_mean(self, crop: int) -> NDArray[np.float32]:
        transform = self.param.transform_param
        if mean_file := transform.mean_file or self.param.window_data_param.mean_file:
            return window_mean(read_mean(self.context.resolve(mean_file)), crop)
        if len(transform.mean_value) not in (0, 1, 3):
            raise self.error(f"transform_param has {len(transform.mean_value)} mean_value; give 1 or 3")
        return np.array(list(transform.mean_value) or [0], np.float32).reshape(-1, 1, 1)

    def make_loader(self) -> DescribingLoader:
        stream, own = self.random_stream(), self.param.transform_param.random_seed
        seed = stream.seed if own < 0 else own
        where, threads = f"layer '{self.name}' ({self.type})", self.threads(0)
        return WindowLoader(self._windows, self._settings, seed, stream.stream, where, threads)
