"""Image classification by a net (pycaffe's `classifier.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.formats.proto.caffe_pb2 import TEST
from caffepy.infer.images import ArrayError, configured_transformer, crop_centres, resize_image
from caffepy.infer.images import oversample as ten_crops
from caffepy.pycaffe.net import Net


class ImageNet(Net):
    """A net of images (H, W, K), the base of Classifier and Detector.

    Args:
        model_file: the deploy prototxt.
        pretrained_file: the weights; None: filled parameters.
        mean: as `io.Transformer.set_mean`.
        input_scale: as `io.Transformer.set_input_scale`.
        raw_scale: as `io.Transformer.set_raw_scale`.
        channel_swap: as `io.Transformer.set_channel_swap`.
    """

    def __init__(self, model_file: str | Path, pretrained_file: str | Path | None, **options: Any) -> None:
        super().__init__(model_file, TEST, weights=pretrained_file)
        self.transformer = configured_transformer(self.inputs[0], self.blobs[self.inputs[0]].data.shape, options)


class Classifier(ImageNet):
    """A net that classifies images by the centre crop or by the average over ten crops.

    Args:
        image_dims: height and width of images before cropping; None: the net's input size.
        model_file, pretrained_file, mean, input_scale, raw_scale, channel_swap: as in `ImageNet`.
    """

    def __init__(
        self,
        model_file: str | Path,
        pretrained_file: str | Path | None,
        image_dims: Sequence[int] | None = None,
        mean: NDArray[Any] | None = None,
        input_scale: float | None = None,
        raw_scale: float | None = None,
        channel_swap: Sequence[int] | None = None,
    ) -> None:
        options = {"mean": mean, "input_scale": input_scale, "raw_scale": raw_scale, "channel_swap": channel_swap}
        super().__init__(model_file, pretrained_file, **options)
        self.crop_dims = np.array(self.blobs[self.inputs[0]].data.shape[2:])
        self.image_dims: Sequence[int] = self.crop_dims.tolist() if image_dims is None else image_dims

    def predict(self, inputs: Sequence[NDArray[Any]], oversample: bool = True) -> NDArray[Any]:
        """Return the class probabilities of each image.

        Args:
            inputs: images (H, W, K), from 0 to 1.
            oversample: average over the crops of corners and centre and their mirror images; else use the centre crop.

        Returns:
            (N, classes), one row per image.

        Raises:
            UserError: the net's input is larger than `image_dims`.
            ArrayError: an image does not have three dimensions, or has too few channels.
        """
        for image in inputs:
            if np.ndim(image) != 3:
                raise ArrayError(f"an image has the shape {np.shape(image)}; images are (H, W, K), gray ones (H, W, 1)")
        resized = np.stack([resize_image(image, self.image_dims) for image in inputs])
        crops = (ten_crops if oversample else crop_centres)(resized, self.crop_dims)
        in_ = self.inputs[0]
        batch: dict[str, Any] = {in_: np.stack([self.transformer.preprocess(in_, crop) for crop in crops])}
        predictions = self.forward_all(**batch)[self.outputs[0]]
        if oversample:
            predictions = predictions.reshape(len(predictions) // 10, 10, -1).mean(1)
        return np.asarray(predictions)
