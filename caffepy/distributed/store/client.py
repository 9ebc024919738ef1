"""Another rank's end of the control channel."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from caffepy.distributed.store.store import ControlChannel
from caffepy.distributed.store.wire import (
    CONTROL,
    CONTROL_LIMIT,
    DATA,
    VALUE_LIMIT,
    DeviceStatus,
    Failure,
    Frame,
    Handshake,
    Kind,
    Member,
    Value,
    WireError,
    decode,
    decode_list,
    encode,
    hang_up,
    introduce,
    prepare,
    receive_frame,
    send_frame,
)
from caffepy.errors import AbortedError, PeerError

_GRACE_SECONDS = 10.0
_CONNECT_SECONDS = 3.0
HANDSHAKE_SECONDS = 10.0
"""How long one attempt waits for the server, in whose queue strangers may be before this rank."""
_RETRY_SECONDS = 0.1

Address = tuple[str, int]


class ControlClient(ControlChannel):
    """The channel of a rank whose store is in another process.

    One connection carries heartbeats and news. Values have others: each thread that waits for one uses its own.

    Args:
        find: where the server may be, the likeliest first, and the job's secret; asked again until a server answers
            there. An OSError means: not known yet.
        rank: this rank.
        size: the number of ranks.
        member: this process.
        timeout: longest time for connecting, and for sending a value.
        grace: by how many seconds the server may be later than the wait that it was asked for.

    Raises:
        PeerError: no server answers.
        UserError: the server belongs to another job, or has this rank already.
    """

    def __init__(
        self,
        find: Callable[[], tuple[Sequence[Address], str]],
        rank: int,
        size: int,
        member: Member,
        timeout: float,
        grace: float = _GRACE_SECONDS,
    ) -> None:
        self._server = "rank 0"
        self._hello = Handshake(member.host, member.machine, member.process, rank, size)
        self._timeout = timeout
        self._grace = grace
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._open: set[socket.socket] = set()
        self._idle: list[socket.socket] = []
        self._closed = False
        self._control = self._join(find)
        # poll, because select cannot take descriptors above 1023, which a process with many files has.
        self._news = select.poll()
        self._news.register(self._control, select.POLLIN)

    def put(self, key: str, value: Value, reads: int = 0) -> None:
        self._ask(Frame(Kind.PUT, value, key, number=reads))

    def take(self, key: str, seconds: float, owner: int | None = None) -> Value | None:
        reply = self._ask(Frame(Kind.TAKE, b"", key, seconds, -1 if owner is None else owner))
        return None if reply.kind is Kind.ABSENT else reply.value

    def watch(self, statuses: Sequence[DeviceStatus], seconds: float) -> Failure | None:
        self._send(Frame(Kind.HEARTBEAT, encode(statuses)))
        # The wait for news is the pause between two heartbeats: no second thread and no second timer.
        if not self._news.poll(1000.0 * seconds):
            return None
        try:
            frame = receive_frame(self._control, CONTROL_LIMIT)
            # An empty failure answers `leave`.
            return decode(Failure, frame.value) if frame.value else None
        except OSError as error:
            raise self._broken(error) from error

    def statuses(self) -> list[DeviceStatus]:
        return decode_list(DeviceStatus, self._ask(Frame(Kind.STATUSES)).value)

    def publish(self, failure: Failure) -> None:
        self._send(Frame(Kind.FAIL, encode(failure.as_sent())))

    def leave(self, statuses: Sequence[DeviceStatus]) -> None:
        self._send(Frame(Kind.LEAVE, encode(statuses)))

    def close(self) -> None:
        # Taken off the lists under the lock; a connection that `_borrow` makes meanwhile finds `_closed`.
        with self._lock:
            self._closed = True
            lines = [*self._open, self._control]
            self._open.clear()
            self._idle.clear()
        for line in lines:
            hang_up(line)

    # -- connections --------------------------------------------------------------------------------

    def _join(self, find: Callable[[], tuple[Sequence[Address], str]]) -> socket.socket:
        """Connect to the first address where the server answers, until the timeout."""
        deadline = time.monotonic() + self._timeout
        failure: OSError | None = None
        # At least one attempt, however short the timeout is: the message needs a reason.
        while time.monotonic() < deadline or failure is None:
            try:
                # Asked anew in each round: the file of `file://` may still be one of an earlier run, or not be there
                # yet.
                addresses, self._secret = find()
            except OSError as error:
                addresses, failure = [], error
            for self._address in addresses:
                try:
                    return self._connect(CONTROL)
                except OSError as error:
                    failure = OSError(f"{self._address[0]}:{self._address[1]}: {error}")
            time.sleep(_RETRY_SECONDS)
        raise PeerError(f"rank 0 does not answer within {self._timeout:g} s: {failure}")

    def _connect(self, role: str) -> socket.socket:
        """A connection that has introduced itself."""
        # A short limit for each address: of rank 0's addresses some may be in networks that drop packets silently.
        line = socket.create_connection(self._address, timeout=min(_CONNECT_SECONDS, self._timeout))
        try:
            if line.getsockname() == line.getpeername():  # without a server TCP may connect a port to itself
                raise ConnectionRefusedError("no server listens")
            prepare(line)
            line.settimeout(min(HANDSHAKE_SECONDS, self._timeout))
            self._server = introduce(line, self._secret, replace(self._hello, role=role))
        except BaseException:
            hang_up(line)
            raise
        return line

    def _connect_again(self) -> socket.socket:
        """A further connection, until the timeout: strangers may keep the server busy."""
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                return self._connect(DATA)
            # Nothing listens there any more: rank 0 has ended, and waiting will not help.
            except ConnectionRefusedError:
                raise
            except OSError:
                if time.monotonic() > deadline:
                    raise
            if self._closed:
                raise AbortedError("the store was closed")
            time.sleep(_RETRY_SECONDS)

    def _send(self, frame: Frame) -> None:
        """Write to the control connection; `watch` notices where it is broken."""
        # The monitor's heartbeats and another thread's failure share the connection.
        with self._sending:
            try:
                send_frame(self._control, frame)
            except OSError:
                with suppress(OSError):  # part of a frame may have been sent: nothing can follow it
                    self._control.shutdown(socket.SHUT_WR)

    def _ask(self, frame: Frame) -> Frame:
        """The server's reply to a frame, over a connection that no other thread uses meanwhile."""
        try:
            # A connection for each thread that waits: replies carry no number, so two requests must not share one.
            line = self._borrow()
            try:
                reply = self._exchange(line, frame)
            except BaseException:
                self._open.discard(line)
                hang_up(line)
                raise
        except OSError as error:
            raise self._broken(error) from error
        with self._lock:
            if line in self._open:
                self._idle.append(line)
        if reply.kind is Kind.FAILED:
            raise PeerError(reply.value.decode())
        return reply

    def _exchange(self, line: socket.socket, frame: Frame) -> Frame:
        line.settimeout(self._timeout + self._grace)
        send_frame(line, frame)
        # The server answers an expired wait by ABSENT. Only a server that does not answer at all uses up the grace.
        line.settimeout(frame.seconds + self._grace)
        reply = receive_frame(line, VALUE_LIMIT)
        if reply.kind not in (Kind.DONE, Kind.ABSENT, Kind.FAILED):
            raise WireError(f"{reply.kind.name} is no reply")
        return reply

    def _borrow(self) -> socket.socket:
        with self._lock:
            if self._closed:
                raise AbortedError("the store was closed")
            if self._idle:
                return self._idle.pop()
        line = self._connect_again()
        with self._lock:
            self._open.add(line)
            # `close` may have run while this connected, and has not seen the connection.
            closed = self._closed
        if closed:
            hang_up(line)
        return line

    def _broken(self, error: OSError) -> PeerError:
        if self._closed:
            return AbortedError("the store was closed")
        if isinstance(error, TimeoutError):
            return PeerError(f"{self._server} does not answer")
        return PeerError(f"{self._server} ended unexpectedly: it was killed, crashed or lost its network ({error})")
