"""The probabilities of an image's classes, as `caffe.Classifier` computes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from caffepy.errors import ConfigError
from caffepy.predict.images import INPUT, Floats, Preparation
from caffepy.predict.model import Model
from caffepy.predict.pixels import crop_centres, oversample, resize_image


def classify(
    model: Model, images: Sequence[Floats], preparation: Preparation, size: tuple[int, int] | None, centre_only: bool
) -> Floats:
    """The net's first output for each image: (N, classes).

    Args:
        model: the net.
        images: (H, W, C), from 0 to 1.
        preparation: of the values.
        size: height and width to which images are resized before they are cropped; None: those of the input.
        centre_only: take the crop in the middle; else the average of the corners, the middle and their mirrors.

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
