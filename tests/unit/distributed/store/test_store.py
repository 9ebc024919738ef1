from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from caffepy.distributed.store.client import ControlClient
from caffepy.distributed.store.server import ControlServer
from caffepy.distributed.store.store import MEMBERS, MISSING, MemoryStore
from caffepy.distributed.store.wire import DeviceStatus, Failure, Member
from caffepy.errors import AbortedError, PeerError, UserError
from caffepy.utils.clocks import suspend_aware_seconds

SECRET = "secret"


def member(rank: int) -> Member:
    return Member(f"host{rank}", "machine", 100 + rank)


class Net:
    """A store of two ranks and its server."""

    def __init__(self) -> None:
        self.memory = MemoryStore(2)
        self.root = self.server = ControlServer(self.memory, member(0), ("127.0.0.1", 0), SECRET)
        self.address = ("127.0.0.1", self.server.port)
        self.clients: list[ControlClient] = []

    def client(self, rank: int = 1, size: int = 2, secret: str = SECRET, timeout: float = 300.0) -> ControlClient:
        client = ControlClient(lambda: ([self.address], secret), rank, size, member(rank), timeout)
        self.clients.append(client)
        return client

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=300.0)


@pytest.fixture
def net() -> Iterator[Net]:
    suspend_aware_seconds()  # starts the clock of the process
    before = set(threading.enumerate())
    net = Net()
    yield net
    for client in net.clients:
        client.close()
    net.server.close()
    net.server.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)  # a connection's thread leaves the server's table shortly before its end
    assert set(threading.enumerate()) <= before, "a thread of the server is left"


def in_background(function: object, *arguments: object) -> list[object]:
    """Call a function in a thread; the list holds its result, or its error, once it has ended."""
    results: list[object] = []

    def work() -> None:
        try:
            results.append(function(*arguments))  # type: ignore[operator]
        except Exception as error:
            results.append(error)

    threading.Thread(target=work, daemon=True).start()
    return results


def wait_for(results: list[object]) -> object:
    end = time.monotonic() + 300.0
    while not results and time.monotonic() < end:
        time.sleep(0.005)
    assert results, "the call has not ended"
    return results[0]


# -- the store itself -------------------------------------------------------------------------------


def test_a_value_lives_until_it_was_read_as_often_as_was_said() -> None:
    store = MemoryStore(1)
    store.put("once", b"1", reads=2)
    store.put("forever", b"2")
    assert [store.take("once", 0.0) for _ in range(3)] == [b"1", b"1", None]
    assert [store.take("forever", 0.0) for _ in range(3)] == [b"2"] * 3


def test_take_waits_for_the_value() -> None:
    store = MemoryStore(2)
    results = in_background(store.take, "late", 300.0)
    time.sleep(0.05)
    assert not results
    store.put("late", b"x")
    assert wait_for(results) == b"x"


def test_members_appear_when_all_have_joined() -> None:
    store = MemoryStore(3)
    store.join(2, 3, member(2))
    assert json.loads(store.take(MISSING, 0.0) or b"") == [0, 1]
    store.join(0, 3, member(0))
    assert store.take(MEMBERS, 0.0) is None
    store.join(1, 3, member(1))
    assert [Member(**entry) for entry in json.loads(store.take(MEMBERS, 0.0) or b"")] == [member(i) for i in range(3)]


@pytest.mark.parametrize(
    ("rank", "size", "message"),
    [
        (0, 2, r"two processes call themselves rank 0: one is rank 0 on host0 \(process 100\)"),
        (1, 3, "rank 1 was started with a world size of 3, rank 0 with 2"),
        (2, 2, "there is no rank 2 in a world of 2: ranks count from 0 to 1"),
        (-1, 2, "there is no rank -1"),
    ],
)
def test_a_rank_that_does_not_fit_is_refused(rank: int, size: int, message: str) -> None:
    store = MemoryStore(2)
    store.join(0, 2, member(0))
    with pytest.raises(UserError, match=message):
        store.join(rank, size, member(5))


def test_a_failure_ends_waits_but_what_is_there_can_be_taken() -> None:
    store = MemoryStore(2)
    store.put("there", b"x")
    results = in_background(store.take, "absent", 300.0)
    watching = in_background(store.watch, 0, [], 300.0)
    store.fail("rank 1 is on fire")
    store.fail("an echo of it")
    assert str(wait_for(results)) == "rank 1 is on fire"
    assert wait_for(watching) == Failure("rank 1 is on fire", reported=True)
    assert store.take("there", 300.0) == b"x"


def test_nobody_waits_for_a_rank_that_has_left() -> None:
    store = MemoryStore(2)
    results = in_background(store.take, "key", 300.0, 1)
    other = in_background(store.take, "key", 0.3, 0)
    store.leave(1, [DeviceStatus(1, collectives=7)])
    assert isinstance(error := wait_for(results), PeerError) and str(error) == "rank 1 has left"
    assert wait_for(other) is None
    (status,) = store.statuses()
    assert status.left and status.collectives == 7 and status.rank == 1


def test_the_last_one_waits_for_the_others_to_leave() -> None:
    store = MemoryStore(2)
    for rank in (0, 1):
        store.join(rank, 2, member(rank))
    assert store.wait_alone(0, 0.01) == [1]
    results = in_background(store.wait_alone, 0, 300.0)
    store.leave(1, [])
    assert wait_for(results) == []


