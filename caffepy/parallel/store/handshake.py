"""How both ends of a connection prove that they know the job's secret, before anything else is read.

1. The server sends a magic word and a fresh nonce.
2. The client sends an HMAC-SHA256 of the server's nonce and of who it is: role, rank, size, process, a fresh nonce.
3. The server sends DONE or REFUSED, and an HMAC of that, its nonce and who the client is.

A recorded proof is of no use, because its nonce does not come again; the labels keep one end's proof from serving as
the other's. The client proves first, so that a stranger learns nothing by which to guess a weak secret.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
from dataclasses import dataclass, replace

from caffepy.errors import UserError
from caffepy.parallel.store.records import Member
from caffepy.parallel.store.wire import Frame, Kind, WireError, decode, encode, receive, receive_frame, send_frame

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
class Hello(Member):
    """Who a client is."""

    rank: int
    size: int
    role: str = CONTROL
    nonce: str = ""


def introduce(line: socket.socket, secret: str, hello: Hello) -> str:
    """The client's side, within the socket's timeout; returns what the server is called.

    Raises:
        UserError: the server refuses this rank, or knows another secret.
        OSError: the connection broke, or the server does not know the secret.
    """
    greeting = receive(line, len(_MAGIC) + _NONCE)
    if not greeting.startswith(_MAGIC):
        raise WireError("what listens there is not caffepy")
    nonce = bytes(greeting[len(_MAGIC) :])
    who = encode(replace(hello, nonce=secrets.token_hex(_NONCE)))
    line.sendall(_HEAD.pack(len(who), _sign(secret, b"client", nonce, who)) + who)
    reply = receive_frame(line, _REPLY_LIMIT)
    text = bytes(reply.value[_PROOF:])
    expected = _sign(secret, b"server", nonce, who, bytes([reply.kind]), text)
    proven = hmac.compare_digest(expected, bytes(reply.value[:_PROOF]))
    if reply.kind is Kind.REFUSED:
        raise UserError(text.decode() if proven else "this is another job's address, or the ranks' secrets differ")
    if not proven:
        raise WireError("what listens there does not know the job's secret")
    return text.decode()


class ServerHandshake:
    """The server's side of one connection; reads without waiting and keeps at most a few hundred bytes.

    Args:
        line: the connection.
        secret: the job's.
        since: when it was accepted, by `time.monotonic`.

    Raises:
        OSError: it is broken already.
    """

    def __init__(self, line: socket.socket, secret: str, since: float) -> None:
        self.line = line
        self.since = since
        self._secret = secret
        self._nonce = secrets.token_bytes(_NONCE)
        self._received = b""
        line.setblocking(False)
        line.sendall(_MAGIC + self._nonce)

    def read(self) -> Hello | None:
        """Take what has come; who the client is, once it has proved it.

        Raises:
            OSError: the connection has ended, is malformed, or its proof is wrong, which it has been told.
        """
        if not self._has_received(_HEAD.size):
            return None
        length, proof = _HEAD.unpack_from(self._received)
        if length > _HELLO_LIMIT:
            raise WireError("not an introduction")
        if not self._has_received(_HEAD.size + length):
            return None
        who = self._received[_HEAD.size :]
        if not hmac.compare_digest(proof, _sign(self._secret, b"client", self._nonce, who)):
            send_frame(self.line, Frame(Kind.REFUSED, bytes(_PROOF)))
            raise WireError("the proof is wrong")
        return decode(Hello, who)

    def answer(self, kind: Kind, text: str = "") -> None:
        """Accept (DONE) or refuse (REFUSED) a client that has proved itself."""
        who, written = self._received[_HEAD.size :], text.encode()
        proof = _sign(self._secret, b"server", self._nonce, who, bytes([kind]), written)
        send_frame(self.line, Frame(kind, proof + written))

    def _has_received(self, size: int) -> bool:
        if len(self._received) < size:
            try:
                data = self.line.recv(size - len(self._received))
            except BlockingIOError:
                return False
            if not data:
                raise WireError("the connection was closed")
            self._received += data
        return len(self._received) >= size


def _sign(secret: str, label: bytes, *parts: bytes) -> bytes:
    key = b"caffepy " + secret.encode(errors="surrogateescape")  # never empty, which HMAC libraries refuse
    return hmac.digest(key, label + b"".join(parts), "sha256")
