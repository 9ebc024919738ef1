"""Rank 0's end of a store between processes: one thread for each connection, all over one `MemoryStore`."""

from __future__ import annotations

import hmac
import json
import logging
import select
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict

from caffepy.errors import PeerError, UserError
from caffepy.parallel.store.store import Member, MemoryStore, State
from caffepy.parallel.store.wire import (
    VALUE_LIMIT,
    Command,
    Outcome,
    Request,
    WireError,
    hang_up,
    prepare,
    receive_request,
    send_reply,
)

logger = logging.getLogger(__name__)

_STRANGER_SECONDS = 5.0
"""How long a new connection may take to say who it is."""
_STRANGER_LIMIT = 4096
"""Longest value that it may send before."""
_JOIN_SECONDS = 2.0
_NEWS_SECONDS = 1.0
"""How long the end waits for ranks that have not asked for news; they would see a connection that closes without."""
_LOOK_SECONDS = 0.05
"""Between looks at the connection of a rank that is silent because it waits for news."""


class StoreServer:
    """Lets other processes use a store.

    The connection over which a rank joined tells of its end: if it closes before the rank has left, all waits of the
    others end with that news.

    Args:
        store: the store.
        address: where to listen; an empty host means all of this machine's addresses, port 0 any free port.
        token: what a rank has to know; whoever knows it belongs to the job.

    Raises:
        OSError: the address is taken or not this machine's.
    """

    def __init__(self, store: MemoryStore, address: tuple[str, int], token: str = "") -> None:
        self._store = store
        self._token = token
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._listening = socket.create_server(address, family=family, backlog=1024)
        self.port = int(self._listening.getsockname()[1])
        self._lock = threading.Lock()
        self._lines: dict[socket.socket, threading.Thread] = {}
        self._closing = False
        self._accepting = threading.Thread(target=self._accept, name="store", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """End all connections; whoever waits is told why. Callable twice."""
        if self._closing:
            return
        self._store.fail("rank 0 has left")
        self._store.wait_told(0, _NEWS_SECONDS)  # a rank may open another connection to ask
        with self._lock:
            if self._closing:
                return
            self._closing = True
            threads = list(self._lines.items())
        hang_up(self._listening)
        self._accepting.join(_JOIN_SECONDS)
        for line, _ in threads:
            with suppress(OSError):
                line.shutdown(socket.SHUT_RD)  # no more requests; replies still go out
        for line, thread in threads:
            thread.join(_JOIN_SECONDS)
            hang_up(line)

    def _accept(self) -> None:
        while not self._closing:
            try:
                line, _ = self._listening.accept()
            except OSError as error:
                if not self._closing:  # too many open files: those that are open may be enough
                    logger.debug("the store cannot accept a connection: %s", error)
                    threading.Event().wait(0.1)
                continue
            with self._lock:
                if self._closing:
                    line.close()
                    return
                thread = threading.Thread(target=self._serve, args=(line,), name="store connection", daemon=True)
                self._lines[line] = thread
                thread.start()

    def _serve(self, line: socket.socket) -> None:
        joined: int | None = None
        try:
            line.settimeout(_STRANGER_SECONDS)
            request = receive_request(line, _STRANGER_LIMIT)
            rank = self._admit(line, request)
            if request.command is Command.JOIN:
                joined = rank
            prepare(line)
            line.settimeout(None)
            while True:
                self._answer(line, rank, receive_request(line, VALUE_LIMIT))
        except (OSError, UserError, ValueError, TypeError) as error:  # the last two: JSON that is none of ours
            logger.debug("a connection of the store ends: %s", error)
        finally:
            hang_up(line)
            with self._lock:
                self._lines.pop(line, None)
            if joined is not None and not self._closing:
                self._store.lose(joined)

    def _admit(self, line: socket.socket, request: Request) -> int:
        """The rank of a new connection.

        Raises:
            UserError: it does not belong to this job; it has been told so.
            WireError: it does not say who it is.
        """
        try:
            if not hmac.compare_digest(request.key.encode(), self._token.encode()):
                raise UserError("this is another job's address")
            if request.command is Command.JOIN:
                self._store.join(request.number, *_introduction(request))
            elif request.command is not Command.ATTACH or request.number not in self._store.staying():
                raise WireError("a connection did not say who it is")
        except UserError as error:
            send_reply(line, Outcome.REFUSED, str(error).encode())
            raise
        send_reply(line, Outcome.DONE)
        return request.number

    def _answer(self, line: socket.socket, rank: int, request: Request) -> None:
        try:
            value = self._do(line, rank, request)
        except PeerError as error:
            send_reply(line, Outcome.FAILED, str(error).encode())
            return
        send_reply(line, Outcome.ABSENT if value is None else Outcome.DONE, value or b"")

    def _do(self, line: socket.socket, rank: int, request: Request) -> bytes | bytearray | None:
        store = self._store
        if request.command is Command.TAKE:
            return store.take(request.key, request.seconds, request.number if request.number >= 0 else None)
        if request.command is Command.WATCH:
            return self._watch(line, rank, request)
        if request.command is Command.STATES:
            return json.dumps({str(number): asdict(state) for number, state in store.states().items()}).encode()
        if request.command is Command.PUT:
            store.put(request.key, request.value, request.reads)
        elif request.command is Command.FAIL:
            store.fail(request.value.decode())
        elif request.command is Command.LEAVE:
            store.leave_rank(rank, State(**json.loads(request.value)))
        return b""

    def _watch(self, line: socket.socket, rank: int, request: Request) -> bytes | None:
        """News for a rank, while an eye is kept on its connection: it says nothing before it was answered."""
        state = State(**json.loads(request.value))
        deadline = time.monotonic() + request.seconds
        while True:
            left = deadline - time.monotonic()
            news = self._store.watch_rank(rank, state, max(0.0, min(left, _LOOK_SECONDS)))
            if news is None and left > 0 and rank in self._store.staying():
                if not select.select([line], [], [], 0)[0]:
                    continue
                news = self._store.watch_rank(rank, state, 0.0)  # the end of this server comes with news
                if news is None:
                    raise WireError("the connection was closed")
            return None if news is None else news.encode()


def _introduction(request: Request) -> tuple[int, Member]:
    try:
        found = json.loads(request.value)
        return int(found["size"]), Member(str(found["host"]), str(found["machine"]), int(found["process"]))
    except (ValueError, KeyError, TypeError) as error:
        raise WireError(f"a connection introduced itself wrongly: {error}") from error