# -- over TCP ---------------------------------------------------------------------------------------


def test_values_travel_both_ways(net: Net) -> None:
    client = net.client()
    large = bytes(range(256)) * 5000
    client.put("to 0", large, reads=1)
    assert net.root.take("to 0", 5.0, 1) == large
    net.root.put("to 1", b"", reads=1)
    assert client.take("to 1", 5.0, 0) == b""
    assert client.take("to 1", 0.01) is None
    assert [Member(**entry) for entry in json.loads(client.take(MEMBERS, 5.0) or b"")] == [member(0), member(1)]


def test_a_wait_does_not_keep_others_waiting(net: Net) -> None:
    client = net.client()
    waiting = [in_background(client.take, f"key {i}", 300.0, 0) for i in range(3)]
    for i in reversed(range(3)):
        client.put(f"key {i}", b"%d" % i)
        assert wait_for(waiting[i]) == b"%d" % i


def test_states_are_told_and_failures_heard(net: Net) -> None:
    client = net.client()
    assert client.watch([DeviceStatus(1, collectives=5, waiting="barrier")], 0.05) is None
    (status,) = net.root.statuses()
    assert (status.collectives, client.statuses()[0].waiting) == (5, "barrier")
    watching = in_background(client.watch, [], 300.0)
    client.fail("everything is wrong")
    assert wait_for(watching) == Failure("everything is wrong", reported=True)
    with pytest.raises(PeerError, match="everything is wrong"):
        net.root.take("key", 300.0)


def test_a_rank_that_dies_is_missed_at_once(net: Net) -> None:
    client = net.client()
    watching = in_background(client.watch, [], 300.0)
    results = in_background(net.root.take, "key", 300.0, 1)
    time.sleep(0.1)
    client.close()
    error = wait_for(results)
    assert str(error).startswith("rank 1 on host1 (process 101) ended unexpectedly: it was killed")
    assert isinstance(wait_for(watching), AbortedError)


def test_a_rank_that_leaves_is_not_missed(net: Net) -> None:
    client = net.client()
    watching = in_background(client.watch, [], 300.0)
    client.leave([])
    assert wait_for(watching) is None
    client.close()
    assert net.root.watch([], 0.1) is None
    assert net.root.wait_alone(300.0) == []


def test_the_end_of_the_server_is_told(net: Net) -> None:
    client = net.client()
    watching = in_background(client.watch, [], 300.0)
    waiting = in_background(client.take, "key", 300.0)
    time.sleep(0.1)
    net.memory.fail("rank 0 gives up")
    net.server.close()
    assert wait_for(watching) == Failure("rank 0 gives up", reported=True)
    assert str(wait_for(waiting)) == "rank 0 gives up"
    with pytest.raises(PeerError, match=r"rank 0 on host0 \(process 100\) ended unexpectedly"):
        client.put("key", b"")


def test_the_end_of_the_server_waits_for_a_rank_that_asks_late(net: Net) -> None:
    client = net.client()
    net.memory.fail("rank 0 gives up")
    closing = in_background(net.server.close)
    time.sleep(0.1)
    assert client.watch([], 300.0) == Failure("rank 0 gives up", reported=True)
    assert wait_for(closing) is None


def test_a_call_after_close_is_an_abort(net: Net) -> None:
    client = net.client()
    waiting = in_background(client.take, "key", 300.0)
    time.sleep(0.1)
    client.close()
    assert isinstance(wait_for(waiting), AbortedError)
    with pytest.raises(AbortedError, match="closed"):
        client.take("key", 300.0)


def test_a_rank_that_nobody_answers_gives_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    with pytest.raises(PeerError, match=r"rank 0 does not answer within 0.3 s: 127.0.0.1:\d+: .*refused"):
        ControlClient(lambda: ([address], ""), 1, 2, member(1), 0.3)


def test_an_address_may_become_known_later(net: Net) -> None:
    answers = iter([OSError("no file yet"), OSError("half a file"), ([net.address], SECRET)])

    def find() -> tuple[list[tuple[str, int]], str]:
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    net.clients.append(ControlClient(find, 1, 2, member(1), 300.0))
    assert net.memory.staying() == [0, 1]


@pytest.mark.parametrize(
    ("rank", "size", "secret", "message"),
    [
        (1, 2, "guess", "this is another job's address"),
        (1, 2, "", "this is another job's address"),
        (0, 2, SECRET, "two processes call themselves rank 0"),
        (1, 4, SECRET, "world size of 4"),
    ],
)
def test_strangers_are_refused(net: Net, rank: int, size: int, secret: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        net.client(rank, size, secret)
    assert net.memory.staying() == [0]


def test_other_processes_are_told_of_a_failure_before_anybody_here_hears_of_it() -> None:
    """Rank 0 closes its connections as soon as it hears: what was not sent by then, nobody would send."""
    memory, heard, before = MemoryStore(2), threading.Event(), threading.Event()

    def hear() -> None:
        memory.watch(0, [], 300.0)
        heard.set()

    def listener(failure: Failure) -> None:
        if heard.wait(0.2):
            before.set()

    memory.listen(1, listener)
    thread = threading.Thread(target=hear)
    thread.start()
    while not memory._heartbeats:
        time.sleep(0.01)
    memory.fail("it broke")
    thread.join(300.0)
    assert heard.is_set() and not before.is_set()
