"""How the store's client and server write to each other: requests and replies, a header and counted bytes each."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from enum import IntEnum

_MAGIC = b"cfps"
_REQUEST = struct.Struct("!4sBHQdiI")
_REPLY = struct.Struct("!4sBQ")
_KEY_LIMIT = 1024
VALUE_LIMIT = 1 << 36
"""Longest value that a member may send; strangers are held to much less."""


class Command(IntEnum):
    """What a client asks for; all but the first two are methods of `Store`."""

    JOIN = 1
    ATTACH = 2
    PUT = 3
    TAKE = 4
    WATCH = 5
    STATES = 6
    FAIL = 7
    LEAVE = 8


class Outcome(IntEnum):
    """What came of it."""

    DONE = 0
    ABSENT = 1
    """Nothing came in time."""
    FAILED = 2
    """A `PeerError`, with its message."""
    REFUSED = 3
    """A `UserError`, with its message."""


class WireError(OSError):
    """The other end closed the connection, or does not speak this protocol."""


@dataclass(frozen=True)
class Request:
    """What a client sends.

    Args:
        command: what to do.
        key: of the value; on joining the job's token.
        value: the value, or a message.
        seconds: longest wait.
        number: a rank; -1: none.
        reads: for PUT.
    """

    command: Command
    key: str = ""
    value: bytes | bytearray = b""
    seconds: float = 0.0
    number: int = -1
    reads: int = 0


def send_request(line: socket.socket, request: Request) -> None:
    """Write a request."""
    key = request.key.encode()
    assert len(key) <= _KEY_LIMIT, request.key
    header = _REQUEST.pack(
        _MAGIC, request.command, len(key), len(request.value), request.seconds, request.number, request.reads
    )
    _send(line, header + key, request.value)


def receive_request(line: socket.socket, limit: int) -> Request:
    """Read a request whose value has at most `limit` bytes.

    Raises:
        WireError: the connection has ended or carries something else.
        OSError: it is broken, or silent for longer than the socket's timeout.
    """
    magic, command, key_length, length, seconds, number, reads = _REQUEST.unpack(_receive(line, _REQUEST.size))
    if magic != _MAGIC or key_length > _KEY_LIMIT or length > limit or not 0.0 <= seconds < 1e9:
        raise WireError("not a request of this protocol")
    try:
        key = bytes(_receive(line, key_length)).decode()
        return Request(Command(command), key, _receive(line, length), seconds, number, reads)
    except ValueError as error:
        raise WireError(f"not a request of this protocol: {error}") from error


def send_reply(line: socket.socket, outcome: Outcome, value: bytes | bytearray = b"") -> None:
    """Write a reply."""
    _send(line, _REPLY.pack(_MAGIC, outcome, len(value)), value)


def receive_reply(line: socket.socket) -> tuple[Outcome, bytearray]:
    """Read a reply; errors as in `receive_request`."""
    magic, outcome, length = _REPLY.unpack(_receive(line, _REPLY.size))
    if magic != _MAGIC or length > VALUE_LIMIT or outcome not in set(Outcome):
        raise WireError("not a reply of this protocol")
    return Outcome(outcome), _receive(line, length)


def prepare(line: socket.socket) -> None:
    """Settings of both ends: nothing is held back, and a machine that vanished is noticed."""
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 3), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 5)):
        if hasattr(socket, option):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def hang_up(line: socket.socket) -> None:
    """Close a connection; whoever waits in it, in any thread, is let go."""
    try:
        line.shutdown(socket.SHUT_RDWR)
    except OSError:  # closed by the other end
        line.close()
        return
    line.close()


def _send(line: socket.socket, header: bytes, value: bytes | bytearray) -> None:
    if len(value) < 1 << 16:
        line.sendall(header + value)
    else:
        line.sendall(header)
        line.sendall(value)


def _receive(line: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        received = line.recv_into(view)
        if received == 0:
            raise WireError("the connection was closed")
        view = view[received:]
    return data
