from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caffepy.distributed.communicators.communicator import (
    PATTERNS,
    Collective,
    FinishedWork,
    Op,
    PendingCollective,
    PolledWork,
    ReduceOp,
    WorkSequence,
    piece_of,
    reduce_pieces,
    rows,
)
from caffepy.distributed.communicators.local import LocalCommunicator, ThreadGroup
from caffepy.distributed.communicators.store_communicator import StoreCommunicator
from caffepy.distributed.store.store import LocalControlChannel, MemoryStore
from caffepy.errors import AbortedError, PeerError, UserError


def test_float16_is_rounded_once() -> None:
    pieces = [np.array([2048.0, 1.0], np.float16)] + [np.array([1.0, 2.0**-11], np.float16)] * 4
    assert reduce_pieces(pieces, ReduceOp.SUM).tolist() == [2052.0, 1.0 + 2.0**-9]
    assert reduce_pieces(pieces, ReduceOp.SUM).dtype == np.float16


@given(st.integers(1, 5), st.integers(0, 20))
def test_reductions_leave_their_inputs_alone(size: int, count: int) -> None:
    arrays = np.random.default_rng(count).integers(0, 9, (size, count))
    pieces = list(arrays.copy())
    expected = {
        ReduceOp.SUM: arrays.sum(0),
        ReduceOp.PRODUCT: arrays.prod(0),
        ReduceOp.MIN: arrays.min(0),
        ReduceOp.MAX: arrays.max(0),
    }
    for operator, result in expected.items():
        np.testing.assert_array_equal(reduce_pieces(pieces, operator), result)
    np.testing.assert_array_equal(pieces, arrays)


@given(st.integers(1, 6), st.integers(0, 6))
def test_rows_are_views_of_equal_parts(count: int, length: int) -> None:
    array = np.zeros((count, length))
    parts = rows(array, count)
    assert [part.shape for part in parts] == [(length,)] * count
    for i, part in enumerate(parts):
        part[:] = i
    np.testing.assert_array_equal(array, np.repeat(np.arange(count), length).reshape(count, length))


def test_a_piece_is_a_slice_only_where_receivers_get_different_ones() -> None:
    array = np.arange(6.0).reshape(3, 2)
    assert piece_of(Collective(Op.ALL_TO_ALL, array, array), 1, 3).tolist() == [2.0, 3.0]
    assert piece_of(Collective(Op.ALL_GATHER, array, array), 1, 3).tolist() == list(range(6))
    assert piece_of(Collective(Op.SEND, array, peer=1), 1, 3).tolist() == list(range(6))


def test_operations_are_described_as_all_ranks_see_them() -> None:
    one, all_of_them = np.zeros(4, np.float32), np.zeros((3, 4), np.float32)
    same = [
        (Collective(Op.SCATTER, all_of_them, one, peer=2), Collective(Op.SCATTER, None, one, peer=2)),
        (Collective(Op.GATHER, one, all_of_them, peer=2), Collective(Op.GATHER, one, None, peer=2)),
        (Collective(Op.BROADCAST, one, None, peer=2), Collective(Op.BROADCAST, None, one, peer=2)),
        (Collective(Op.SEND, one, peer=1), Collective(Op.RECEIVE, None, one, peer=0)),
    ]
    for root, other in same:
        assert root.describe(3) == other.describe(3)
    assert same[0][0].describe(3) == "scatter from rank 2 of 4 float32"
    assert same[1][0].describe(3) == "gather to rank 2 of 4 float32"
    assert Collective(Op.REDUCE, one, None, ReduceOp.MIN, 1).describe(3) == "reduce MIN to rank 1 of 4 float32"
    assert Collective(Op.ALL_TO_ALL, all_of_them, all_of_them).describe(3) == "all_to_all of 4 float32"
    assert Collective(Op.BARRIER).describe(3) == "barrier"


def test_every_collective_says_who_sends_and_who_receives() -> None:
    for op, pattern in PATTERNS.items():
        senders, receivers = pattern.senders(3, 1), pattern.receivers(3, 1)
        assert senders == ([1] if op in (Op.BROADCAST, Op.SCATTER) else [0, 1, 2])
        assert receivers == ([1] if op in (Op.REDUCE, Op.GATHER) else [0, 1, 2])


