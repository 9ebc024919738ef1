from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caffepy.distributed.launch.run import Restarts, failure_way, usable_nodes
from caffepy.distributed.launch.supervisor import ExitReport

LOST = "rank 1 on b (process 99) at iteration 5 ended unexpectedly: it was killed"


@pytest.mark.parametrize(
    ("ending", "refusal"),
    [
        (ExitReport(0), ""),
        (ExitReport(0, stopped=True), ""),
        (ExitReport(1, LOST, stopped=True), ""),
        (ExitReport(2, "no such layer"), "another start would meet the same mistake"),
        (ExitReport(130, "interrupted again"), "it was interrupted"),
        (ExitReport(1, LOST), None),
        (ExitReport(137), None),
    ],
)
def test_what_is_started_again(ending: ExitReport, refusal: str | None) -> None:
    assert Restarts(1).refusal(ending) == refusal
    assert Restarts(0).refusal(ending) == ""


def test_the_same_iteration_must_not_fail_twice_in_the_same_way() -> None:
    restarts = Restarts(5)
    assert restarts.refusal(ExitReport(1, LOST)) is None
    again = ExitReport(1, LOST.replace("99", "1234"))
    assert str(restarts.refusal(again)).startswith("it failed twice in the same way (rank 1 on b (process 1234)")


@pytest.mark.parametrize(
    "other",
    [LOST.replace("iteration 5", "iteration 6"), LOST.replace("rank 1", "rank 0"), "loss is NaN in iteration 5", ""],
)
def test_another_iteration_or_way_is_another_failure(other: str) -> None:
    restarts = Restarts(5)
    assert restarts.refusal(ExitReport(1, LOST)) is None
    assert restarts.refusal(ExitReport(1, other)) is None
    assert restarts.refusal(ExitReport(1, LOST)) is None


def test_failures_without_a_word_are_limited_by_their_number_alone() -> None:
    restarts = Restarts(3)
    delays = []
    while (refusal := restarts.refusal(ExitReport(137))) is None:
        delays.append(restarts.next_delay())
    assert delays == [1, 2, 4]
    assert refusal == "it was started again 3 times already (--restarts 3)"


def test_delays_double_to_a_minute() -> None:
    restarts = Restarts(2000)
    delays = [restarts.next_delay() for _ in range(1500)]
    assert delays[:8] == [1, 2, 4, 8, 16, 32, 60, 60] and delays[-1] == 60


def test_numbers_that_vary_do_not_count() -> None:
    first = "rank 0 on a, process 7, device CPU has waited 3 s in iteration 8 for rank 1 on b, process 9, device CPU"
    second = "rank 0 on a, process 8, device CPU has waited 4 s in iteration 8 for rank 1 on b, process 7, device CPU"
    assert failure_way(ExitReport(1, first)) == failure_way(ExitReport(1, second)) != ""
    assert failure_way(ExitReport(1, first)) != failure_way(ExitReport(1, first.replace("iteration 8", "iteration 9")))


@pytest.mark.parametrize(
    ("left", "least", "per_node", "ranks", "passes", "wanted"),
    [
        (3, 1, 8, 32, 1, 2),  # 32 batches among 24 ranks: no; among 16: two each
        (3, 3, 8, 32, 1, None),
        (3, 1, 8, 32, 3, 3),
        (1, 1, 1, 2, 1, 1),
        (0, 1, 1, 2, 1, None),
        (3, 2, 8, 32, 0, 3),  # no batch to keep
    ],
)
def test_over_how_many_hosts_the_batch_can_be_divided(
    left: int, least: int, per_node: int, ranks: int, passes: int, wanted: int | None
) -> None:
    assert usable_nodes(left, least, per_node, ranks, passes) == wanted


@given(st.integers(0, 9), st.integers(1, 9), st.integers(1, 8), st.integers(1, 9), st.integers(1, 6))
def test_the_batch_is_kept(left: int, least: int, per_node: int, nodes: int, passes: int) -> None:
    ranks = nodes * per_node
    found = usable_nodes(left, least, per_node, ranks, passes)
    possible = [n for n in range(least, left + 1) if ranks * passes % (n * per_node) == 0]
    assert found == max(possible, default=None)
