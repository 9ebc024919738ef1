"""Offsets of arrays in an arena, and the gaps between them."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from caffepy.backend.types import ARENA_ALIGNMENT, aligned_bytes
from caffepy.net.memory_plan import Lifetime, assign_offsets, live_bytes, widest_gaps

LIVES = st.lists(
    st.builds(lambda size, first, span: Lifetime(size, first, first + span),
              st.integers(0, 5000), st.integers(0, 20), st.integers(0, 8)),
    max_size=25,
)  # fmt: skip


@settings(max_examples=150)
@given(LIVES)
def test_offsets_keep_apart_what_meets(lives: list[Lifetime]):
    offsets, size = assign_offsets(lives)
    assert max(live_bytes(lives), default=0) <= size <= sum(aligned_bytes(life.size) for life in lives)
    for (a, begin), (b, other) in itertools.combinations(zip(lives, offsets, strict=True), 2):
        if a.overlaps(b):
            assert begin + a.size <= other or other + b.size <= begin
    for life, offset in zip(lives, offsets, strict=True):
        assert offset % ARENA_ALIGNMENT == 0
        assert 0 <= offset <= offset + life.size <= size


@settings(max_examples=100)
@given(LIVES, st.integers(0, 3000))
@example([Lifetime(1024, 0, 0), Lifetime(0, 0, 0)], 3000)
def test_gaps_are_free_and_none_is_wider(lives: list[Lifetime], behind: int):
    offsets, size = assign_offsets(lives)
    gaps = widest_gaps(lives, offsets, size + behind, 30)
    for step, (begin, end) in enumerate(gaps):
        taken = np.zeros(size + behind, bool)
        for life, offset in zip(lives, offsets, strict=True):
            if life.first <= step <= life.last:
                taken[offset : offset + aligned_bytes(life.size)] = True
        assert not taken[begin:end].any()
        widths = [len(list(run)) for free, run in itertools.groupby(taken) if not free]
        assert end - begin == max(widths, default=0)
