"""The control server takes nothing from whoever does not know the job's secret, and nothing malformed from others."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from fuzz.hostile import GARBAGE, MALFORMED, RECORDS
from process_groups import free_port
from processes import program_environment
from strangers import connect, introduction, is_closed, send_garbage, send_slowly, silent_connections

from caffepy.distributed.store import server, wire
from caffepy.distributed.store.client import ControlClient
from caffepy.distributed.store.server import ControlServer
from caffepy.distributed.store.store import MemoryStore
from caffepy.distributed.store.wire import (
    CONTROL_LIMIT,
    DATA,
    Failure,
    Frame,
    Handshake,
    Kind,
    Member,
    challenge,
    introduce,
    send_frame,
)
from caffepy.errors import AbortedError, PeerError, UserError

SECRET = "known to the job"
GREETING = 40


def member(rank: int) -> Member:
    return Member(f"host{rank}", "machine", 100 + rank)


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[ControlServer]:
    """A server of two ranks that waits half a second for proofs, and that is well at the end."""
    assert server.PROOF_SECONDS == 5.0 and server.UNPROVEN_LIMIT <= 48
    monkeypatch.setattr(server, "PROOF_SECONDS", 0.5)
    root = ControlServer(MemoryStore(2), member(0), ("127.0.0.1", 0), SECRET)
    yield root
    assert root.watch([], 0.0) is None
    root.close()


def join(root: ControlServer, secret: str = SECRET, size: int = 2) -> ControlClient:
    return ControlClient(lambda: ([("127.0.0.1", root.port)], secret), 1, size, member(1), 10.0)


def check_in_order(root: ControlServer) -> None:
    """A rank joins, is served, and leaves."""
    client = join(root)
    client.put("key", b"works")
    assert root.take("key", 5.0) == b"works"
    client.leave([])
    assert root.wait_alone(5.0) == []
    client.close()


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_costs_its_connection_and_nothing_else(root: ControlServer, name: str) -> None:
    with connect(root.port) as line:
        line.sendall(GARBAGE[name])
        assert is_closed(line, 3.0)
    check_in_order(root)


def test_a_wrong_secret_is_refused(root: ControlServer) -> None:
    for secret in ("guess", ""):
        with pytest.raises(UserError, match="this is another job's address, or the ranks' secrets differ"):
            join(root, secret)
    assert root.memory.staying() == [0]
    check_in_order(root)


def test_a_replayed_answer_is_refused(root: ControlServer) -> None:
    with connect(root.port) as line:
        recorded = introduction(line.recv(GREETING), SECRET, role=DATA)
        line.sendall(recorded)
        assert b"rank 1 has not joined" in line.recv(4096), "the proof itself was right"
    with connect(root.port) as line:
        assert len(line.recv(GREETING)) == GREETING
        line.sendall(recorded)
        assert line.recv(4096)[-32:] == bytes(32) and is_closed(line, 3.0)
    check_in_order(root)


@pytest.mark.parametrize("field", ["role", "rank", "size"])
def test_role_rank_and_size_are_signed(root: ControlServer, field: str) -> None:
    ours, theirs = {
        "role": (b'"role": "control"', b'"role": "data"   '),
        "rank": (b'"rank": 1', b'"rank": 0'),
        "size": (b'"size": 2', b'"size": 3'),
    }[field]
    with connect(root.port) as line:
        answer = introduction(line.recv(GREETING), SECRET)
        assert ours in answer
        line.sendall(answer.replace(ours, theirs))
        assert line.recv(4096)[-32:] == bytes(32) and is_closed(line, 3.0)
    check_in_order(root)


def fake_server(reply: bytes) -> tuple[int, threading.Thread]:
    """A stranger that sits where rank 0 is expected, and answers one client."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listening:
            line, _ = listening.accept()
            with line:
                line.sendall(b"caffepy1" + bytes(32))
                line.recv(4096)
                line.sendall(reply)
                line.recv(1)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return listening.getsockname()[1], thread


