"""Slots of an input ring, full of random images."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from caffepy.backend.types import ImageSlot


def random_slot(slot: ImageSlot, whole: tuple[int, int], mirror: bool, seed: int = 0) -> NDArray[np.uint8]:
    """The memory of a slot of random images.

    Args:
        slot: its layout.
        whole: height and width of the images that the slot's are cut out of.
        mirror: whether some of them are to be mirrored.
        seed: chooses them.
    """
    rng = np.random.default_rng(seed)
    memory = np.zeros(slot.size, np.uint8)
    labels, crops, pixels = slot.parts(memory)
    labels[...] = rng.integers(0, 1000, slot.count)
    crops[:, 0] = rng.integers(0, 2, slot.count) if mirror else 0
    crops[:, 1] = rng.integers(0, whole[0] - slot.height + 1, slot.count)
    crops[:, 2] = rng.integers(0, whole[1] - slot.width + 1, slot.count)
    pixels[...] = rng.integers(0, 256, pixels.shape)
    return memory
