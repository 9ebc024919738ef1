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
from collections.abc import Callable
from dataclasses import dataclass, replace

from caffepy.distributed.store.records import Member
from caffepy.distributed.store.wire import Frame, Kind, WireError, decode, encode, receive, receive_frame, send_frame
from caffepy.errors import UserError

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
    """Who a client is."""

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


def challenge(line: socket.socket, secret: str) -> tuple[Handshake, Callable[[Kind, str], None]]:
    """The server's side; keeps at most a few hundred bytes.

    Returns:
        Who the client is, now that it has proved it, and a function that accepts (DONE) or refuses it (REFUSED).

    Raises:
        OSError: the connection has ended, is malformed, or its proof is wrong, which it has been told.
    """
    nonce = secrets.token_bytes(_NONCE)
    line.sendall(_MAGIC + nonce)
    length, proof = _HEAD.unpack(receive(line, _HEAD.size))
    if length > _HELLO_LIMIT:
        raise WireError("not an introduction")
    who = bytes(receive(line, length))
    if not hmac.compare_digest(proof, _sign(secret, b"client", nonce, who)):
        send_frame(line, Frame(Kind.REFUSED, bytes(_PROOF)))
        raise WireError("the proof is wrong")

    def answer(kind: Kind, text: str) -> None:
        written = text.encode()
        send_frame(line, Frame(kind, _sign(secret, b"server", nonce, who, bytes([kind]), written) + written))

    return decode(Handshake, who), answer


def _sign(secret: str, label: bytes, *parts: bytes) -> bytes:
    key = b"caffepy " + secret.encode(errors="surrogateescape")  # never empty, which HMAC libraries refuse
    return hmac.digest(key, label + b"".join(parts), "sha256")
