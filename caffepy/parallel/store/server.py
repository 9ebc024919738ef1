"""Rank 0's end of the control channel: shows its store to the other processes of the job."""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import suppress

from caffepy.errors import PeerError, UserError
from caffepy.parallel.store.acceptor import Acceptor
from caffepy.parallel.store.handshake import CONTROL, Hello, ServerHandshake
from caffepy.parallel.store.records import DeviceStatus, Failure, Member
from caffepy.parallel.store.store import MemoryStore, RankStore
from caffepy.parallel.store.wire import (
    CONTROL_LIMIT,
    VALUE_LIMIT,
    Frame,
    Kind,
    WireError,
    decode,
    decode_list,
    encode,
    end_in_order,
    hang_up,
    prepare,
    receive_frame,
    send_frame,
)

logger = logging.getLogger(__name__)

_JOIN_SECONDS = 2.0


class ControlServer(RankStore):
    """Rank 0's channel; serves the other ranks, one thread a connection.

    The end of the connection over which a rank joined is the rank's end, unless it has left before.

    Args:
        memory: the store.
        member: this process.
        address: where to listen; an empty host means all of this machine's addresses, port 0 any free port.
        secret: what a client must know; whoever knows it belongs to the job.

    Raises:
        OSError: the address is taken or not this machine's.
    """

    def __init__(self, memory: MemoryStore, member: Member, address: tuple[str, int], secret: str = "") -> None:
        super().__init__(memory, 0)
        memory.join(0, memory.size, member)
        self._name = member.name(0)
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        listening = socket.create_server(address, family=family, backlog=1024)
        self.port = int(listening.getsockname()[1])
        self._lock = threading.Lock()
        self._lines: dict[socket.socket, threading.Thread] = {}
        self._closing = False
        self._acceptor = Acceptor(listening, secret, self._admit, self._broken)

    def wait_alone(self, seconds: float) -> list[int]:
        return self.memory.wait_alone(0, seconds)

    def close(self) -> None:
        """End all connections; whoever waits is told why."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self.memory.tell(Failure("rank 0 has left", 0, reported=True))
        self._acceptor.close()
        with self._lock:
            threads = list(self._lines.items())
        for line, _ in threads:
            with suppress(OSError):
                line.shutdown(socket.SHUT_RD)  # no more requests; replies and news still go out
        for line, thread in threads:
            thread.join(_JOIN_SECONDS)
            hang_up(line)

    def _admit(self, handshake: ServerHandshake, hello: Hello) -> None:
        """Start to serve a rank; in the acceptor's thread."""
        try:
            if hello.role == CONTROL:
                self.memory.join(hello.rank, hello.size, hello)
            elif hello.rank not in self.memory.staying():
                raise UserError(f"rank {hello.rank} has not joined, or has left")
        except UserError as error:
            with suppress(OSError):
                handshake.answer(Kind.REFUSED, str(error))
            handshake.line.close()
            return
        name = f"control server, rank {hello.rank}"
        thread = threading.Thread(target=self._serve, args=(handshake, hello), name=name, daemon=True)
        with self._lock:
            self._lines[handshake.line] = thread
            thread.start()

    def _serve(self, handshake: ServerHandshake, hello: Hello) -> None:
        line, rank, is_control = handshake.line, hello.rank, hello.role == CONTROL
        lock = threading.Lock()

        def tell(failure: Failure) -> None:
            with lock, suppress(OSError):  # small, so that it fits into the kernel's buffer
                send_frame(line, Frame(Kind.NEWS, encode(failure.as_told())), socket.MSG_DONTWAIT)

        try:
            handshake.answer(Kind.DONE, self._name)
            line.settimeout(None)
            prepare(line)
            if is_control:
                self.memory.listen(rank, tell)
            while True:
                reply = self._reply(rank, receive_frame(line, CONTROL_LIMIT if is_control else VALUE_LIMIT))
                if reply is not None:
                    with lock:
                        send_frame(line, reply)
        except (OSError, MemoryError) as error:
            logger.debug("the connection to rank %d ends: %s", rank, error)
        except BaseException as error:
            self._broken(error)
            if is_control:
                return  # it stays open, so that the rank hears of this
        end_in_order(line, _JOIN_SECONDS if self._closing else 0.0)
        with self._lock:
            self._lines.pop(line, None)
        if is_control and not self._closing:
            self.memory.lose(rank)

    def _reply(self, rank: int, frame: Frame) -> Frame | None:
        """Do what a rank asks for; raises WireError where it asks for nothing that there is."""
        memory = self.memory
        if frame.kind is Kind.HEARTBEAT:
            memory.hear(rank, decode_list(DeviceStatus, frame.value))
        elif frame.kind is Kind.FAIL:
            memory.tell(decode(Failure, frame.value))
        elif frame.kind is Kind.LEAVE:
            memory.leave(rank, decode_list(DeviceStatus, frame.value))
            return Frame(Kind.NEWS)
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
            value = self.memory.take(frame.key, frame.seconds, frame.number if frame.number >= 0 else None)
        except PeerError as error:
            return Frame(Kind.FAILED, str(error).encode())
        return Frame(Kind.ABSENT) if value is None else Frame(Kind.DONE, value)

    def _broken(self, error: BaseException) -> None:
        """A thread of this server has met what should not happen: the job ends with it."""
        self.memory.tell(Failure(f"the control server ended by {type(error).__name__}: {error}", error=error))
