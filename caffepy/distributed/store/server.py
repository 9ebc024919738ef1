"""Rank 0's end of the control channel: it shows its store to the other processes, which join at rank 0's address."""

from __future__ import annotations

import errno
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from caffepy.distributed.processes.launcher import SECRET
from caffepy.distributed.store.client import Address
from caffepy.distributed.store.store import MEMBERS, MISSING, ControlChannel, LocalControlChannel, MemoryStore
from caffepy.distributed.store.wire import (
    CONTROL,
    CONTROL_LIMIT,
    VALUE_LIMIT,
    DeviceStatus,
    Failure,
    Frame,
    Handshake,
    Kind,
    Member,
    WireError,
    challenge,
    decode,
    decode_list,
    encode,
    end_in_order,
    hang_up,
    prepare,
    receive_frame,
    send_frame,
)
from caffepy.errors import CaffepyError, PeerError, UserError

logger = logging.getLogger(__name__)

PROOF_SECONDS = 5.0
"""From the accept to the proof, however slowly bytes come."""
UNPROVEN_LIMIT = 32
"""Connections without a proof at a time; further ones wait in the kernel, where they take no descriptor."""
_CROWDED_SECONDS = 0.5
"""How long a connection without a proof is kept where others wait for its slot: a rank needs milliseconds."""
_PAUSE_SECONDS = 0.1
"""Between looks at connections without a proof, and between attempts to accept where descriptors have run out."""
_IDLE_SECONDS = 1.0
_JOIN_SECONDS = 2.0


