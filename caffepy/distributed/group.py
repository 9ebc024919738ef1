"""The process group: its operations, its life and its errors, and handles of pending operations."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NoReturn

from caffepy.backend.types import Array
from caffepy.distributed.arrays import Arguments, Buffer, Parts, check_operator, whole_number
from caffepy.distributed.rendezvous import Membership
from caffepy.errors import PeerError, RunError, UserError
from caffepy.parallel.communicators.collectives import Collective, Op, Operator, Work
from caffepy.parallel.communicators.communicator import Communicator
from caffepy.parallel.control.describe_error import describe_error
from caffepy.parallel.control.heartbeat import Heartbeat
from caffepy.parallel.control.monitor import Monitor
from caffepy.parallel.store.records import DeviceStatus, Failure

TAG_LIMIT = 32767
"""The largest tag that every MPI allows."""
_FAILURE_SECONDS = 1.0
"""How long the monitor may take to hear why a connection failed."""
_POLL_SECONDS = 2.0
"""Seconds between checks for ranks that have left."""


class _StragglerError(PeerError):
    """The message names the straggler already."""


class ProcessGroup:
    """Processes that exchange arrays.

    All ranks call the same collectives in the same order. `all_gather` and its kin take a list with an array for each
    rank, or one array that holds them one after the other. With ``async_op=True`` an operation is only started, and the
    arrays must be left alone until the handle's `wait`; else it has ended when the call returns.

    Every operation raises a UserError for arguments that cannot be, and a PeerError where another rank failed, left or
    kept this one waiting for longer than the timeout.

    Used in a ``with`` statement, the group is destroyed at its end; an exception is told to the other ranks, and ends
    their waits.

    Args:
        backend: the communicator's name.
        membership: who belongs to it.
        communicator: carries the arrays.
        timeout: longest wait in seconds.
    """

    def __init__(self, backend: str, membership: Membership, communicator: Communicator, timeout: float) -> None:
        self.backend = backend
        self.timeout = timeout
        self.rank, self.size = membership.rank, membership.size
        self.local_rank = membership.local_rank
        """This process's number among those of its machine."""
        self.name = membership.name(self.rank)
        """This process, as messages call it."""
        self.failure: str | None = None
        """The error of another rank that failed; every later operation raises it."""
        self.communicator = communicator
        self._membership = membership
        self._lock = threading.Lock()
        self._failed = threading.Event()
        self._heartbeat = Heartbeat("")
        self.destroyed = False
        """Whether it is left."""
        self._arguments = Arguments(communicator.memory, communicator.empty, self.size)
        self.releases: list[Callable[[], None]] = []
        """Called before the communicator is closed, for objects that use it directly."""
        self._monitor = Monitor(membership.channel, self._statuses, self._on_failure)
        if self.size > 1:
            self._monitor.start()

    # -- from one rank to another -------------------------------------------------------------------

    def send(self, array: Array, destination: int, tag: int = 0) -> None:
        """Send an array to a rank that receives one of the same dtype and size with the same tag."""
        self.isend(array, destination, tag).wait()

    def recv(self, array: Array, source: int, tag: int = 0) -> None:
        """array = what rank `source` sends; messages of a tag arrive in the order in which they were sent."""
        self.irecv(array, source, tag).wait()

    def isend(self, array: Array, destination: int, tag: int = 0) -> Handle:
        """Start to send; the array must be left alone until the handle's `wait`."""
        with self.reporting("send"):
            destination, tag = self._check_message(destination, tag)
            buffer = self._arguments.array(array, "array")
        return self._start(Collective(Op.SEND, buffer.data, peer=destination, tag=tag), None, True)

    def irecv(self, array: Array, source: int, tag: int = 0) -> Handle:
        """Start to receive; the array holds the message after the handle's `wait`."""
        with self.reporting("receive"):
            source, tag = self._check_message(source, tag)
            buffer = self._arguments.array(array, "array", written=True)
        return self._start(Collective(Op.RECEIVE, None, buffer.data, peer=source, tag=tag), buffer, True)

    # -- collectives --------------------------------------------------------------------------------

    def broadcast(self, array: Array, root: int = 0, async_op: bool = False) -> Handle:
        """array = the root's array."""
        with self.reporting("broadcast"):
            root = self._check_rank(root, "root")
            buffer = self._arguments.array(array, "array", written=root != self.rank)
        if root == self.rank:
            return self._start(Collective(Op.BROADCAST, buffer.data, None, peer=root), None, async_op)
        return self._start(Collective(Op.BROADCAST, None, buffer.data, peer=root), buffer, async_op)

    def all_reduce(self, array: Array, operator: Operator = Operator.SUM, async_op: bool = False) -> Handle:
        """array = operator(all ranks' arrays), element by element, on every rank."""
        with self.reporting("all_reduce"):
            buffer = self._arguments.array(array, "array", written=True)
            operator = check_operator(operator, array)
        return self._start(Collective(Op.ALL_REDUCE, buffer.data, buffer.data, operator), buffer, async_op)

    def reduce(self, array: Array, root: int = 0, operator: Operator = Operator.SUM, async_op: bool = False) -> Handle:
        """On the root: array = operator(all ranks' arrays); the others' arrays stay as they are."""
        with self.reporting("reduce"):
            root = self._check_rank(root, "root")
            own = self._arguments.array(array, "array", written=root == self.rank)
            operator = check_operator(operator, array)
        result = own if root == self.rank else None
        return self._start(Collective(Op.REDUCE, own.data, _data(result), operator, root), result, async_op)

    def all_gather(self, outputs: Parts, array: Array, async_op: bool = False) -> Handle:
        """outputs[i] = the array of rank i, on every rank."""
        with self.reporting("all_gather"):
            own = self._arguments.array(array, "array")
            gathered = self._arguments.parts(outputs, "outputs", array, written=True)
        return self._start(Collective(Op.ALL_GATHER, own.data, gathered.data), gathered, async_op)

    def gather(self, array: Array, outputs: Parts | None = None, root: int = 0, async_op: bool = False) -> Handle:
        """On the root: outputs[i] = the array of rank i; the others give no outputs."""
        with self.reporting("gather"):
            root = self._check_rank(root, "root")
            own = self._arguments.array(array, "array")
            gathered = self._at_root(outputs, "outputs", array, root, written=True)
        return self._start(Collective(Op.GATHER, own.data, _data(gathered), peer=root), gathered, async_op)

    def scatter(self, array: Array, inputs: Parts | None = None, root: int = 0, async_op: bool = False) -> Handle:
        """array = the root's inputs[rank]; the others give no inputs."""
        with self.reporting("scatter"):
            root = self._check_rank(root, "root")
            own = self._arguments.array(array, "array", written=True)
            given = self._at_root(inputs, "inputs", array, root)
        return self._start(Collective(Op.SCATTER, _data(given), own.data, peer=root), own, async_op)

    def reduce_scatter(
        self, array: Array, inputs: Parts, operator: Operator = Operator.SUM, async_op: bool = False
    ) -> Handle:
        """array = operator(all ranks' inputs[rank])."""
        with self.reporting("reduce_scatter"):
            own = self._arguments.array(array, "array", written=True)
            given = self._arguments.parts(inputs, "inputs", array)
            operator = check_operator(operator, array)
        return self._start(Collective(Op.REDUCE_SCATTER, given.data, own.data, operator), own, async_op)

    def all_to_all(self, outputs: Parts, inputs: Parts, async_op: bool = False) -> Handle:
        """outputs[i] = inputs[rank] of rank i; all parts have one shape."""
        with self.reporting("all_to_all"):
            like = self._arguments.first(inputs, "inputs")
            given = self._arguments.parts(inputs, "inputs", like)
            taken = self._arguments.parts(outputs, "outputs", like, written=True)
        return self._start(Collective(Op.ALL_TO_ALL, given.data, taken.data), taken, async_op)

    def barrier(self, async_op: bool = False) -> Handle:
        """Wait until all ranks are here; on GPUs, until the operations before it on the current stream are done."""
        return self._start(Collective(Op.BARRIER), None, async_op)

    # -- arguments ----------------------------------------------------------------------------------

    def _at_root(self, parts: Parts | None, name: str, like: Array, root: int, written: bool = False) -> Buffer | None:
        """Arrays that only the root passes."""
        if (root == self.rank) != (parts is not None):
            raise UserError(f"{name} are {'missing on' if parts is None else 'only for'} the root, rank {root}")
        return None if parts is None else self._arguments.parts(parts, name, like, written)

    def _check_rank(self, rank: Any, name: str) -> int:
        number = whole_number(rank)
        if number is None or not 0 <= number < self.size:
            raise UserError(f"{name} {rank!r} is not a rank of this group: they are 0 to {self.size - 1}")
        return number

    def _check_message(self, peer: int, tag: int) -> tuple[int, int]:
        """Peer and tag as Python integers: transports may take no others."""
        other, number = self._check_rank(peer, "rank"), whole_number(tag)
        if other == self.rank:
            raise UserError("a rank cannot send to itself")
        if number is None or not 0 <= number <= TAG_LIMIT:
            raise UserError(f"tag {tag!r} is not an integer from 0 to {TAG_LIMIT}")
        if number and self.backend == "nccl":
            raise UserError("NCCL knows no tags: leave it out")
        return other, number

    # -- the end ------------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Leave the group; rank 0, which holds the store, waits for all others. Callable twice.

        Raises:
            PeerError: the others do not leave within the timeout.
        """
        with self._lock:
            if self.destroyed:
                return
            self.destroyed = True
        channel = self._membership.channel
        for release in self.releases:
            release()
        self._monitor.stop()
        late: list[int] = []
        if self.failure is None:
            late = channel.wait_alone(self.timeout)
            self.communicator.close()
        channel.close()
        if late:
            names = ", ".join(map(self._membership.name, late))
            raise PeerError(f"{self.name}: destroy_process_group: has waited {self.timeout:g} s for {names} to leave")

    def abort(self, message: str) -> None:
        """End all ranks' waits with a message, and leave."""
        self._membership.channel.fail(message)
        self._fail(message)
        self.destroy()

    def describe_failure(self, error: BaseException) -> str:
        """An error of this process as the others are told of it."""
        text = describe_error(error)
        return text if text.startswith(self.name) else f"{self.name}: {text}"

    def end_world(self) -> None:
        """After a failure, at the very end of a script: end MPI's processes, if it is MPI that started them."""
        if self._membership.world is not None and self.size > 1:
            self._membership.world.end(RunError.exit_status)

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.destroy()
        else:
            self.abort(self.failure or self.describe_failure(error))

    # -- for handles --------------------------------------------------------------------------------

    @contextmanager
    def reporting(self, what: str) -> Iterator[None]:
        """Put rank and operation before an error's message."""
        where = f"{self.name}: {what}"
        try:
            yield
        except UserError as error:
            raise UserError(f"{where}: {error}") from error.__cause__
        except PeerError as error:
            if not isinstance(error, _StragglerError):
                self._failed.wait(_FAILURE_SECONDS)
            raise PeerError(f"{where}: {self.failure or error}") from error.__cause__

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """As `reporting`, while other ranks may ask for whom this one waits."""
        with self._heartbeat.waiting(what), self.reporting(what):
            yield

    @property
    def heartbeat(self) -> Heartbeat:
        """What this rank is doing."""
        return self._heartbeat

    def name_of(self, rank: int) -> str:
        """A rank, as messages call it."""
        return self._membership.name(rank)

    @contextmanager
    def bounded(self, what: str) -> Iterator[None]:
        """As `waiting`, for who uses the communicator by itself: when the timeout has passed, the wait is ended.

        Raises:
            PeerError: the others did not come in time, or one of them failed.
        """
        if self.failure is not None:
            raise PeerError(f"{self.name}: {what}: {self.failure}")
        timer = threading.Timer(self.timeout, self._expire, (what,))
        timer.daemon = True
        timer.start()
        self._heartbeat.collectives += 1
        try:
            with self.waiting(what):
                yield
        finally:
            timer.cancel()

    def _expire(self, what: str) -> None:
        """End a wait that has lasted too long, here and elsewhere."""
        try:
            self.give_up(what, (), self.timeout)
        except PeerError as error:
            self._membership.channel.fail(f"{self.name}: {what}: {error}")
            self._fail(str(error))

    def raise_if_departed(self, waits_for: Sequence[int]) -> None:
        """Raise PeerError if a rank that an operation waits for has left the group."""
        departed = self._membership.find_departed(self._heartbeat.collectives, waits_for)
        if departed:
            raise _StragglerError(f"waits for {departed}")

    def give_up(self, what: str, waits_for: Sequence[int], seconds: float) -> NoReturn:
        """Raise the PeerError of a wait that timed out, with the stragglers."""
        stragglers = self._membership.find_stragglers(self._heartbeat.collectives, what, waits_for)
        unknown = f"an operation that all ranks have begun: {self.backend} or the network is stuck"
        raise _StragglerError(f"has waited {seconds:g} s for {stragglers or unknown}")

    def _start(self, collective: Collective, written: Buffer | None, async_op: bool) -> Handle:
        """Start an operation, and unless `async_op` wait until it is done and unpack what is written."""
        what = self._describe(collective)
        with self.reporting(what):
            if self.destroyed:
                raise UserError("the process group was destroyed")
            if self.failure is not None:
                raise PeerError(self.failure)
            with self._lock:  # counted in the order in which the communicator sees them
                self._heartbeat.collectives += collective.pattern is not None
                work = self.communicator.start(collective)
        handle = Handle(self, what, work, written)
        if not async_op:
            handle.wait()
        return handle

    def _describe(self, collective: Collective) -> str:
        if collective.pattern is not None:
            return collective.describe(self.size)
        return f"{collective.op.value} {'to' if collective.op is Op.SEND else 'from'} rank {collective.peer}"

    def _statuses(self) -> list[DeviceStatus]:
        return [self._heartbeat.status(self.rank, self._membership.members[self.rank].host)]

    def _on_failure(self, failure: Failure) -> None:
        """Another rank has failed, or the control plane of this one; called by the monitor's thread."""
        if not failure.reported:
            self._membership.channel.fail(failure.message)
        self._fail(failure.message)

    def _fail(self, message: str) -> None:
        """Wake all waits of this process."""
        if self.failure is None:
            self.failure = message
            self._failed.set()
            self.communicator.abort()


