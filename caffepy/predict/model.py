"""A deploy net with its weights, run on batches of images."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from caffepy.errors import ConfigError
from caffepy.inference.loading import load

logger = logging.getLogger(__name__)

Floats = NDArray[np.float32]


class Model:
    """A net that takes images (N, C, H, W) as its only input; used in a `with` block, which frees the device.

    Args:
        net: the deploy net's prototxt.
        weights: .caffemodel files, the later ones over the earlier; none: as the fillers make them, with a warning.
        device: number of a GPU, or None for the CPU.
        threads: CPU threads; None: all.
        engine: "own" (None) or "onnxruntime".

    Raises:
        ConfigError: the net takes no images, or something else besides; the engine is unknown.
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
            logger.warning(
                "%s: no weights are given, so that those of its fillers, mostly random, are used; give --weights", net
            )
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
        """C, H and W of the input."""

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
        """The types of the net's layers."""
        return {layer.type for layer in self.net.layers}

    def run(self, images: Floats) -> Floats:
        """The net's first output for a batch (N, C, H, W)."""
        return np.asarray(self._model(images)[self._model.outputs[0]], np.float32)
