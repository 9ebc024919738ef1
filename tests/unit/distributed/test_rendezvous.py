from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from process_groups import free_port, raise_first, run_threads

from caffepy.distributed import rendezvous
from caffepy.distributed.rendezvous import Membership, join
from caffepy.distributed.store.store import LocalControlChannel, MemoryStore
from caffepy.distributed.store.wire import Member
from caffepy.errors import PeerError, UserError

NOTHING: dict[str, str] = {}


def meet(size: int, method: Any, timeout: float = 300.0) -> list[Any]:
    """What each of `size` ranks finds; method(rank) gives the arguments of `join`."""

    def work(rank: int) -> tuple[int, int, int, list[int]]:
        membership = join(*method(rank), timeout, NOTHING)
        found = membership.rank, membership.size, membership.local_rank, [m.process for m in membership.members]
        part(membership)
        return found

    return run_threads(size, work)


def part(membership: Membership) -> None:
    """Leave in good order: rank 0, which holds the store, after the others."""
    membership.channel.leave([])
    assert membership.channel.wait_alone(10.0) == []
    membership.channel.close()


def test_tcp() -> None:
    port = free_port()
    found = raise_first(meet(3, lambda rank: (f"tcp://127.0.0.1:{port}", rank, 3)))
    assert found == [(rank, 3, rank, [os.getpid()] * 3) for rank in range(3)]


def test_a_group_without_a_secret_says_so(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    raise_first(meet(2, lambda rank: (f"tcp://127.0.0.1:{port}", rank, 2)))
    assert caplog.messages == [
        f"tcp://127.0.0.1:{port} without a secret: any process that reaches 127.0.0.1:{port} can join; "
        "set CAFFEPY_JOB_SECRET to the same random text on all ranks"
    ]


def test_the_secret_of_the_environment(caplog: pytest.LogCaptureFixture) -> None:
    method = f"tcp://127.0.0.1:{free_port()}"

    def work(rank: int) -> Membership:
        return join(method, rank, 3, 1.0, {"CAFFEPY_JOB_SECRET": ("a", "a", "b")[rank]})

    found = run_threads(3, work)
    assert "this is another job's address, or the ranks' secrets differ" in str(found[2])
    assert all("has waited 1 s for rank 2 to join" in str(error) for error in found[:2])
    assert caplog.messages == []


def test_a_name_of_this_host() -> None:
    port = free_port()
    assert len(raise_first(meet(2, lambda rank: (f"tcp://localhost:{port}", rank, 2)))) == 2


def test_file(tmp_path: Path) -> None:
    path = tmp_path / "a b%c"
    method = f"file://{tmp_path}/a%20b%25c"
    path.write_text('{"addresses": [["127.0.0.1", 9]], "secret": "of an earlier run"}')
    path.chmod(0o600)
    found = raise_first(meet(3, lambda rank: (method, rank, 3)))
    assert [entry[0] for entry in found] == [0, 1, 2]
    assert list(tmp_path.iterdir()) == []


def test_env() -> None:
    port = str(free_port())

    def work(rank: int) -> int:
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank), "WORLD_SIZE": "2"}
        membership = join(None, None, None, 10.0, variables)
        part(membership)
        return membership.rank

    assert raise_first(run_threads(2, work)) == [0, 1]


def test_an_address_is_enough_where_rank_and_size_are_given() -> None:
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    found = raise_first(run_threads(2, lambda rank: join(None, rank, 2, 300.0, variables)))
    assert [membership.rank for membership in found] == [0, 1]
    for membership in reversed(found):
        part(membership)


def test_alone_without_a_launcher() -> None:
    membership = join(None, None, None, 1.0, NOTHING)
    assert (membership.rank, membership.size, membership.local_rank, membership.local_size) == (0, 1, 0, 1)
    membership.channel.close()


@pytest.mark.parametrize("method", ["tcp://127.0.0.1:1", "env://", "file:///nowhere/at/all"])
def test_a_world_of_one_needs_no_connection(method: str) -> None:
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    assert join(method, 0, 1, 1.0, variables).size == 1


@pytest.mark.parametrize(
    ("method", "rank", "size", "message"),
    [
        ("http://host", 0, 2, "init_method 'http://host' is none of mpi://, env://, tcp://host:port and file:///path"),
        ("tcp", 0, 2, "init_method 'tcp' is none of"),
        ("tcp://host", 0, 2, "tcp://host needs rank 0's host and a free port there"),
        ("tcp://:123", 0, 2, "':123' is not an address"),
        ("tcp://host:0", 0, 2, "'host:0' is not an address"),
        ("tcp://host:123456", 0, 2, "'host:123456' is not an address"),
        ("tcp://host:²", 0, 2, "'host:²' is not an address"),
        ("tcp://a..b:1", 1, 2, "'a..b:1' is not an address"),
        ("tcp://127.\0:1", 0, 2, "is not an address"),
        (f"tcp://{'x' * 5000}:1", 1, 2, "is not an address"),
        ("file://[x", 0, 2, "is not a URL .*; give file:///path"),
        ("file:///a%00b", 0, 2, "needs an absolute path"),
        (f"file:///{'x' * 5000}", 0, 2, "rank 0 cannot write"),
        ("file:///tmp", 0, 2, "rank 0 cannot write /tmp"),
        ("tcp://127.0.0.1:1", None, 2, "needs rank: give init_process_group rank=, or set RANK"),
        ("tcp://127.0.0.1:1", 0, None, "needs world_size: give init_process_group world_size=, or set WORLD_SIZE"),
        ("tcp://127.0.0.1:1", 2, 2, "rank 2 of a world of 2: ranks count from 0 to world_size - 1"),
        ("file://relative", 0, 2, "needs an absolute path"),
        ("file:///nowhere/at/all", 0, 2, "rank 0 cannot write /nowhere/at/all"),
        ("env://", 0, 2, "env:// needs MASTER_ADDR and MASTER_PORT in the environment"),
        ("mpi://", 1, 2, "rank is 1, but MPI says 0"),
        ("mpi://", 0, 2, "world_size is 2, but MPI says 1"),
    ],
)
def test_mistakes(method: str, rank: int | None, size: int | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        join(method, rank, size, 0.5, NOTHING)


@pytest.mark.parametrize("text", ["first", "²", "-1", "9" * 5000])
def test_a_number_that_is_none(text: str) -> None:
    with pytest.raises(UserError, match=f"RANK is '{text}'; it must be a number"):
        join("tcp://127.0.0.1:1", None, 2, 0.5, {"RANK": text})


def test_rank_and_size_come_from_the_launcher_too() -> None:
    variables = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "3"}
    with pytest.raises(UserError, match="rank 5 of a world of 3"):
        join("tcp://127.0.0.1:1", None, None, 0.5, variables)


