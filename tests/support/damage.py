"""Damage as disks, networks and strangers do it to files: changed bytes, blocks zeroed or exchanged, a file cut."""

from __future__ import annotations

import random

_TELLING = (0, 1, 0x7F, 0x80, 0xFF)
"""Bytes at the limits of numbers."""


def damaged(content: bytes, rng: random.Random, block: int = 4096) -> bytes:
    """A copy of a file with one kind of damage.

    Args:
        content: of the file.
        rng: decides about kind and place.
        block: bytes of the blocks that are zeroed, exchanged or copied.
    """
    result = bytearray(content)
    kind = rng.randrange(8)
    if kind < 4:
        for _ in range(rng.choice([1, 1, 1, 2, 5, 50])):
            _change_bytes(result, rng, block)
    elif kind == 4:
        del result[rng.randrange(len(result)) :]
    elif kind == 5:
        at = rng.randrange(len(result))
        size = rng.choice([8, 64, 512, block])
        result[at : at + size] = bytes(min(size, len(result) - at))
    else:
        _move_block(result, rng, block, exchange=kind == 6)
    return bytes(result)


def _change_bytes(content: bytearray, rng: random.Random, block: int) -> None:
    """Change one, two, four or eight bytes, half of the times near a block's begin, where its header is."""
    size = rng.choice([1, 1, 1, 2, 4, 8])
    at = rng.randrange(len(content))
    if rng.random() < 0.5:
        at = at // block * block + rng.randrange(160)
    for i in range(at, min(at + size, len(content))):
        kind = rng.randrange(3)
        content[i] = (
            rng.choice(_TELLING)
            if kind == 0
            else content[i] ^ 1 << rng.randrange(8)
            if kind == 1
            else (rng.randrange(256))
        )


def _move_block(content: bytearray, rng: random.Random, block: int, exchange: bool) -> None:
    count = len(content) // block
    if count < 2:
        return
    one, other = (rng.randrange(count) * block for _ in range(2))
    content[one : one + block], kept = content[other : other + block], content[one : one + block]
    if exchange:
        content[other : other + block] = kept
