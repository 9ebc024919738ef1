"""Windows of images classified by a net, as R-CNN does it (pycaffe's `detector.py`).

Rich feature hierarchies for accurate object detection and semantic segmentation, arXiv:1311.2524.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.errors import UserError
from caffepy.proto.caffe_pb2 import TEST
from caffepy.pycaffe import io
from caffepy.pycaffe.classifier import configured_transformer
from caffepy.pycaffe.net import Net

_SELECTIVE_SEARCH = "selective_search_ijcv_with_python"


class Detector(Net):
    """A net that classifies windows of images, each resized to its input.

    Args:
        model_file: the deploy prototxt.
        pretrained_file: the weights; None: as the fillers make them.
        mean: as `io.Transformer.set_mean`.
        input_scale: as `io.Transformer.set_input_scale`.
        raw_scale: as `io.Transformer.set_raw_scale`.
        channel_swap: as `io.Transformer.set_channel_swap`.
        context_pad: width in pixels of the input's border that shows what surrounds the window; the mean where the
            image ends. The input must be square.
    """

    def __init__(
        self,
        model_file: str | Path,
        pretrained_file: str | Path | None,
        mean: NDArray[Any] | None = None,
        input_scale: float | None = None,
        raw_scale: float | None = None,
        channel_swap: Sequence[int] | None = None,
        context_pad: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model_file, TEST, weights=pretrained_file)
        in_ = self.inputs[0]
        options = {"mean": mean, "input_scale": input_scale, "raw_scale": raw_scale, "channel_swap": channel_swap}
        self.transformer = configured_transformer(in_, self.blobs[in_].data.shape, options)
        self.configure_crop(context_pad)

    def configure_crop(self, context_pad: int | None) -> None:
        """Set the border, and what fills it beyond the image: `crop_mean`, in the values of unprocessed images."""
        in_ = self.inputs[0]
        channels, height, width = self.blobs[in_].data.shape[1:]
        self.crop_dims = np.array([height, width, channels])
        self.context_pad = context_pad
        if context_pad and (height != width or 2 * context_pad >= width):
            raise io.ArrayError(f"context_pad {context_pad} does not fit a square input; it is {height} x {width}")
        mean = self.transformer.mean.get(in_)
        if mean is None:
            self.crop_mean = np.zeros(self.crop_dims, dtype=np.float32)
            return
        image = mean.astype(np.float32)
        if in_ in self.transformer.channel_swap:
            image = image[np.argsort(self.transformer.channel_swap[in_])]
        self.crop_mean = image.transpose(1, 2, 0) / np.float32(self.transformer.raw_scale.get(in_, 1.0))

    def detect_windows(
        self, images_windows: Iterable[tuple[str, Sequence[Sequence[int]] | NDArray[Any]]]
    ) -> list[dict[str, Any]]:
        """What the net says of windows.

        Args:
            images_windows: a file's name and its windows, each ymin, xmin, ymax, xmax.

        Returns:
            For each window a dict of `window`, `prediction` and `filename`.
        """
        named = [(name, window) for name, windows in images_windows for window in windows]
        if not named:
            return []
        in_ = self.inputs[0]
        images: dict[str, NDArray[np.float32]] = {}
        inputs = []
        for name, window in named:
            if name not in images:
                images = {name: io.load_image(name)}
            inputs.append(self.transformer.preprocess(in_, self.crop(images[name], window)))
        batch: dict[str, Any] = {in_: np.stack(inputs)}
        predictions = self.forward_all(**batch)[self.outputs[0]]
        return [
            {"window": window, "prediction": prediction, "filename": name}
            for (name, window), prediction in zip(named, predictions, strict=True)
        ]

    def detect_selective_search(self, image_fnames: Iterable[str]) -> list[dict[str, Any]]:
        """`detect_windows` of the windows that selective search proposes, by a package of its own for MATLAB.

        Raises:
            UserError: the package is not installed.
        """
        try:
            search = importlib.import_module(_SELECTIVE_SEARCH)
        except ImportError as error:
            raise UserError(
                f"selective search needs the package {_SELECTIVE_SEARCH} and MATLAB, which are not here: "
                "give the windows yourself, to detect_windows"
            ) from error
        names = [str(Path(name).resolve()) for name in image_fnames]
        windows = search.get_windows(names, cmd="selective_search_rcnn")
        return self.detect_windows(list(zip(names, windows, strict=True)))

    def crop(self, im: NDArray[Any], window: Sequence[int] | NDArray[Any]) -> NDArray[Any]:
        """A window (ymin, xmin, ymax, xmax) of an image, with its surroundings where there is a `context_pad`.

        Raises:
            UserError: the window and its surroundings are not within the image.
        """
        top, left, bottom, right = (int(number) for number in window)
        crop = self._crop_with_context(im, np.array([top, left, bottom, right])) if self.context_pad else (
            im[top:bottom, left:right]
        )  # fmt: skip
        if crop.size == 0:
            raise io.ArrayError(f"the window {list(window)} is empty in an image of {im.shape[0]} x {im.shape[1]}")
        return crop

    def _crop_with_context(self, im: NDArray[Any], window: NDArray[Any]) -> NDArray[Any]:
        """The window and what surrounds it at the input's size; the mean where the image ends."""
        assert self.context_pad is not None
        size = int(self.crop_dims[0])
        half = (window[2:] - window[:2] + 1) / 2
        reach = half * size / (size - 2 * self.context_pad)
        centre = window[:2] + half
        begin, end = np.round(centre - reach), np.round(centre + reach)
        scale = size / (end - begin + 1)
        pad = np.round(np.maximum(0, -begin) * scale).astype(int)
        begin, end = (np.clip(corner, 0, im.shape[:2]).astype(int) for corner in (begin, end))
        if np.any(end <= begin):
            return im[:0]
        room = np.minimum(np.round((end - begin + 1) * scale).astype(int), size - pad)
        inside = io.resize_image(im[begin[0] : end[0], begin[1] : end[1]], np.maximum(room, 1))
        crop = np.ones(self.crop_dims, dtype=np.float32) * self.crop_mean
        crop[pad[0] : pad[0] + room[0], pad[1] : pad[1] + room[1]] = inside[: room[0], : room[1]]
        return crop
