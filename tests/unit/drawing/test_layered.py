"""The layout: boxes do not overlap, edges go forward, long edges are straight."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caffepy.drawing import layered
from caffepy.drawing.layered import Layout, lay_out
from caffepy.errors import ConfigError

SPACING = 10.0


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[float], list[tuple[int, int]]]:
    boxes = draw(st.integers(1, 14))
    sizes = draw(st.lists(st.floats(1, 100), min_size=boxes, max_size=boxes))
    pairs = list(itertools.combinations(range(boxes), 2))
    return sizes, draw(st.lists(st.sampled_from(pairs), max_size=25)) if pairs else []


def spans(layout: Layout, sizes: list[float], edges: list[tuple[int, int]]) -> dict[int, list[tuple[float, float]]]:
    """What each rank holds, from low to high: boxes and points of edges."""
    found: dict[int, list[tuple[float, float]]] = {}
    for rank, centre, size in zip(layout.rank, layout.centre, sizes, strict=True):
        found.setdefault(rank, []).append((centre - size / 2, centre + size / 2))
    for (source, _), way in zip(edges, layout.ways, strict=True):
        for step, breadth in enumerate(way, 1):
            found.setdefault(layout.rank[source] + step, []).append((breadth, breadth))
    return {rank: sorted(held) for rank, held in found.items()}


@given(graphs())
def test_nothing_overlaps_and_every_edge_goes_forward(graph: tuple[list[float], list[tuple[int, int]]]):
    sizes, edges = graph
    layout = lay_out(sizes, edges, SPACING)
    for (source, target), way in zip(edges, layout.ways, strict=True):
        assert layout.rank[target] - layout.rank[source] == len(way) + 1
    for held in spans(layout, sizes, edges).values():
        assert held[0][0] >= -1e-6
        assert held[-1][1] <= layout.breadth + 1e-6
        gaps = [right[0] - left[1] for left, right in itertools.pairwise(held)]
        assert all(gap >= SPACING / 2 - 1e-6 for gap in gaps)


def test_a_chain_and_its_shortcut_are_straight():
    edges = [(0, 1), (1, 2), (2, 3), (3, 4), (0, 4)]
    layout = lay_out([30.0, 80.0, 20.0, 50.0, 30.0], edges, SPACING)
    assert layout.rank == [0, 1, 2, 3, 4]
    assert len(set(layout.centre[1:4])) == 1
    assert len(set(layout.ways[4])) == 1
    assert abs(layout.centre[1] - layout.ways[4][0]) >= 40 + SPACING / 2


def test_crossings_that_can_be_avoided_are():
    """Two rows of four, each box joined to its opposite in the other row."""
    edges = [(index, 7 - index) for index in range(4)]
    layout = lay_out([10.0] * 8, edges, SPACING)
    assert [layout.centre[source] for source, _ in edges] == [layout.centre[target] for _, target in edges]


def test_a_box_that_reads_nothing_stands_before_its_first_reader():
    assert lay_out([1.0] * 4, [(0, 1), (1, 3), (2, 3)], SPACING).rank == [0, 1, 1, 2]


def test_a_net_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(layered, "MAX_POINTS", 5)
    with pytest.raises(ConfigError, match=r"6 boxes and edges over 5 ranks.*write a \.dot file instead"):
        lay_out([1.0] * 6, [(index, index + 1) for index in range(5)], SPACING)