class Handle:
    """A pending operation. Its arrays must be left alone until it is done.

    Args:
        group: where it was started.
        what: was called, as messages say it.
        work: the communicator's.
        written: unpacked into its arrays when it is done.
    """

    def __init__(self, group: ProcessGroup, what: str, work: Work, written: Buffer | None) -> None:
        self._group = group
        self._what = what
        self._work = work
        self._written = written
        self._lock = threading.Lock()
        self._done = False

    def wait(self, timeout: float | None = None) -> None:
        """Block until it is done; results are in their arrays then.

        Args:
            timeout: seconds; None: the group's. The operation goes on after a wait that was too short.

        Raises:
            PeerError: it did not end in time (the message says for whom it waits), or another rank failed.
            UserError: another rank called something else.
        """
        seconds = self._group.timeout if timeout is None else timeout
        deadline = time.monotonic() + seconds
        with self._lock:
            if self._done:
                return
            with self._group.waiting(self._what):
                while not self._finish(max(0.0, min(_POLL_SECONDS, deadline - time.monotonic()))):
                    if time.monotonic() >= deadline:
                        self._group.give_up(self._what, self._work.waits_for, seconds)
                    self._group.raise_if_departed(self._work.waits_for)

    def is_completed(self) -> bool:
        """Whether it is done; does not block. Errors as in `wait`."""
        with self._lock:
            if not self._done:
                with self._group.reporting(self._what):
                    self._finish(0.0)
            return self._done

    def _finish(self, seconds: float) -> bool:
        if self._work.wait(seconds):
            if self._written is not None:
                self._written.unpack()
            self._written = None
            self._done = True
        return self._done


def _data(buffer: Buffer | None) -> Array | None:
    return None if buffer is None else buffer.data
