"""A trained deploy net for images, and image classification (`caffe.Classifier`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from caffepy.errors import ConfigError, DataError
from caffepy.infer.images import Floats, InputImage, Steps
from caffepy.infer.model import load
from caffepy.utils.options import MATH

logger = logging.getLogger(__name__)
_BATCH = 16
"""Crops per batch."""


class ImageModel:
    """A net with images (N, C, H, W) as its only input. Use in a `with` block, which frees the device.

    Args:
        net: the deploy net's prototxt.
        weights: .caffemodel files; later files override earlier ones. Without files, fillers apply, with a warning.
        device: GPU index, or None for the CPU.
        threads: CPU threads; None: all.
        math: "tf32" or "fp32", as `caffepy.load` takes it.
        engine: "own" (also None) or "onnxruntime".

    Raises:
        ConfigError: images are not the net's only input, or the engine is unknown.
        MissingExtraError: the engine is not installed.
        SnapshotError: weights do not fit.
    """

    def __init__(
        self,
        net: Path,
        weights: Sequence[Path] = (),
        device: int | None = None,
        threads: int | None = None,
        math: str = MATH,
        engine: str | None = None,
    ) -> None:
        self.model = load(net, weights, device, threads=threads, math=math, engine=engine)
        if not weights and self.model.net.parameters.parameters:
            logger.warning("%s: no weights are given; the parameters are filled, mostly at random; give --weights", net)
        inputs = self.model.inputs
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

    def __enter__(self) -> ImageModel:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        self.model.close()
        self.model.backend.close()

    def run(self, images: Floats) -> Floats:
        """Return the net's first output for a batch (N, C, H, W)."""
        return np.asarray(self.model(images)[self.model.outputs[0]], np.float32)


def classify(
    model: ImageModel,
    images: Sequence[InputImage],
    steps: Steps,
    leave_out: Callable[[InputImage, DataError], None] | None = None,
) -> Floats:
    """Return the net's first output for each image: (N, classes), averaged over its crops.

    Args:
        model: the net.
        images: the images; at most one batch is held in memory.
        steps: from an image to the net's input.
        leave_out: called with an image that cannot be read, which has no row then; None: the error is raised.

    Raises:
        DataError: an image cannot be read.
    """
    results: list[Floats] = []
    pending: list[Floats] = []
    for image in images:
        try:
            values = steps.values(steps.load(image))
        except DataError as error:
            if leave_out is None:
                raise
            leave_out(image, error)
            continue
        if pending and (values.shape[1:] != pending[0].shape[1:] or (len(pending) + 1) * len(values) > _BATCH):
            results += _scores(model, pending)
            pending = []
        pending.append(values)
    results += _scores(model, pending) if pending else []
    return np.stack(results) if results else np.zeros((0, 0), np.float32)


def _scores(model: ImageModel, values: list[Floats]) -> list[Floats]:
    """Return the first output for each image, averaged over its crops, of one batch."""
    batch = np.concatenate(values)
    scores = model.run(batch)
    if scores.ndim == 0 or len(scores) != len(batch):
        raise ConfigError(
            f"the net's output is {' x '.join(map(str, scores.shape)) or 'one number'} for {len(batch)} images, not a "
            "row of scores for each; 'caffepy detect' takes nets that find boxes"
        )
    scores = scores.reshape(len(values), len(values[0]), -1)
    return list(scores.mean(1))
