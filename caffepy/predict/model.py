"""A trained deploy net for images, and image classification (`caffe.Classifier`)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

from caffepy.errors import ConfigError
from caffepy.inference import load
from caffepy.predict.images import INPUT, Floats, Preparation
from caffepy.predict.pixels import crop_centres, oversample, resize_image

logger = logging.getLogger(__name__)


class Model:
    """A net with images (N, C, H, W) as its only input. Use in a `with` block, which frees the device.

    Args:
        net: the deploy net's prototxt.
        weights: .caffemodel files; later files override earlier ones. Without files, fillers apply, with a warning.
        device: GPU index, or None for the CPU.
        threads: CPU threads; None: all.
        engine: "own" (also None) or "onnxruntime".

    Raises:
        ConfigError: images are not the net's only input, or the engine is unknown.
        MissingExtraError: the engine is not installed.
        SnapshotError: weights do not fit.
    """

    def __init__(
        self, net: Path, weights: Sequence[Path] = (), device: int | None = None, threads: int | None = None,
        engine: str | None = None,
    ) -> None:  # fmt: skip
        self._model = load(net, weights, device, threads=threads, math="fp32", engine=engine)
        self.net = self._model.net
        if not weights and self.net.parameters.parameters:
            logger.warning("%s: no weights are given; the parameters are filled, mostly at random; give --weights", net)
        inputs = self._model.inputs
        shapes = list(inputs.values())
        if len(shapes) != 1 or len(shapes[0]) != 4:
            self._close()
            raise ConfigError(
                f"{net}: its inputs are {', '.join(inputs)}; a net for images has one Input of the shape N, C, H, W "
                "('caffepy deploy' makes one of a training net)"
            )
        _, channels, height, width = shapes[0]
        self.image_shape = (channels, height, width)
        """Shape (C, H, W) of the input."""

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        self._model.close()
        self._model.backend.close()

    @property
    def layer_types(self) -> set[str]:
        """The net's layer types."""
        return {layer.type for layer in self.net.layers}

    def run(self, images: Floats) -> Floats:
        """Return the net's first output for a batch (N, C, H, W)."""
        return np.asarray(self._model(images)[self._model.outputs[0]], np.float32)


def classify(
    model: Model, images: Sequence[Floats], preparation: Preparation, size: tuple[int, int] | None, centre_only: bool
) -> Floats:
    """Return the net's first output for each image: (N, classes).

    Args:
        model: the net.
        images: arrays (H, W, C) from 0 to 1.
        preparation: preprocessing of the values.
        size: height and width of images before cropping; None: the input's.
        centre_only: use the centre crop; else average over corners, centre and their mirror images.

    Raises:
        ConfigError: the input is larger than `size`, or the preparation does not fit.
    """
    _, height, width = model.image_shape
    size = size or (height, width)
    if height > size[0] or width > size[1]:
        raise ConfigError(
            f"images are resized to {size[0]} x {size[1]}, and the net takes {height} x {width}: give a larger "
            f"--images-dim, such as {height},{width}"
        )
    transformer = preparation.transformer((1, *model.image_shape))
    cut = crop_centres if centre_only else oversample
    results = []
    for image in images:
        crops = cut([resize_image(image, size)], (height, width))
        scores = model.run(np.stack([transformer.preprocess(INPUT, crop) for crop in crops]))
        results.append(scores.reshape(len(scores), -1).mean(0))
    return np.stack(results)
