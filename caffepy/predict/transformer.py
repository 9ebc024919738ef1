"""From images to a net's input (the Transformer of pycaffe's `io.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.errors import UserError
from caffepy.predict.pixels import ArrayError, Floats, resize_image


class Transformer:
    """Brings images into the form that a net's input has, and back.

    Args:
        inputs: the shape (N, K, H, W) of each input by its name.
    """

    def __init__(self, inputs: Mapping[str, Sequence[int]]) -> None:
        self.inputs = {name: tuple(shape) for name, shape in inputs.items()}
        self.transpose: dict[str, Sequence[int]] = {}
        self.channel_swap: dict[str, Sequence[int]] = {}
        self.raw_scale: dict[str, float] = {}
        self.mean: dict[str, Floats] = {}
        self.input_scale: dict[str, float] = {}

    def _check_input(self, in_: str) -> None:
        if in_ not in self.inputs:
            raise UserError(f"{in_} is not one of the net inputs: {self.inputs}")

    def preprocess(self, in_: str, data: Floats) -> NDArray[np.float32]:
        """An image (H', W', K) as the input `in_` takes it, (K, H, W); `data` stays as it is.

        In this order: float32, resized, transposed, channels swapped, times raw_scale, minus mean, times input_scale.
        """
        self._check_input(in_)
        image = data.astype(np.float32, copy=False)
        size = self.inputs[in_][2:]
        if image.shape[:2] != size:
            image = resize_image(image, size)
        if in_ in self.transpose:
            image = image.transpose(self.transpose[in_])
        if in_ in self.channel_swap:
            image = image[list(self.channel_swap[in_])]
        if np.may_share_memory(image, data):
            image = image.copy()
        if in_ in self.raw_scale:
            image *= self.raw_scale[in_]
        if in_ in self.mean:
            image -= self.mean[in_]
        if in_ in self.input_scale:
            image *= self.input_scale[in_]
        return image

    def deprocess(self, in_: str, data: Floats) -> Floats:
        """The image out of an input (K, H, W): `preprocess` backwards, without the change of size."""
        self._check_input(in_)
        image: Floats = data.copy().squeeze()
        if image.ndim < 3 <= data.ndim and (in_ in self.transpose or in_ in self.mean):
            image = image.reshape(data.shape[-3:])
        if in_ in self.input_scale:
            image /= self.input_scale[in_]
        if in_ in self.mean:
            image += self.mean[in_]
        if in_ in self.raw_scale:
            image /= self.raw_scale[in_]
        if in_ in self.channel_swap:
            image = image[np.argsort(self.channel_swap[in_])]
        if in_ in self.transpose:
            image = image.transpose(np.argsort(self.transpose[in_]))
        return image

    def set_transpose(self, in_: str, order: Sequence[int]) -> None:
        """The order of dimensions; (2, 0, 1) makes (H, W, K) to (K, H, W)."""
        self._check_input(in_)
        if len(order) != len(self.inputs[in_]) - 1:
            raise UserError(
                "Transpose order needs to have the same number of dimensions as the input: "
                f"'{in_}' has {len(self.inputs[in_]) - 1}, the order {tuple(order)} has {len(order)}"
            )
        self.transpose[in_] = order

    def set_channel_swap(self, in_: str, order: Sequence[int]) -> None:
        """The order of channels, which are the first dimension after `set_transpose`; (2, 1, 0) makes RGB to BGR."""
        self._check_input(in_)
        if len(order) != self.inputs[in_][1]:
            raise UserError(
                "Channel swap needs to have the same number of dimensions as the input channels: "
                f"'{in_}' has {self.inputs[in_][1]}, the order {tuple(order)} has {len(order)}"
            )
        self.channel_swap[in_] = order

    def set_raw_scale(self, in_: str, scale: float) -> None:
        """The factor before the mean is subtracted; 255 for nets that were trained with bytes."""
        self._check_input(in_)
        self.raw_scale[in_] = scale

    def set_mean(self, in_: str, mean: Floats) -> None:
        """What is subtracted: a number a channel (K,), or an image (K, H, W) or (H, W), resized if need be.

        Raises:
            ArrayError: it has another number of channels or of dimensions.
        """
        self._check_input(in_)
        channels, *size = self.inputs[in_][1:]
        if mean.ndim == 1:
            if mean.shape[0] != channels:
                raise ArrayError(
                    f"Mean channels incompatible with input. The mean has {mean.shape[0]}, '{in_}' has {channels}"
                )
            mean = mean[:, np.newaxis, np.newaxis]
        else:
            mean = self._mean_image(mean, channels, size)
        self.mean[in_] = mean

    def _mean_image(self, mean: Floats, channels: int, size: Sequence[int]) -> Floats:
        if mean.ndim == 2:
            mean = mean[np.newaxis]
        if mean.ndim != 3 or mean.shape[0] not in (1, channels):
            raise ArrayError(
                f"Mean shape invalid: {mean.shape}; for {channels} channels it is (K,), (H, W) or (K, H, W)"
            )
        if mean.shape[1:] == tuple(size):
            return mean
        resized: Floats = resize_image(mean.transpose(1, 2, 0), size).transpose(2, 0, 1)
        return resized

    def set_input_scale(self, in_: str, scale: float) -> None:
        """The factor after the mean is subtracted."""
        self._check_input(in_)
        self.input_scale[in_] = scale


def configured_transformer(in_: str, shape: Sequence[int], options: Mapping[str, Any]) -> Transformer:
    """A Transformer of one input for images (H, W, C), as Caffe's Classifier and Detector configure it.

    Args:
        in_: the input's name.
        shape: its shape.
        options: `mean`, `input_scale`, `raw_scale` and `channel_swap`; None: not used.
    """
    transformer = Transformer({in_: shape})
    transformer.set_transpose(in_, (2, 0, 1))
    for name, value in options.items():
        if value is not None:
            getattr(transformer, f"set_{name}")(in_, value)
    return transformer