class ControlServer(LocalControlChannel):
    """Rank 0's channel; serves the other ranks, one thread a connection.

    A connection that does not prove itself in time is dropped by the thread that accepts. The end of the connection
    over which a rank joined is the rank's end, unless it has left before.

    Args:
        memory: the store.
        member: this process.
        address: where to listen; an empty host means all of this machine's addresses, port 0 any free port.
        secret: a client that knows it belongs to the job.

    Raises:
        OSError: the address is taken or not this machine's.
    """

    def __init__(self, memory: MemoryStore, member: Member, address: tuple[str, int], secret: str = "") -> None:
        super().__init__(memory, 0)
        memory.join(0, memory.size, member)
        self._name = member.name(0)
        self._secret = secret
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        # A long queue, because all ranks of a large job connect at about the same time, and further connections wait in
        # it while UNPROVEN_LIMIT are open.
        self._listening = socket.create_server(address, family=family, backlog=1024)
        self.port = int(self._listening.getsockname()[1])
        self._lock = threading.Lock()
        self._lines: dict[socket.socket, threading.Thread] = {}
        self._unproven: dict[socket.socket, float] = {}
        """When each connection without a proof was accepted, the oldest first."""
        self._closing = False
        # A daemon: a process that ends by an error must not wait for it.
        self._acceptor = threading.Thread(target=self._run, name="control server", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """End all connections; pending requests get the reason."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        # Before the connections end: without a reason, the ranks would take the end for a crash of rank 0.
        self.memory.publish(Failure("rank 0 has left", 0, reported=True))
        with suppress(OSError):  # the thread has ended by an error
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._acceptor.join(_JOIN_SECONDS)
        # The lock is free again while threads are waited for: they need it to take themselves off the list.
        with self._lock:
            threads = list(self._lines.items())
        for line, _ in threads:
            with suppress(OSError):
                line.shutdown(socket.SHUT_RD)  # no more requests; replies and news still go out
        for line, thread in threads:
            thread.join(_JOIN_SECONDS)
            hang_up(line)

    # -- the thread that accepts --------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                if self._drop_late():
                    self._accept()
                else:
                    time.sleep(_PAUSE_SECONDS)
        except BaseException as error:
            self._broken(error)
        finally:
            self._listening.close()

    def _drop_late(self) -> bool:
        """Whether a connection may be accepted, once late ones without a proof are dropped."""
        now = time.monotonic()
        with self._lock:
            crowded = len(self._unproven) >= UNPROVEN_LIMIT
            # The oldest first, so the first one that is young enough ends the search.
            for line, since in list(self._unproven.items()):
                if now - since <= (_CROWDED_SECONDS if crowded else PROOF_SECONDS):
                    break
                del self._unproven[line]
                with suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)  # its thread wakes and closes it
                # One slot is enough: a single connection is accepted at a time.
                crowded = False
        return not crowded

    def _accept(self) -> None:
        # Short waits only while there is a connection that may have to be dropped.
        self._listening.settimeout(_PAUSE_SECONDS if self._unproven else _IDLE_SECONDS)
        try:
            line, _ = self._listening.accept()
        except TimeoutError:
            return
        except OSError as error:
            if not self._closing:
                logger.debug("the control server cannot accept a connection: %s", error)
                time.sleep(_PAUSE_SECONDS)
            return
        thread = threading.Thread(target=self._serve, args=(line,), name="control server, connection", daemon=True)
        with self._lock:
            self._lines[line], self._unproven[line] = thread, time.monotonic()
            try:
                thread.start()
            except RuntimeError as error:  # the system gives no more threads
                logger.debug("the control server cannot serve a connection: %s", error)
                del self._lines[line], self._unproven[line]
                line.close()

    # -- the threads of connections -----------------------------------------------------------------

    def _serve(self, line: socket.socket) -> None:
        hello: Handshake | None = None
        try:
            hello = self._admit(line)
            self._answer(line, hello)
        except (OSError, MemoryError) as error:
            logger.debug("the control server ends a connection: %s", error)
        except BaseException as error:
            self._broken(error)
            if hello is not None and hello.role == CONTROL:
                return  # it stays open, so that the rank hears of this
        # When rank 0 leaves, its last news must arrive; a rank that has ended reads nothing any more.
        end_in_order(line, _JOIN_SECONDS if self._closing else 0.0)
        with self._lock:
            self._lines.pop(line, None)
            self._unproven.pop(line, None)
        # Whatever ended the process, its kernel has closed the connection. The store knows whether the rank had left
        # before.
        if hello is not None and hello.role == CONTROL and not self._closing:
            self.memory.lose(hello.rank)

    def _admit(self, line: socket.socket) -> Handshake:
        """Let a rank in."""
        hello, answer = challenge(line, self._secret)
        with self._lock:
            # The acceptor may have dropped it a moment before the proof came. Either of the two takes it off the list,
            # never both.
            if self._unproven.pop(line, None) is None:
                raise WireError("it has not proved itself in time")
        try:
            if hello.role == CONTROL:
                self.memory.join(hello.rank, hello.size, hello)
            # A further connection, for values, belongs to a rank that has joined over its control connection.
            elif hello.rank not in self.memory.staying():
                raise UserError(f"rank {hello.rank} has not joined, or has left")
        except UserError as error:
            answer(Kind.REFUSED, str(error))
            raise WireError(str(error)) from error
        with suppress(OSError):  # reading tells that it is broken, when the rank's end is the connection's
            answer(Kind.DONE, self._name)
            prepare(line)
        return hello

    def _answer(self, line: socket.socket, hello: Handshake) -> None:
        """Do what a rank asks for until its connection ends, which raises OSError."""
        rank, is_control, lock = hello.rank, hello.role == CONTROL, threading.Lock()

        def send(failure: Failure) -> None:
            # Never blocking: a rank that is suspended does not read, and must not keep the others from the news. A
            # connection that cannot take the frame is broken, or ends soon.
            with lock, suppress(OSError):  # small, so that it fits into the kernel's buffer
                send_frame(line, Frame(Kind.FAILURE, encode(failure.as_sent())), socket.MSG_DONTWAIT)

        # Only now: news that comes before the answer to the introduction would be taken for that answer.
        if is_control:
            self.memory.listen(rank, send)
        while True:
            reply = self._reply(rank, receive_frame(line, CONTROL_LIMIT if is_control else VALUE_LIMIT))
            if reply is not None:
                # Replies and news share the connection; a frame must go out whole.
                with lock:
                    send_frame(line, reply)

    def _reply(self, rank: int, frame: Frame) -> Frame | None:
        """Do what a rank asks for; raises WireError where it asks for nothing that there is."""
        memory = self.memory
        if frame.kind is Kind.HEARTBEAT:
            memory.record_heartbeat(rank, decode_list(DeviceStatus, frame.value))
        elif frame.kind is Kind.FAIL:
            memory.publish(decode(Failure, frame.value))
        elif frame.kind is Kind.LEAVE:
            memory.leave(rank, decode_list(DeviceStatus, frame.value))
            # An empty failure wakes the rank's monitor, which waits on this connection, so that it can end.
            return Frame(Kind.FAILURE)
        elif frame.kind is Kind.PUT:
            memory.put(frame.key, frame.value, frame.number)
            return Frame(Kind.DONE)
        elif frame.kind is Kind.TAKE:
            return self._take(frame)
        elif frame.kind is Kind.STATUSES:
            return Frame(Kind.DONE, encode(memory.statuses()))
        else:
            raise WireError(f"{frame.kind.name} is no request")
        return None

    def _take(self, frame: Frame) -> Frame:
        try:
            # This thread waits here, which is why each connection has a thread of its own.
            value = self.memory.take(frame.key, frame.seconds, frame.number if frame.number >= 0 else None)
        except PeerError as error:
            return Frame(Kind.FAILED, str(error).encode())
        return Frame(Kind.ABSENT) if value is None else Frame(Kind.DONE, value)

    def _broken(self, error: BaseException) -> None:
        """A thread of this server has met what should not happen: the job ends with it."""
        self.memory.publish(Failure(f"the control server ended by {type(error).__name__}: {error}", error=error))


# -- how ranks join ------------------------------------------------------------------------------------

_FAILURE_SECONDS = 0.2
"""How long a rank that could not join waits for another rank's failure."""


def find_secret(environment: Mapping[str, str], method: str, address: str, warns: bool) -> str:
    """The job's secret; empty where there is none, with a warning if `warns`."""
    secret = environment.get(SECRET, "")
    if not secret and warns:
        text = "%s without a secret: any process that reaches %s can join; set %s to the same random text on all ranks"
        logger.warning(text, method, address, SECRET)
    return secret


def listen(memory: MemoryStore, own: Member, address: Address, secret: str, near: bool = True) -> ControlServer:
    """Rank 0's server at the address that all ranks have.

    A host's own name often leads to a loopback address on the host itself, so other names mean all addresses.

    Args:
        memory: the store.
        own: this process.
        address: as the ranks have it.
        secret: the job's.
        near: ``localhost`` means the loopback address; else all addresses, because other ranks have another name.

    Raises:
        UserError: it is in use, or none of this machine's.
    """
    host, port = address
    alone = host.startswith("127.") or ":" in host or (near and host == "localhost")
    try:
        return ControlServer(memory, own, (host if alone else "", port), secret)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"{host}:{port} is in use: choose another port, the same on all ranks") from error
        raise UserError(f"rank 0 cannot listen at {host}:{port}: {error}") from error