def test_those_who_wait_hear_who_is_missing(tmp_path: Path) -> None:
    method = f"file://{tmp_path}/meet"
    results = run_threads(2, lambda rank: join(method, rank, 4, 0.5, NOTHING))
    for rank, error in enumerate(results):
        assert isinstance(error, PeerError)
        assert f"rank {rank} on " in str(error) and "has waited 0.5 s for ranks 2, 3 to join" in str(error)
    assert list(tmp_path.iterdir()) == []


def test_who_gives_up_first_is_not_taken_for_dead(tmp_path: Path) -> None:
    method = f"file://{tmp_path}/meet"
    results = run_threads(2, lambda rank: join(method, rank, 4, (5.0, 0.5)[rank], NOTHING))
    assert ["has waited 0.5 s for ranks 2, 3 to join" in str(error) for error in results] == [True, True]


def test_nobody_but_rank_0_comes_to_the_file(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"rank 1 .*: rank 0 does not answer within 0.3 s: .*No such file .*/meet'"):
        join(f"file://{tmp_path}/meet", 1, 2, 0.3, NOTHING)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"addresses": [[1]], "secret": ""}', '{"addresses": 3}'])
def test_a_file_of_something_else(tmp_path: Path, content: str) -> None:
    path = tmp_path / "meet"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(PeerError, match="does not hold an address"):
        join(f"file://{path}", 1, 2, 0.2, NOTHING)


def test_a_file_that_others_could_have_written_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "meet"
    path.write_text('{"addresses": [["127.0.0.1", 1]], "secret": ""}')
    path.chmod(0o666)
    with pytest.raises(UserError, match="meet belongs to user .* has the mode 666: .* others could have written it"):
        join(f"file://{path}", 1, 2, 60.0, NOTHING)


def test_two_processes_of_one_rank() -> None:
    method = f"tcp://127.0.0.1:{free_port()}"
    results = run_threads(3, lambda i: join(method, min(i, 1), 3, 1.0, NOTHING))
    errors = sorted(str(result) for result in results)
    assert sum("two processes call themselves rank 1" in error for error in errors) == 1
    assert all("init_process_group at tcp://" in error for error in errors)


def test_ranks_that_count_differently() -> None:
    method = f"tcp://127.0.0.1:{free_port()}"
    results = run_threads(2, lambda rank: join(method, rank, 2 + rank, 1.0, NOTHING))
    assert "rank 1 was started with a world size of 3, rank 0 with 2" in str(results[1])


def test_a_port_that_is_taken() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(UserError, match=r"127.0.0.1:\d+ is in use: choose another port, the same on all ranks"),
    ):
        join(f"tcp://127.0.0.1:{server.getsockname()[1]}", 0, 2, 0.5, NOTHING)


def test_neighbours_are_counted_by_machine() -> None:
    members = [Member("a", "1", 10), Member("b", "2", 11), Member("a", "1", 12), Member("a", "3", 13)]
    store = LocalControlChannel(MemoryStore(4), 0)
    found = [Membership(rank, members, store) for rank in range(4)]
    assert [membership.local_rank for membership in found] == [0, 0, 1, 0]
    assert [membership.local_size for membership in found] == [2, 1, 2, 1]
    assert found[0].name(2) == "rank 2 on a (process 12)"


class Broken(LocalControlChannel):
    """A channel whose data connection was cut while its rank joined."""

    def take(self, key: str, seconds: float, owner: int | None = None) -> bytes | None:
        raise PeerError("rank 0 ended unexpectedly: Connection reset by peer")


@pytest.mark.parametrize("told", [True, False])
def test_a_rank_that_joins_hears_of_the_failure_that_cut_its_connection(monkeypatch: Any, told: bool) -> None:
    memory = MemoryStore(3)
    if told:
        memory.fail("rank 1 on a: ValueError: injected")
    monkeypatch.setattr(rendezvous, "ControlClient", lambda *_: Broken(memory, 2))
    expected = "rank 1 on a: ValueError: injected" if told else "rank 0 ended unexpectedly: Connection reset by peer"
    with pytest.raises(PeerError, match=rf"rank 2 on .*: init_process_group at tcp://127.0.0.1:5: {expected}$"):
        join("tcp://127.0.0.1:5", 2, 3, 1.0, NOTHING)