def test_the_server_proves_itself_too(root: ControlServer) -> None:
    with connect(root.port) as line:
        line.sendall(introduction(line.recv(GREETING), SECRET))
        genuine = line.recv(4096)
        assert genuine[0] == Kind.DONE
        for reply in (genuine, genuine[:-32] + bytes(32)):
            port, thread = fake_server(reply)
            with pytest.raises(PeerError, match="what listens there does not know the job's secret"):
                ControlClient(lambda port=port: ([("127.0.0.1", port)], SECRET), 1, 2, member(1), 0.05)
            thread.join(300.0)
        root.memory.leave(1, [])


def test_a_byte_at_a_time_does_not_keep_a_connection(root: ControlServer) -> None:
    with connect(root.port) as line:
        content = introduction(line.recv(GREETING), SECRET)
        assert 0.4 < send_slowly(line, content, 1.0) < len(content) / 2
    check_in_order(root)


def test_silent_connections_are_few_and_keep_nobody_out(root: ControlServer) -> None:
    with silent_connections(root.port, 100) as lines:
        time.sleep(0.2)
        assert len(root._unproven) <= server.UNPROVEN_LIMIT
        begin = time.monotonic()
        check_in_order(root)
        assert time.monotonic() - begin < 300.0
        assert all(is_closed(line, 300.0) for line in lines)


