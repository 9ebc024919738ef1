"""Another rank's end of a store between processes."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from caffepy.errors import AbortedError, PeerError, UserError
from caffepy.parallel.store.store import Member, State, Value
from caffepy.parallel.store.wire import (
    Command,
    Outcome,
    Request,
    hang_up,
    prepare,
    receive_reply,
    send_request,
)

_GRACE_SECONDS = 10.0
"""By how much the server may be later than the wait that it was asked for."""
_ATTEMPT_SECONDS = 3.0
_RETRY_SECONDS = 0.1

Address = tuple[str, int]


class StoreClient:
    """A `Store` that another process serves.

    Calls may come from several threads; each that waits has a connection of its own. The first connection is the
    watch's: its end is this rank's end, for all others.

    Args:
        find: where the server may be, the likeliest first, and the job's token; asked again until somebody answers
            there. An OSError means: not known yet.
        rank: this rank.
        size: the number of ranks.
        member: this process.
        timeout: longest time for connecting, and for sending a value.

    Raises:
        PeerError: nobody answers.
        UserError: the server belongs to another job, or has this rank already.
    """

    def __init__(
        self, find: Callable[[], tuple[Sequence[Address], str]], rank: int, size: int, member: Member, timeout: float
    ) -> None:
        self.server = "rank 0"
        """What messages call the process that holds the store."""
        self._token = ""
        self._rank = rank
        self._timeout = timeout
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._idle: list[socket.socket] = []
        self._closed = False
        hello = json.dumps({"size": size, **asdict(member)}).encode()
        self._address, self._watching = self._find(find, hello)

    def put(self, key: str, value: Value, reads: int = 0) -> None:
        self._call(Request(Command.PUT, key, value, reads=reads))

    def take(self, key: str, seconds: float, owner: int | None = None) -> Value | None:
        return self._call(Request(Command.TAKE, key, seconds=seconds, number=-1 if owner is None else owner))

    def watch(self, state: State, seconds: float) -> str | None:
        """`Store.watch`; for one thread alone."""
        request = Request(Command.WATCH, value=json.dumps(asdict(state)).encode(), seconds=seconds)
        try:
            news = self._exchange(self._watching, request)
        except OSError as error:
            raise self._broken(error) from error
        return None if news is None else news.decode()

    def states(self) -> dict[int, State]:
        found = self._call(Request(Command.STATES))
        return {int(rank): State(**state) for rank, state in json.loads(found or b"{}").items()}

    def fail(self, message: str) -> None:
        self._call(Request(Command.FAIL, value=message.encode()))

    def leave(self, state: State) -> None:
        self._call(Request(Command.LEAVE, value=json.dumps(asdict(state)).encode()))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            lines = [*self._open, self._watching]
            self._open.clear()
            self._idle.clear()
        for line in lines:
            hang_up(line)

    # -- connections --------------------------------------------------------------------------------

    def _find(
        self, find: Callable[[], tuple[Sequence[Address], str]], hello: bytes
    ) -> tuple[Address, socket.socket]:
        """Join over the first address that answers, until the timeout."""
        deadline = time.monotonic() + self._timeout
        failure: OSError | None = None
        while time.monotonic() < deadline or failure is None:
            try:
                addresses, self._token = find()
            except OSError as error:
                addresses, failure = [], error
            for address in addresses:
                try:
                    return address, self._connect(
                        address, Request(Command.JOIN, self._token, hello, number=self._rank)
                    )
                except OSError as error:
                    failure = OSError(f"{address[0]}:{address[1]}: {error}")
            time.sleep(_RETRY_SECONDS)
        raise PeerError(f"rank 0 does not answer within {self._timeout:g} s: {failure}")

    def _connect(self, address: Address, request: Request) -> socket.socket:
        """A connection that has introduced itself."""
        line = socket.create_connection(address, timeout=min(_ATTEMPT_SECONDS, self._timeout))
        try:
            if line.getsockname() == line.getpeername():  # TCP may connect a port to itself while nobody listens there
                raise ConnectionRefusedError("nobody listens")
            prepare(line)
            self._exchange(line, request)
        except BaseException:
            hang_up(line)
            raise
        return line

    def _call(self, request: Request) -> Value | None:
        try:
            with self._line() as line:
                return self._exchange(line, request)
        except OSError as error:
            raise self._broken(error) from error

    @contextmanager
    def _line(self) -> Iterator[socket.socket]:
        """A connection that nobody uses at the moment; after an error it is not used again."""
        line = self._borrow()
        try:
            yield line
        except BaseException:
            with self._lock:
                self._open.discard(line)
            hang_up(line)
            raise
        with self._lock:
            if line in self._open:
                self._idle.append(line)

    def _exchange(self, line: socket.socket, request: Request) -> Value | None:
        """The value in the server's reply, None where nothing came in time."""
        line.settimeout(self._timeout + _GRACE_SECONDS)
        send_request(line, request)
        line.settimeout(request.seconds + _GRACE_SECONDS)
        outcome, value = receive_reply(line)
        if outcome is Outcome.REFUSED:
            raise UserError(value.decode())
        if outcome is Outcome.FAILED:
            raise PeerError(value.decode())
        return None if outcome is Outcome.ABSENT else value

    def _borrow(self) -> socket.socket:
        with self._lock:
            if self._closed:
                raise AbortedError("the store was closed")
            if self._idle:
                return self._idle.pop()
        line = self._connect(self._address, Request(Command.ATTACH, self._token, number=self._rank))
        with self._lock:
            self._open.add(line)
            closed = self._closed
        if closed:
            hang_up(line)
        return line

    def _broken(self, error: OSError) -> PeerError:
        if self._closed:
            return AbortedError("the store was closed")
        if isinstance(error, TimeoutError):
            return PeerError(f"{self.server} does not answer")
        return PeerError(f"{self.server} ended unexpectedly: it was killed, crashed or lost its network ({error})")
