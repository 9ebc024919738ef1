"""The control channel's protocol: frames, records about ranks, the proof of the job's secret, and values as JSON.

A frame is a header, a key and a value. Malformed frames raise `WireError` and nothing else. Ranks exchange records
about themselves: members, device statuses, failures.

Both ends of a connection prove that they know the job's secret, before anything else is read:

1. The server sends a magic word and a fresh nonce.
2. The client sends its identity (role, rank, size, process, a fresh nonce), and an HMAC-SHA256 of the server's nonce
   and of this identity.
3. The server sends DONE or REFUSED, and an HMAC of that, its nonce and the client's identity.

A recorded proof is of no use, because its nonce does not come again; the labels keep one end's proof from serving as
the other's. The client proves first, so that a stranger learns nothing by which to guess a weak secret.

Values that ranks send each other are JSON; nothing is unpickled.
"""

from __future__ import annotations

import base64
import fcntl
import hmac
import json
import secrets
import socket
import struct
import sys
import termios
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from caffepy.errors import RunError, UserError

# -- frames --------------------------------------------------------------------------------------------

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
    # A small frame goes out as one packet (TCP_NODELAY is set); a large value is not copied behind its header.
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
    # Everything that was announced is checked before any of it is read. NaN fails the last comparison.
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
    # Requests and replies alternate: Nagle's algorithm would hold each of them back for the acknowledgement of the one
    # before.
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "darwin":
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPALIVE, 3)
    else:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 3)
    # Three seconds of silence, then five probes a second apart. Heartbeats of the application cannot replace them: they
    # also stop where a process is only suspended.
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
        # close() alone does not wake a thread that reads from the socket.
        line.shutdown(socket.SHUT_RDWR)
    except OSError:  # closed by the other end
        line.close()
        return
    line.close()


# -- records -------------------------------------------------------------------------------------------

_SILENT_SECONDS = 2.0
"""Heartbeats come every half second: a rank without any for so long is stopped, or its network is."""

_LONGEST_MESSAGE = 4096
"""Characters; a message must fit into the kernel's buffers, because no rank may wait for one that is stopped."""


@dataclass(frozen=True)
class Member:
    """A rank's process.

    Args:
        host: the machine's name.
        machine: the machine's identity, whatever it is called.
        process: the process's number there.
    """

    host: str
    machine: str
    process: int

    def name(self, rank: int) -> str:
        """The process as messages call it."""
        return f"rank {rank} on {self.host} (process {self.process})"


@dataclass(frozen=True)
class DeviceStatus:
    """What one device is doing.

    Args:
        rank: its process.
        host: its machine.
        pid: its process's number there.
        device: ``0`` for a GPU's number, ``CPU``; empty for a process group, which has one a rank, and before a process
            has made its devices.
        iteration: the iteration it is in.
        collectives: how many operations that need all devices it has begun; all devices begin the same ones.
        waiting: the operation that it waits in, empty where it computes.
        seconds: for how long it has waited or computed, without the time in which its process was suspended.
        reading: what it waits for to be read, empty where its data are there; then `seconds` is for how long.
        starting: its first iteration is not over.
        silent: seconds since its rank was heard of; known to the store.
        left: its rank has left in good order; known to the store.
    """

    rank: int
    host: str = ""
    pid: int = 0
    device: str = ""
    iteration: int = 0
    collectives: int = 0
    waiting: str = ""
    seconds: float = 0.0
    reading: str = ""
    starting: bool = False
    silent: float = 0.0
    left: bool = False

    def __str__(self) -> str:
        device = f", device {self.device}" if self.device else ""
        return f"rank {self.rank} on {self.host}, process {self.pid}{device}"

    @property
    def is_silent(self) -> bool:
        """Whether heartbeats have stopped."""
        return self.silent > _SILENT_SECONDS

    @property
    def doing(self) -> str:
        """What a straggler is doing, and for how long."""
        if self.is_silent:
            return f"was last heard of {self.silent:.0f} s ago (is it suspended?)"
        if self.waiting:
            return f"waits in {self.waiting} since {self.seconds:.0f} s"
        return f"{f'waits for {self.reading} to be read' if self.reading else 'computes'} since {self.seconds:.0f} s"


@dataclass(frozen=True)
class Failure:
    """Why a job ends.

    Args:
        message: one line that names the rank at fault.
        status: exit status of all processes; 0: rank 0 has left in good order.
        reported: the user has been told. Until then rank 0 alone hears of a failure.
        error: the exception, where it was raised in this process; not sent to others.
    """

    message: str
    status: int = RunError.exit_status
    reported: bool = False
    error: BaseException | None = None

    def as_sent(self) -> Failure:
        """The failure as other processes hear of it."""
        return replace(self, message=self.message[:_LONGEST_MESSAGE], error=None)


# -- the proof -----------------------------------------------------------------------------------------

CONTROL, DATA = "control", "data"
"""Roles of a connection: heartbeats and news, its end being the rank's end; values."""

_MAGIC = b"caffepy1"
_NONCE = 32
_PROOF = 32
_HEAD = struct.Struct(f"!H{_PROOF}s")
_HELLO_LIMIT = 512
"""Bytes that a client may send before it has proved itself."""
_REPLY_LIMIT = 4096


@dataclass(frozen=True)
class Handshake(Member):
    """The identity of a client."""

    rank: int
    size: int
    role: str = CONTROL
    nonce: str = ""