def test_a_rank_that_has_joined_waits_behind_strangers(root: ControlServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt is shorter than the server's work on those before it; the timeout is longer."""
    client = join(root)
    monkeypatch.setattr(server, "UNPROVEN_LIMIT", 1)
    monkeypatch.setattr("caffepy.distributed.store.client.HANDSHAKE_SECONDS", 0.2)
    with silent_connections(root.port, 3):
        client.put("key", b"works")
    assert root.take("key", 5.0) == b"works"
    client.leave([])
    client.close()


def test_a_rank_waits_neither_for_a_server_that_has_ended_nor_after_its_own_end(
    root: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = ControlServer(MemoryStore(2), member(0), ("127.0.0.1", 0), SECRET)
    client = join(ended)
    client.leave([])
    ended.close()
    with pytest.raises(PeerError, match="ended unexpectedly"):
        client.put("key", b"x")
    client.close()

    monkeypatch.setattr("caffepy.distributed.store.client.HANDSHAKE_SECONDS", 0.2)
    client = join(root)
    monkeypatch.setattr(server, "UNPROVEN_LIMIT", 1)
    client.leave([])
    with silent_connections(root.port, 20):
        closing = threading.Timer(0.3, client.close)
        closing.start()
        with pytest.raises(AbortedError, match="the store was closed"):
            client.put("key", b"x")
        closing.join()


def test_without_threads_for_a_connection_the_server_goes_on(
    root: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with connect(root.port) as line:
            assert is_closed(line, 3.0)
    check_in_order(root)


def test_a_stranger_is_kept_with_a_few_hundred_bytes() -> None:
    head, sent = 34, b"\x02\x00" + bytes(5000)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(sent)
        with pytest.raises(OSError, match="the proof is wrong"):
            challenge(theirs, SECRET)
        assert len(theirs.recv(10000)) == len(sent) - head - 512
        ours.sendall(b"\x02\x01" + bytes(5000))
        with pytest.raises(OSError, match="not an introduction"):
            challenge(theirs, SECRET)
        assert len(theirs.recv(10000)) == len(sent) - head


CHILD = """
import resource, sys, threading, time
from caffepy.distributed.store.wire import Failure, Member
from caffepy.distributed.store.server import ControlServer
from caffepy.distributed.store.store import MemoryStore
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
server = ControlServer(MemoryStore(2), Member("host0", "machine", 1), ("127.0.0.1", int(sys.argv[1])), "known")
print("listening", flush=True)
sys.stdin.readline()
files = [open("/dev/null") for _ in range(100)]  # a snapshot can be written
print("opened", flush=True)
sys.stdin.readline()
try:
    while True:
        files.append(open("/dev/null"))
except OSError:
    print("full", flush=True)
sys.stdin.readline()
time.sleep(0.3)
files.clear()
print(server.take("key", 20.0), server.watch([], 0.0), flush=True)
"""


def test_400_silent_connections_under_a_limit_of_256_descriptors() -> None:
    port = free_port()
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(port)],
        env=program_environment({}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None and child.stdin is not None

    def go_on_until(line: str) -> None:
        assert child.stdout is not None and child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == f"{line}\n"

    try:
        assert child.stdout.readline() == "listening\n"
        with silent_connections(port, 400):
            go_on_until("opened")
            client = ControlClient(lambda: ([("127.0.0.1", port)], "known"), 1, 2, member(1), 20.0)
        time.sleep(0.3)  # their descriptors are given back
        go_on_until("full")
        with connect(port) as line:
            child.stdin.write("\n")
            child.stdin.flush()
            assert len(line.recv(GREETING)) == GREETING, "it is accepted once there are descriptors again"
        client.put("key", b"x")
        assert child.communicate(timeout=300)[0] == "bytearray(b'x') None\n"
        client.close()
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("content", [*MALFORMED.values()], ids=[*MALFORMED])
def test_a_malformed_frame_of_a_rank_costs_that_connection(root: ControlServer, content: bytes) -> None:
    client = join(root)
    with connect(root.port) as line:
        introduce(line, SECRET, Handshake("host1", "machine", 101, 1, 2, DATA))
        line.sendall(content)
        assert is_closed(line, 3.0)
    client.put("key", b"works")
    assert root.take("key", 5.0) == b"works"
    client.leave([])
    assert root.wait_alone(5.0) == []
    client.close()


@pytest.mark.parametrize("kind", [Kind.HEARTBEAT, Kind.FAIL, Kind.LEAVE])
def test_malformed_records_cost_the_connection(root: ControlServer, kind: Kind) -> None:
    client = join(root)
    for content in RECORDS:
        with connect(root.port) as line:
            introduce(line, SECRET, Handshake("host1", "machine", 101, 1, 2, DATA))
            send_frame(line, Frame(kind, content))
            assert is_closed(line, 3.0), content
    client.leave([])
    assert root.wait_alone(5.0) == []
    client.close()


def test_a_long_message_is_cut(root: ControlServer) -> None:
    client = join(root)
    client.publish(Failure("x" * 100000))
    failure = root.watch([], 5.0)
    assert failure is not None and failure.message == "x" * 4096 and not failure.reported
    root.publish(Failure("rank 1: y", reported=True))
    heard = client.watch([], 5.0)
    assert heard is not None and heard.message == "rank 1: y"
    client.close()


def test_frames_about_ranks_are_small() -> None:
    root = ControlServer(MemoryStore(2), member(0), ("127.0.0.1", 0), SECRET)
    client = join(root)
    client._send(Frame(Kind.HEARTBEAT, b"[]".ljust(CONTROL_LIMIT + 1)))
    failure = root.watch([], 5.0)
    assert failure is not None and failure.message.startswith("rank 1 on host1 (process 101) ended unexpectedly")
    client.close()
    root.close()


def test_memory_grows_with_what_has_come() -> None:
    """Of 64 GiB that are announced nothing comes."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(bytes(range(250)) * 10)
        assert wire.receive(theirs, 2500) == bytes(range(250)) * 10
        ours.close()
        with pytest.raises(wire.WireError, match="the connection was closed"):
            wire.receive(theirs, 1 << 36)


@pytest.mark.parametrize("where", ["connection", "handshake", "acceptor"])
def test_a_thread_that_fails_ends_the_job_with_its_error(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    error = ZeroDivisionError("no")

    def fail(*_: object) -> None:
        raise error

    root = ControlServer(MemoryStore(2), member(0), ("127.0.0.1", 0), SECRET)
    if where != "connection":
        monkeypatch.setattr(*((server, "challenge") if where == "handshake" else (root, "_accept")), fail)
        with connect(root.port) as line:
            line.sendall(b"x")
            failure = root.watch([], 5.0)
    else:
        monkeypatch.setattr(server, "decode_list", fail)
        client = join(root)
        assert client.watch([], 0.2) is None
        failure = root.watch([], 5.0)
        root.publish(replace(failure, reported=True))
        heard = client.watch([], 5.0)
        assert heard is not None and "ZeroDivisionError" in heard.message
        client.close()
    assert failure is not None and failure.error is error
    assert failure.message == "the control server ended by ZeroDivisionError: no"
    root.close()


def test_everything_at_once(root: ControlServer) -> None:
    with silent_connections(root.port, 20):
        send_garbage(root.port)
        check_in_order(root)
