"""Whoever else may reach rank 0's port: what they send, and how they hold connections."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
from fuzz.hostile import GARBAGE

from caffepy.distributed.store.wire import CONTROL, Handshake, introduce


def connect(port: int) -> socket.socket:
    """A connection to a port of this machine."""
    return socket.create_connection(("127.0.0.1", port), timeout=300.0)


def introduction(greeting: bytes, secret: str, rank: int = 1, size: int = 2, role: str = CONTROL) -> bytes:
    """What a client that knows `secret` answers to a server's greeting."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(300.0)
        theirs.settimeout(300.0)

        def introduce_and_be_left() -> None:
            with suppress(OSError):
                introduce(theirs, secret, Handshake("host", "machine", 1, rank, size, role))

        thread = threading.Thread(target=introduce_and_be_left)
        thread.start()
        ours.sendall(greeting)
        found = ours.recv(4096)
        ours.shutdown(socket.SHUT_RDWR)
        thread.join()
    return found


def is_closed(line: socket.socket, seconds: float) -> bool:
    """Whether the other end closes a connection in time, whatever it sends before."""
    line.settimeout(seconds)
    try:
        while line.recv(4096):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def send_garbage(port: int) -> None:
    """Everything at once, each over a connection of its own that is closed afterwards."""
    for content in GARBAGE.values():
        with connect(port) as line, suppress(OSError):
            line.sendall(content)
    for secret in ("", "guess"):
        with connect(port) as line, suppress(OSError):
            line.sendall(introduction(line.recv(40), secret))
            line.recv(100)


@contextmanager
def silent_connections(port: int, count: int) -> Iterator[list[socket.socket]]:
    """Connections that say nothing; every third one closes its sending end."""
    lines: list[socket.socket] = []
    try:
        for i in range(count):
            lines.append(connect(port))
            if i % 3 == 0:
                lines[-1].shutdown(socket.SHUT_WR)
        yield lines
    finally:
        for line in lines:
            line.close()


def send_slowly(line: socket.socket, content: bytes, every: float) -> float:
    """A byte at a time; the seconds until the other end closed the connection, or all was sent."""
    begin = time.monotonic()
    line.settimeout(0.001)
    for i in range(len(content)):
        try:
            line.sendall(content[i : i + 1])
            if line.recv(100) == b"":
                break
        except TimeoutError:
            pass
        except OSError:
            break
        time.sleep(every)
    return time.monotonic() - begin


def control_port(process: psutil.Process) -> int:
    """Where the control server of a rank 0 listens: MPI listens too, but does not greet like it."""
    for connection in process.net_connections("tcp4"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.ip == "127.0.0.1":
            with connect(connection.laddr.port) as line, suppress(OSError):
                line.settimeout(2.0)
                if line.recv(40).startswith(b"caffepy1"):
                    return int(connection.laddr.port)
    raise AssertionError("no control server listens on the loopback address")