def test_nothing_that_is_started_waits() -> None:
    """Both ends of everything in one thread: each operation ends as soon as the other end has begun too."""
    group = ThreadGroup(2)
    first, second = (LocalCommunicator(group, i) for i in range(2))
    received, total = np.zeros(3), [np.full(3, 1.0), np.full(3, 2.0)]
    receiving = first.start(Collective(Op.RECEIVE, None, received, peer=1, tag=4))
    reducing = first.start(Collective(Op.ALL_REDUCE, total[0], total[0], ReduceOp.SUM))
    assert not receiving.wait(0.0) and not reducing.wait(0.0)
    assert (receiving.waits_for, reducing.waits_for) == ([1], [1])
    second.start(Collective(Op.SEND, np.arange(3.0), peer=0, tag=4))
    assert receiving.wait(0.0) and received.tolist() == [0.0, 1.0, 2.0]
    assert second.start(Collective(Op.ALL_REDUCE, total[1], total[1], ReduceOp.SUM)).wait(0.0)
    assert reducing.wait(0.0)
    assert total[0].tolist() == total[1].tolist() == [3.0] * 3


def test_what_was_sent_is_free_to_change() -> None:
    group = ThreadGroup(2)
    first, second = (LocalCommunicator(group, i) for i in range(2))
    array, received = np.ones(3), np.zeros(3)
    first.start(Collective(Op.SEND, array, peer=1))
    array[:] = 5.0
    assert second.start(Collective(Op.RECEIVE, None, received, peer=0)).wait(300.0)
    assert received.tolist() == [1.0] * 3


def test_ranks_that_call_different_operations_are_told() -> None:
    group = ThreadGroup(2)
    first, second = (LocalCommunicator(group, i) for i in range(2))
    array = np.zeros(3, np.float32)
    first.start(Collective(Op.ALL_REDUCE, array, array, ReduceOp.MAX))
    work = second.start(Collective(Op.ALL_REDUCE, array, array, ReduceOp.MIN))
    with pytest.raises(
        UserError, match="this rank calls 'all_reduce MIN of 3 float32', rank 0 calls 'all_reduce MAX of 3 float32'"
    ):
        work.wait(1.0)
    first.start(Collective(Op.SEND, np.zeros(2), peer=1))
    receiving = second.start(Collective(Op.RECEIVE, None, array, peer=0))
    with pytest.raises(UserError, match="expects a 'message of 3 float32', rank 0 sent a 'message of 2 float64'"):
        receiving.wait(1.0)


def test_an_abort_ends_waits() -> None:
    group = ThreadGroup(2)
    work = LocalCommunicator(group, 0).start(Collective(Op.BARRIER))
    LocalCommunicator(group, 1).abort()
    with pytest.raises(PeerError, match="another thread failed"):
        work.wait(300.0)


def test_the_tcp_communicator_is_one_as_training_uses_it() -> None:
    store = LocalControlChannel(MemoryStore(1), 0)
    communicator = StoreCommunicator(store, 0, 1)
    array = np.arange(3.0)
    communicator.all_reduce(array)
    communicator.broadcast(array)
    communicator.barrier()
    assert array.tolist() == communicator.sum(array).tolist() == [0.0, 1.0, 2.0]
    communicator.abort()
    communicator.abort()
    with pytest.raises(AbortedError, match="aborted"):
        communicator.barrier()
    communicator.close()


def test_the_tcp_communicator_says_for_whom_it_waits() -> None:
    communicator = StoreCommunicator(LocalControlChannel(MemoryStore(3), 0), 0, 3, timeout=0.05)
    with pytest.raises(PeerError, match=r"barrier: rank 0 has waited 0.05 s for rank 1, 2"):
        communicator.barrier()


def test_a_poll_stops_where_other_ranks_are_waited_for() -> None:
    done, seen = [False], []

    def steps() -> Iterator[PendingCollective | None]:
        yield PolledWork(lambda: done[0], Collective(Op.RECEIVE, peer=3))
        seen.append("first")
        yield FinishedWork()
        seen.append("second")
        yield None
        seen.append("together")

    work = WorkSequence(steps())
    work.poll()
    assert not work.wait(0.0) and seen == [] and work.waits_for == [3]
    done[0] = True
    work.poll()
    work.poll()
    assert seen == ["first", "second"] and work.waits_for == []
    assert work.wait(0.0) and seen == ["first", "second", "together"]


@pytest.mark.parametrize("polled", [True, False])
def test_an_error_between_works_is_raised_by_every_wait(polled: bool) -> None:
    def steps() -> Iterator[PendingCollective]:
        yield FinishedWork()
        raise UserError("rank 1 sent 8 bytes, this rank expects 4")

    work = WorkSequence(steps())
    for call in (work.poll if polled else work.synchronize, work.synchronize, work.synchronize):
        with pytest.raises(UserError, match="this rank expects 4"):
            call()
