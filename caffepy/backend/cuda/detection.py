"""SSD's loss on the GPU: launches kernels/box_loss.cu.

Keeps each prior's matched object and target class from the forward pass for the backward pass. Other temporaries are in
workspaces.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from caffepy.backend.cuda.compiler import argument, defines, launch, library_kernel
from caffepy.backend.cuda.memory import CudaMemory, Scratch, allocate, copy, in_c_order
from caffepy.backend.interface import DetectionPrimitives
from caffepy.backend.types import Array, BoxLoss, BoxLossSettings

THREADS = 512
"""Threads of the block that matches or mines the priors of one image."""
WARP = 32
COLUMNS = 8
"""Values of an object's row."""


@cache
def _defines(settings: BoxLossSettings) -> str:
    numbers = {
        "CLASSES": settings.classes,
        "BACKGROUND": settings.background,
        "FREE_LABEL": settings.classes if settings.logistic else settings.background,
        "CODE": settings.code,
        "DIFFICULT": settings.difficult,
        "AGNOSTIC": settings.agnostic,
        "PER_PREDICTION": settings.per_prediction,
        "IGNORE_CROSSING": settings.ignore_crossing,
        "MINES": settings.mines,
        "LOGISTIC": settings.logistic,
        "SQUARED": settings.squared,
        "VARIANCE_IN_TARGET": settings.variance_in_target,
        "INSIDE": settings.inside,
        "BOXES_COUNT": settings.boxes_count,
        "SCORES_COUNT": settings.scores_count,
    }
    fractions = {
        "THRESHOLD": settings.threshold,
        "MAX_OVERLAP": settings.most_overlap,
        "RATIO": settings.ratio,
        "WEIGHT": settings.weight,
    }
    texts = {key: f"{float(np.float32(value))!r}f" for key, value in fractions.items()}
    return defines(**{key: int(value) for key, value in numbers.items()}, **texts)


class CudaBoxLoss:
    """See `BoxLoss`.

    Args:
        settings: options of the loss.
        images: batch size.
        priors: priors per image.
        scratch: temporaries of one pass.
    """

    def __init__(self, settings: BoxLossSettings, images: int, priors: int, scratch: Scratch) -> None:
        self._settings, self._images, self._priors, self._scratch = settings, images, priors, scratch
        self._matches = allocate((images * priors,), "int32")
        self._labels = allocate((images * priors,), "int32")

    def forward(
        self, locations: Array, scores: Array, priors: Array, objects: Array, totals: Array, problem: Array
    ) -> None:
        """See `BoxLoss.forward`."""
        locations, scores, priors, objects = self._in_order(locations, scores, priors, objects)
        images, count, rows = self._images, self._priors, objects.size // COLUMNS
        every, get = images * count, self._scratch.get
        overlaps, nearest, losses = get("overlaps", every), get("nearest", every, "int32"), get("box losses", every)
        listed, best = get("objects", images * rows, "int32"), get("best priors", images * rows, "uint64")
        found, sums = get("found objects", 2 * images, "int32"), get("image losses", 3 * images, "float64")
        self._launch("check", 1, priors, objects, problem, images, count, rows)
        matching = (overlaps, self._labels, nearest, listed, best, found, count, rows)
        self._launch("match", images, priors, objects, self._matches, *matching)
        launch(self._kernel("of_scores"), every * WARP, (scores, self._labels, losses, every))
        mined = (self._matches, overlaps, losses, self._labels, found, sums, count)
        self._launch("mine", images, locations, priors, objects, *mined)
        self._launch("total", 1, sums, totals, images)

    def boxes_gradient(self, locations: Array, priors: Array, objects: Array, gradient: Array) -> None:
        """See `BoxLoss.boxes_gradient`."""
        locations, priors, objects = self._in_order(locations, priors, objects)
        result, every = self._result(gradient), self._images * self._priors
        arguments = (locations, priors, objects, self._matches, result, self._priors, every)
        launch(self._kernel("boxes_gradient"), every, arguments)
        if result is not gradient:
            copy(result, gradient)

    def scores_gradient(self, scores: Array, gradient: Array) -> None:
        """See `BoxLoss.scores_gradient`."""
        (scores,) = self._in_order(scores)
        result, every = self._result(gradient), self._images * self._priors
        launch(self._kernel("scores_gradient"), every * WARP, (scores, self._labels, result, every))
        if result is not gradient:
            copy(result, gradient)

    def _kernel(self, name: str) -> Any:
        return library_kernel("box_loss", f"box_loss_{name}", _defines(self._settings))

    def _launch(self, name: str, blocks: int, *arguments: Any) -> None:
        self._kernel(name)((blocks,), (THREADS,), tuple(map(argument, arguments)))

    def _in_order(self, *arrays: Array) -> list[Array]:
        return [in_c_order(array, self._scratch, f"boxes {number}") for number, array in enumerate(arrays)]

    def _result(self, gradient: Array) -> Array:
        """Return the array that a kernel writes `gradient` to."""
        if gradient.flags.c_contiguous:
            return gradient
        return self._scratch.get("boxes result", gradient.size).reshape(gradient.shape)


class CudaDetection(DetectionPrimitives, CudaMemory):
    """`DetectionPrimitives` of the GPU."""

    computes_box_loss = True

    def box_loss(self, settings: BoxLossSettings, images: int, priors: int) -> BoxLoss:
        with self._on_stream():
            return CudaBoxLoss(settings, images, priors, self._scratch)
