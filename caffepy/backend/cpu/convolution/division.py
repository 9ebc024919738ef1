"""How the output of a correlation is cut into items of work, so that all threads have as much to do.

Numbers do not depend on it: a sum is computed by the same tile of the same panel, whatever item they belong to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from caffepy.backend.cpu.gemm.microkernel import ROWS
from caffepy.backend.cpu.gemm.packing import COST, Panels
from caffepy.backend.cpu.jit.vector import WIDTH

BLOCK = 192
"""Output pixels that one item of work covers at most: their part of the image stays in the first or second cache."""
ITEMS_PER_THREAD = 32
"""Items for each thread from which it does not matter that they cannot be shared out evenly."""
FINER = 4
"""Blocks, and parts, for each thread that are looked at beyond the fewest."""
READING = 4
"""Elements of packed weights that are read in the time of a cycle, from a cache that cores share."""


class Division(NamedTuple):
    """Items are (image, group, part of the panels, block of pixels).

    Args:
        block: pixels of a block.
        blocks: how many there are.
        parts: of the panels.
    """

    block: int
    blocks: int
    parts: int


def divide(panels: Panels, pixels: int, threads: int, images: int) -> Division:
    """The division whose longest share is the shortest; `images` counts the groups of all images."""
    fewest = -(-pixels // BLOCK)
    if threads == 1 or images * fewest >= ITEMS_PER_THREAD * threads:
        return Division(BLOCK, fewest, 1)
    return min(_divisions(panels, pixels, threads), key=lambda one: longest_share(one, panels, pixels, threads, images))


def _divisions(panels: Panels, pixels: int, threads: int) -> Iterator[Division]:
    """All that are looked at, those of few items first."""
    unit = math.lcm(*(ROWS[vectors] for vectors in panels.entries[:, 0].tolist()))
    fewest = -(-pixels // BLOCK)
    for parts in range(1, min(panels.count, FINER * threads) + 1):
        for number in range(fewest, fewest + FINER * threads + 1):
            block = -(-pixels // (number * unit)) * unit
            yield Division(block, -(-pixels // block), parts)


def longest_share(division: Division, panels: Panels, pixels: int, threads: int, images: int) -> float:
    """Cycles of the thread that has the most to do."""
    costs = np.tile(_costs(division, panels, pixels).reshape(-1), images)
    size = -(-len(costs) // threads)
    return float(np.add.reduceat(costs, np.arange(0, len(costs), size)).max())


def _costs(division: Division, panels: Panels, pixels: int) -> Any:
    """Cycles of each (part, block): tiles, and the weights that each block reads anew."""
    block, blocks, parts = division
    inside = np.minimum(block, pixels - np.arange(blocks) * block)
    vectors = panels.entries[:, 0]
    rows, cost = (np.array([table[v] for v in vectors.tolist()]) for table in (ROWS, COST))
    cycles = panels.depth * (cost[:, None] * -(-inside[None, :] // rows[:, None]) + vectors[:, None] * WIDTH / READING)
    bounds = np.arange(parts) * panels.count // parts
    return np.add.reduceat(cycles, bounds, axis=0)