def join_store(
    rank: int, own: Member, connect: Callable[[], ControlChannel], timeout: float, where: str
) -> tuple[list[Member], ControlChannel]:
    """Join the store by the channel that `connect` makes, and wait until all ranks have.

    Args:
        rank: this process's number.
        own: this process.
        connect: makes the channel.
        timeout: longest wait in seconds.
        where: what messages call the rendezvous.

    Raises:
        UserError: this rank is refused, or rank 0 cannot listen.
        PeerError: not all came in time.
    """
    deadline = time.monotonic() + timeout
    channel: ControlChannel | None = None
    try:
        channel = connect()
        # The time that connecting took counts: a caller's timeout is for all of it.
        found = channel.take(MEMBERS, max(0.0, deadline - time.monotonic()))
        if found is None:
            missing = json.loads(channel.take(MISSING, 0.0) or b"[]")
            ranks = f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing))}"
            raise PeerError(f"has waited {timeout:g} s for {ranks} to join")
        return decode_list(Member, found), channel
    except BaseException as error:
        reason = str(error) if channel is None else _withdraw(channel, error)
        if isinstance(error, (UserError, PeerError)):
            raise type(error)(f"{own.name(rank)}: {where}: {reason}") from error
        raise


def _withdraw(channel: ControlChannel, error: BaseException) -> str:
    """Leave a store that could not be joined; returns why: another rank's failure, else the broken connection."""
    reason = str(error)
    if isinstance(error, PeerError):
        with suppress(PeerError):
            failure = channel.watch([], _FAILURE_SECONDS)
            reason = reason if failure is None else failure.message
    if isinstance(error, CaffepyError):
        channel.fail(str(error))  # to close without a word would look like a crash
    channel.close()
    return reason
