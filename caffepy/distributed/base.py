"""A process group without its operations: start and end, errors, and stragglers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import NoReturn, TypeVar

from caffepy.distributed.arrays import Buffer
from caffepy.distributed.handle import Handle
from caffepy.distributed.membership import Membership
from caffepy.distributed.stragglers import find_gone, find_stragglers
from caffepy.errors import PeerError, RunError, UserError
from caffepy.parallel.communicators.collectives import Collective, Op
from caffepy.parallel.communicators.communicator import Communicator
from caffepy.parallel.control.describe_error import describe_error
from caffepy.parallel.control.heartbeat import Heartbeat
from caffepy.parallel.control.monitor import Monitor
from caffepy.parallel.store.records import DeviceStatus, Failure

_NEWS_SECONDS = 1.0
"""How long the monitor may take to hear why a connection failed."""

G = TypeVar("G", bound="BaseGroup")


class _StragglerError(PeerError):
    """The message names the straggler already."""


class BaseGroup:
    """Processes that belong together.

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
        self.failure: str | None = None
        """The error of another rank that failed; every later operation raises it."""
        self.communicator = communicator
        self._membership = membership
        self._lock = threading.Lock()
        self._failed = threading.Event()
        self._heartbeat = Heartbeat("")
        self.destroyed = False
        """Whether it is left."""
        self._monitor = Monitor(membership.channel, self._statuses, self._hear)
        if self.size > 1:
            self._monitor.start()

    @property
    def rank(self) -> int:
        """From 0."""
        return self._membership.rank

    @property
    def name(self) -> str:
        """This process, as messages call it."""
        return self._membership.name(self.rank)

    @property
    def size(self) -> int:
        """The number of processes."""
        return self._membership.size

    @property
    def local_rank(self) -> int:
        """This process's number among those of its machine."""
        return self._membership.local_rank

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

    def __enter__(self: G) -> G:
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
    def reporting(self, collective: Collective) -> Iterator[None]:
        """Put rank and collective before an error's message."""
        where = f"{self.name}: {self._describe(collective)}"
        try:
            yield
        except UserError as error:
            raise UserError(f"{where}: {error}") from error.__cause__
        except PeerError as error:
            if not isinstance(error, _StragglerError):
                self._failed.wait(_NEWS_SECONDS)
            raise PeerError(f"{where}: {self.failure or error}") from error.__cause__

    @contextmanager
    def waiting(self, collective: Collective) -> Iterator[None]:
        """As `reporting`, while other ranks may ask for whom this one waits."""
        with self._heartbeat.waiting(self._describe(collective)), self.reporting(collective):
            yield

    def look(self, waits_for: Sequence[int]) -> None:
        """While an operation waits: end the wait if a rank has left that will not come any more.

        Raises:
            PeerError: so it is.
        """
        gone = find_gone(self._membership, self._heartbeat.collectives, waits_for)
        if gone:
            raise _StragglerError(f"waits for {gone}")

    def give_up(self, collective: Collective, waits_for: Sequence[int], seconds: float) -> NoReturn:
        """Raise the error of a wait that timed out, with the stragglers.

        Raises:
            PeerError: always.
        """
        stragglers = find_stragglers(self._membership, self._heartbeat.collectives, collective, waits_for)
        nobody = f"an operation that all ranks have begun: {self.backend} or the network is stuck"
        raise _StragglerError(f"has waited {seconds:g} s for {stragglers or nobody}")

    # -- for operations -----------------------------------------------------------------------------

    def start(self, collective: Collective, buffers: Sequence[Buffer], async_op: bool) -> Handle:
        """Start an operation, and unless `async_op` wait until it is done.

        Args:
            collective: what to start.
            buffers: of the arguments that are written.
            async_op: do not wait.
        """
        with self.reporting(collective):
            if self.destroyed:
                raise UserError("the process group was destroyed")
            if self.failure is not None:
                raise PeerError(self.failure)
            with self._lock:  # counted in the order in which the communicator sees them
                self._heartbeat.collectives += collective.pattern is not None
                work = self.communicator.start(collective)
        handle = Handle(self, collective, work, buffers)
        if not async_op:
            handle.wait()
        return handle

    @contextmanager
    def calling(self, name: str) -> Iterator[None]:
        """Put rank and operation before the message of a UserError about arguments."""
        try:
            yield
        except UserError as error:
            raise UserError(f"{self.name}: {name}: {error}") from None

    def _describe(self, collective: Collective) -> str:
        if collective.pattern is not None:
            return collective.describe(self.size)
        return f"{collective.op.value} {'to' if collective.op is Op.SEND else 'from'} rank {collective.peer}"

    def _statuses(self) -> list[DeviceStatus]:
        return [self._heartbeat.status(self.rank, self._membership.members[self.rank].host)]

    def _hear(self, failure: Failure) -> None:
        """Another rank has failed, or the control plane of this one; called by the monitor's thread."""
        if not failure.reported:
            self._membership.channel.fail(failure.message)
        self._fail(failure.message)

    def _fail(self, message: str) -> None:
        """Wake whoever waits here."""
        if self.failure is None:
            self.failure = message
            self._failed.set()
            self.communicator.abort()
