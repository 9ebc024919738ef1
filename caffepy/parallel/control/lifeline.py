"""The lifeline: one TCP connection from each rank to rank 0, kept open while training, beside MPI and NCCL.

It tells within milliseconds that a process has ended, whatever ended it: its kernel closes the connection. It also
carries what each device is doing, for the watchdog, and the news of a failure. MPI can do neither: a library that
waits for a dead rank waits on.
"""

from __future__ import annotations

import json
import logging
import secrets
import selectors
import socket
import threading
from dataclasses import dataclass, field
from typing import Any

from caffepy.parallel.processes.world import World, own_addresses

logger = logging.getLogger(__name__)

_CONNECT_SECONDS = 3.0
_LINE_LIMIT = 1 << 20
_KEEPALIVE = (("TCP_KEEPIDLE", 3), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 5))
"""A machine that lost its power or its network closes nothing: the kernel asks each second and gives up after eight."""


@dataclass(frozen=True)
class Event:
    """Something that the lifeline brought.

    Args:
        kind: ``states`` (what a rank's devices do), ``failed`` (a rank met an error), ``bye`` (it ends in good order)
            or ``lost`` (its connection closed without that).
        rank: whose.
        content: the message's fields.
    """

    kind: str
    rank: int
    content: dict[str, Any] = field(default_factory=dict)


class Lifeline:
    """This process's end; the base class is that of a world without connections."""

    def poll(self, timeout: float) -> list[Event]:
        """What arrived; waits at most `timeout` seconds for it. Called by one thread alone."""
        threading.Event().wait(timeout)
        return []

    def send(self, kind: str, **content: Any) -> None:
        """Tell rank 0, or as rank 0 all others. Callable from any thread; a broken connection is found by `poll`."""

    def close(self) -> None:
        """Say good-bye and close; callable twice."""


class _Line:
    """One connection: sends and receives lines of JSON."""

    def __init__(self, connection: socket.socket, rank: int) -> None:
        self.socket = connection
        self.rank = rank
        self._buffer = b""
        self._lock = threading.Lock()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            if hasattr(socket, option):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        connection.settimeout(_CONNECT_SECONDS)

    def send(self, message: dict[str, Any]) -> None:
        try:
            with self._lock:
                self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return  # the reader notices

    def receive(self) -> list[dict[str, Any]] | None:
        """The messages that are complete, or None at the connection's end."""
        try:
            data = self.socket.recv(65536)
        except TimeoutError:
            return []
        except OSError:
            return None
        self._buffer += data
        if not data or len(self._buffer) > _LINE_LIMIT:
            return None
        *lines, self._buffer = self._buffer.split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        self.socket.close()


class Hub(Lifeline):
    """Rank 0's end: all others connect to it.

    Args:
        several_hosts: listen beyond this machine.
    """

    def __init__(self, several_hosts: bool) -> None:
        self._server = socket.create_server(("" if several_hosts else "127.0.0.1", 0), backlog=1024)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._lines: list[_Line] = []
        self._token = secrets.token_hex(16)
        addresses = own_addresses() if several_hosts else []
        self.address = (["127.0.0.1", *addresses], int(self._server.getsockname()[1]), self._token)
        """Where the others connect, and the word that proves that they belong here."""

    def poll(self, timeout: float) -> list[Event]:
        events: list[Event] = []
        for key, _ in self._selector.select(timeout):
            if key.fileobj is self._server:
                self._accept()
            else:
                events.extend(self._read(key.data))
        return events

    def send(self, kind: str, **content: Any) -> None:
        for line in list(self._lines):
            line.send({"kind": kind, **content})

    def close(self) -> None:
        self.send("bye")
        for line in self._lines:
            line.close()
        self._server.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError:
            return
        self._selector.register(connection, selectors.EVENT_READ, _Line(connection, -1))

    def _read(self, line: _Line) -> list[Event]:
        messages = line.receive()
        events = []
        for message in messages or []:
            if line.rank < 0:
                if message.get("token") != self._token:
                    messages = None
                    break
                line.rank = int(message["rank"])
                self._lines.append(line)
            else:
                events.append(Event(message["kind"], line.rank, message))
        if messages is None:
            self._selector.unregister(line.socket)
            line.close()
            if line in self._lines:
                self._lines.remove(line)
                events.append(Event("lost", line.rank))
        return events


class Spoke(Lifeline):
    """Another rank's end.

    Args:
        address: the hub's.
        rank: this rank.
        same_host: the hub is on this machine, and in the same container if there are any.

    Raises:
        OSError: the hub cannot be reached.
    """

    def __init__(self, address: tuple[list[str], int, str], rank: int, same_host: bool) -> None:
        hosts, port, token = address
        self._line = _Line(_connect(hosts[:1] if same_host else hosts[1:], port), 0)
        self._line.send({"token": token, "rank": rank})
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._line.socket, selectors.EVENT_READ)
        self._lost = False

    def poll(self, timeout: float) -> list[Event]:
        if self._lost:
            return super().poll(timeout)
        if not self._selector.select(timeout):
            return []
        messages = self._line.receive()
        if messages is None:
            self._lost = True
            return [Event("lost", 0)]
        return [Event(message["kind"], 0, message) for message in messages]

    def send(self, kind: str, **content: Any) -> None:
        self._line.send({"kind": kind, **content})

    def close(self) -> None:
        self.send("bye")
        self._selector.close()
        self._line.close()


def connect(world: World) -> Lifeline:
    """This process's end of a lifeline that joins all ranks; called by all of them.

    A firewall between the hosts may forbid it: then training goes on without, and the log says so.
    """
    if world.size == 1:
        return Lifeline()
    hub = Hub(world.several_hosts) if world.rank == 0 else None
    address = world.broadcast(hub.address if hub else None)
    assert address is not None
    line: Lifeline | None = hub
    if hub is None:
        try:
            line = Spoke(address, world.rank, world.machines[world.rank] == world.machines[0])
        except OSError as error:
            logger.debug("no lifeline to %s: %s", world.name(0), error)
    cut_off = [rank for rank, connected in enumerate(world.all_gather(line is not None)) if not connected]
    if cut_off and world.rank == 0:
        names = ", ".join(world.name(rank) for rank in cut_off)
        logger.warning("no TCP connection from %s to %s: its sudden end would not be noticed", names, world.name(0))
    return line or Lifeline()


def _connect(hosts: list[str], port: int) -> socket.socket:
    failure: OSError = OSError("rank 0 has no address")
    for host in hosts:
        try:
            return socket.create_connection((host, port), timeout=_CONNECT_SECONDS)
        except OSError as error:
            failure = error
    raise failure
