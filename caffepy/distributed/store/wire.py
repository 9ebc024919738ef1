"""Frames of the control channel: a header, a key, a value. Malformed ones raise `WireError` and nothing else."""

from __future__ import annotations

import fcntl
import json
import socket
import struct
import sys
import termios
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from enum import IntEnum
from typing import Any, TypeVar

T = TypeVar("T")
Value = bytes | bytearray

_HEADER = struct.Struct("!BHQdi")
_KEY_LIMIT = 1024
_STEP = 1 << 26
_ACKNOWLEDGE_SECONDS = 0.001
"""Between two checks whether sent bytes have arrived."""
CONTROL_LIMIT = 1 << 20
"""Longest value of a frame about ranks; in bytes."""
VALUE_LIMIT = 1 << 36
"""Longest value that is put into the store; in bytes."""
_TYPES: dict[Any, type | tuple[type, ...]] = {"int": int, "float": (int, float), "str": str, "bool": bool}


class Kind(IntEnum):
    """What a frame says."""

    PUT = 1
    TAKE = 2
    STATUSES = 3
    HEARTBEAT = 4
    FAIL = 5
    LEAVE = 6
    DONE = 7
    ABSENT = 8
    """The value did not come in time."""
    FAILED = 9
    """A `PeerError`, with its message."""
    REFUSED = 10
    """A `UserError`, with its message."""
    FAILURE = 11
    """A `Failure`; without a value the answer to LEAVE."""


class WireError(OSError):
    """The other end closed the connection, or does not speak this protocol."""


@dataclass(frozen=True)
class Frame:
    """One message.

    Args:
        kind: what it says.
        value: the value, a text, or records as JSON.
        key: of the value.
        seconds: longest wait of a TAKE.
        number: how often what is PUT may be read; the owner of what a TAKE waits for, -1: none.
    """

    kind: Kind
    value: Value = b""
    key: str = ""
    seconds: float = 0.0
    number: int = 0


def send_frame(line: socket.socket, frame: Frame, flags: int = 0) -> None:
    """Write a frame; `flags` as for `socket.send`."""
    key = frame.key.encode()
    assert len(key) <= _KEY_LIMIT, frame.key
    head = _HEADER.pack(frame.kind, len(key), len(frame.value), frame.seconds, frame.number) + key
    if len(frame.value) < 1 << 16:
        line.sendall(head + frame.value, flags)
    else:
        line.sendall(head, flags)
        line.sendall(frame.value, flags)


def receive_frame(line: socket.socket, limit: int) -> Frame:
    """Read a frame whose value has at most `limit` bytes.

    Raises:
        WireError: the connection has ended, or what came is no such frame.
        OSError: it is broken, or silent for longer than the socket's timeout.
    """
    kind, key_length, length, seconds, number = _HEADER.unpack(receive(line, _HEADER.size))
    if key_length > _KEY_LIMIT or length > limit or not 0.0 <= seconds < 1e9:
        raise WireError("not a frame of this protocol")
    try:
        key = receive(line, key_length).decode()
        return Frame(Kind(kind), receive(line, length), key, seconds, number)
    except ValueError as error:
        raise WireError(f"not a frame of this protocol: {error}") from error


def receive(line: socket.socket, count: int) -> bytearray:
    """Read `count` bytes; errors as in `receive_frame`."""
    data, done = bytearray(min(count, _STEP)), 0
    while done < count:
        if done == len(data):  # memory grows with received bytes, not with the announced length
            data.extend(bytes(min(count - done, _STEP)))
        with memoryview(data) as view, view[done:] as rest:
            received = line.recv_into(rest)
        if received == 0:
            raise WireError("the connection was closed")
        done += received
    return data


def encode(record: Any) -> bytes:
    """A record, or a list of records, as JSON."""
    return json.dumps([asdict(each) for each in record] if isinstance(record, Sequence) else asdict(record)).encode()


def decode(kind: type[T], value: Value) -> T:
    """A record from JSON.

    Raises:
        WireError: it is none of that kind.
    """
    return _record(kind, _parse(value))


def decode_list(kind: type[T], value: Value) -> list[T]:
    """A list of records from JSON; errors as in `decode`."""
    found = _parse(value)
    if not isinstance(found, list):
        raise WireError("not a list")
    return [_record(kind, each) for each in found]


def _parse(value: Value) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON: {error}") from error


def _record(kind: type[T], found: Any) -> T:
    if not isinstance(found, dict):
        raise WireError(f"not a {kind.__name__}")
    try:
        record = kind(**found)
        for field in fields(kind):  # type: ignore[arg-type]
            value = getattr(record, field.name)
            if not isinstance(value, _TYPES.get(field.type, type(None))):
                raise WireError(f"{field.name} of a {kind.__name__} is no {field.type}")
            if isinstance(value, str):
                value.encode()  # JSON may hold half of a surrogate pair
    except (TypeError, ValueError) as error:
        raise WireError(f"not a {kind.__name__}: {error}") from error
    return record


def prepare(line: socket.socket) -> None:
    """Send at once, and notice within eight seconds that a machine has vanished, which closes nothing."""
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "darwin":
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPALIVE, 3)
    else:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 3)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 5)


def end_in_order(line: socket.socket, seconds: float) -> None:
    """Close a connection once the other machine has all that was sent, or after `seconds` at most.

    To close it at once would reset it where the other end has sent more than was read, and a reset drops what is still
    on its way.
    """
    end = time.monotonic() + seconds
    with suppress(OSError, ValueError):  # closed meanwhile, it has no descriptor any more
        line.shutdown(socket.SHUT_WR)
        while struct.unpack("i", fcntl.ioctl(line, termios.TIOCOUTQ, bytes(4)))[0] and time.monotonic() < end:
            time.sleep(_ACKNOWLEDGE_SECONDS)
    hang_up(line)


def hang_up(line: socket.socket) -> None:
    """Close a connection, and wake all threads that wait in it."""
    try:
        line.shutdown(socket.SHUT_RDWR)
    except OSError:  # closed by the other end
        line.close()
        return
    line.close()
