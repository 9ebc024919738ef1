"""Classification of image windows, as in R-CNN (pycaffe's `detector.py`).

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
from caffepy.infer.windows import check_context_pad, crop_mean, crop_window
from caffepy.pycaffe import io
from caffepy.pycaffe.classifier import ImageNet

_SELECTIVE_SEARCH = "selective_search_ijcv_with_python"


class Detector(ImageNet):
    """A net that classifies windows of images, each resized to the net's input.

    Args:
        model_file, pretrained_file, mean, input_scale, raw_scale, channel_swap: as in `ImageNet`.
        context_pad: width in input pixels of the border that shows the window's surroundings, filled with the mean
            outside the image. The input must be square.
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
    ) -> None:
        options = {"mean": mean, "input_scale": input_scale, "raw_scale": raw_scale, "channel_swap": channel_swap}
        super().__init__(model_file, pretrained_file, **options)
        self.configure_crop(context_pad)

    def configure_crop(self, context_pad: int | None) -> None:
        """Set `context_pad`, and `crop_mean`: the border's fill outside the image, in unprocessed values."""
        in_ = self.inputs[0]
        channels, height, width = self.blobs[in_].data.shape[1:]
        self.crop_dims = np.array([height, width, channels])
        self.context_pad = context_pad
        check_context_pad(context_pad, height, width)
        self.crop_mean = crop_mean(self.transformer, in_)

    def detect_windows(
        self, images_windows: Iterable[tuple[str, Sequence[Sequence[int]] | NDArray[Any]]]
    ) -> list[dict[str, Any]]:
        """Classify windows.

        Args:
            images_windows: file names, each with its windows (ymin, xmin, ymax, xmax).

        Returns:
            A dict of `window`, `prediction` and `filename` for each window.
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
        """Classify the windows that selective search proposes. It needs a separate package and MATLAB.

        Raises:
            UserError: the package is not installed.
        """
        try:
            search = importlib.import_module(_SELECTIVE_SEARCH)
        except ImportError as error:
            raise UserError(
                f"selective search needs the package {_SELECTIVE_SEARCH} and MATLAB, which are not installed; "
                "pass windows to detect_windows instead"
            ) from error
        names = [str(Path(name).resolve()) for name in image_fnames]
        windows = search.get_windows(names, cmd="selective_search_rcnn")
        return self.detect_windows(list(zip(names, windows, strict=True)))

    def crop(self, im: NDArray[Any], window: Sequence[int] | NDArray[Any]) -> NDArray[Any]:
        """Return a window (ymin, xmin, ymax, xmax) of an image, with its surroundings if `context_pad` is set.

        Raises:
            UserError: the window and its surroundings are not within the image.
        """
        return crop_window(im, window, self.crop_dims, self.context_pad or 0, self.crop_mean)
