"""Process groups whose ranks are threads of the test."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

from caffepy.distributed.communicators.local import LocalCommunicator, ThreadGroup
from caffepy.distributed.default import connect
from caffepy.distributed.group import ProcessGroup
from caffepy.distributed.rendezvous import Membership
from caffepy.distributed.store.store import LocalControlChannel
from caffepy.distributed.store.wire import Member


def run_threads(count: int, action: Callable[[int], Any]) -> list[Any]:
    """The results of action(i), or the error that it raised, each called in a thread of its own."""
    results: list[Any] = [None] * count

    def work(i: int) -> None:
        try:
            results[i] = action(i)
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive(), "a rank hangs"
    return results


def free_port() -> int:
    """A port of this machine that nobody uses at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def run_tcp(size: int, action: Callable[[ProcessGroup], Any], timeout: float = 300.0) -> list[Any]:
    """What `action` returns on each rank of a group over TCP."""
    method = f"tcp://127.0.0.1:{free_port()}"

    def work(rank: int) -> Any:
        with connect("tcp", method, rank=rank, world_size=size, timeout=timeout) as group:
            return action(group)

    return run_threads(size, work)


def run_local(size: int, action: Callable[[ProcessGroup], Any], timeout: float = 300.0) -> list[Any]:
    """The same over the local communicator, with no server between."""
    shared = ThreadGroup(size)
    members = [Member("host", "machine", 100 + rank) for rank in range(size)]

    def work(rank: int) -> Any:
        membership = Membership(rank, members, LocalControlChannel(shared.store, rank))
        with ProcessGroup("local", membership, LocalCommunicator(shared, rank), timeout) as group:
            return action(group)

    return run_threads(size, work)


def raise_first(results: list[Any]) -> list[Any]:
    """The results, if none is an error."""
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results