def introduce(line: socket.socket, secret: str, hello: Handshake) -> str:
    """The client's side, within the socket's timeout; returns what the server is called.

    Raises:
        UserError: the server refuses this rank, or knows another secret.
        OSError: the connection broke, or the server does not know the secret.
    """
    # The server speaks first: a client that reached something else sees that before it sends anything.
    greeting = receive(line, len(_MAGIC) + _NONCE)
    if not greeting.startswith(_MAGIC):
        raise WireError("what listens there is not caffepy")
    nonce = bytes(greeting[len(_MAGIC) :])
    # A nonce of the client's own, so that an overheard answer of the server is of no use later.
    identity = encode(replace(hello, nonce=secrets.token_hex(_NONCE)))
    line.sendall(_HEAD.pack(len(identity), _sign(secret, b"client", nonce, identity)) + identity)
    reply = receive_frame(line, _REPLY_LIMIT)
    text = bytes(reply.value[_PROOF:])
    expected = _sign(secret, b"server", nonce, identity, bytes([reply.kind]), text)
    proven = hmac.compare_digest(expected, bytes(reply.value[:_PROOF]))
    # A refusal without the server's proof comes from a server that knows another secret: the text is not to be trusted.
    if reply.kind is Kind.REFUSED:
        raise UserError(text.decode() if proven else "this is another job's address, or the ranks' secrets differ")
    if not proven:
        raise WireError("what listens there does not know the job's secret")
    return text.decode()


def challenge(line: socket.socket, secret: str) -> tuple[Handshake, Callable[[Kind, str], None]]:
    """The server's side; keeps at most a few hundred bytes.

    Returns:
        The proven identity of the client, and a function that accepts (DONE) or refuses it (REFUSED).

    Raises:
        OSError: the connection has ended, is malformed, or its proof is wrong, which it has been told.
    """
    nonce = secrets.token_bytes(_NONCE)
    line.sendall(_MAGIC + nonce)
    length, proof = _HEAD.unpack(receive(line, _HEAD.size))
    if length > _HELLO_LIMIT:
        raise WireError("not an introduction")
    identity = bytes(receive(line, length))
    # compare_digest takes the same time wherever the first difference is, which a comparison by == would tell.
    if not hmac.compare_digest(proof, _sign(secret, b"client", nonce, identity)):
        send_frame(line, Frame(Kind.REFUSED, bytes(_PROOF)))
        raise WireError("the proof is wrong")

    def answer(kind: Kind, text: str) -> None:
        written = text.encode()
        send_frame(line, Frame(kind, _sign(secret, b"server", nonce, identity, bytes([kind]), written) + written))

    return decode(Handshake, identity), answer


def _sign(secret: str, label: bytes, *parts: bytes) -> bytes:
    key = b"caffepy " + secret.encode(errors="surrogateescape")  # never empty, which HMAC libraries refuse
    return hmac.digest(key, label + b"".join(parts), "sha256")


# -- values --------------------------------------------------------------------------------------------


def _read_record(content: Any) -> Any:
    module, name, values = content
    # Only what this process has imported anyway, and only dataclasses of caffepy: a value cannot make code run.
    kind = getattr(sys.modules[module], name) if module.startswith("caffepy.") else None
    if not (isinstance(kind, type) and is_dataclass(kind)):
        raise WireError(f"{module}.{name} is no record of caffepy's")
    return kind(**{field: _read(value) for field, value in values.items()})


def _read_array(content: Any) -> np.ndarray:
    name, shape, values = content
    dtype = np.dtype(str(name))
    if dtype.kind not in _ARRAY_KINDS:
        raise WireError(f"an array of {dtype} does not travel from rank to rank")
    # A copy, because an array over received bytes is read-only.
    array: np.ndarray = np.frombuffer(base64.b64decode(values), dtype).reshape(tuple(map(int, shape))).copy()
    return array


_ARRAY_KINDS = "biufc"
"""Of dtypes: booleans and numbers."""
_READERS: dict[str, Callable[[Any], Any]] = {
    "array": _read_array,
    "scalar": lambda content: _read_array(content)[()],
    "bytes": base64.b64decode,
    "path": Path,
    "tuple": lambda parts: tuple(map(_read, parts)),
    "record": _read_record,
    "dict": lambda pairs: {_read(key): _read(value) for key, value in pairs},
}
"""What JSON does not know is an object with one of these names."""


def pack(value: Any) -> bytes:
    """Return JSON of None, numbers, text, bytes, paths, NumPy numbers and arrays of them, and lists, tuples,
    dictionaries and caffepy's dataclasses of these.

    Raises:
        TypeError: it is something else.
    """
    return json.dumps(_plain(value)).encode()


def unpack(packed: Value) -> Any:
    """The inverse of `pack`.

    Raises:
        WireError: these bytes do not come from there.
    """
    try:
        return _read(json.loads(packed))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise WireError(f"not a packed value: {error}") from error


def _plain(value: Any) -> Any:
    # Before the numbers of Python: np.float64 is a float too, and would come out as one.
    if isinstance(value, np.generic) and value.dtype.kind in _ARRAY_KINDS:
        return {"scalar": [value.dtype.str, [], base64.b64encode(value.tobytes()).decode()]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray) and value.dtype.kind in _ARRAY_KINDS:
        return {"array": [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]}
    if isinstance(value, Path):
        return {"path": str(value)}
    if isinstance(value, list):
        return list(map(_plain, value))
    if isinstance(value, tuple):
        return {"tuple": list(map(_plain, value))}
    if isinstance(value, dict):
        return {"dict": [[_plain(key), _plain(item)] for key, item in value.items()]}
    if is_dataclass(value) and not isinstance(value, type) and type(value).__module__.startswith("caffepy."):
        kind, values = type(value), {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
        return {"record": [kind.__module__, kind.__qualname__, values]}
    raise TypeError(f"a {type(value).__name__} does not travel from rank to rank: make plain values of it")


def _read(found: Any) -> Any:
    if isinstance(found, list):
        return list(map(_read, found))
    if isinstance(found, dict):
        ((name, content),) = found.items()
        return _READERS[name](content)
    return found
