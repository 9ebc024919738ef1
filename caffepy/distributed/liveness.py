"""Whether the other ranks are alive: heartbeats, the root's monitor, and a watchdog that ends the job."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from traceback import walk_tb

from caffepy.data.prefetch import awaited_data
from caffepy.distributed.processes.world import World
from caffepy.distributed.store.store import ControlChannel, lost_from_training
from caffepy.distributed.store.wire import DeviceStatus, Failure
from caffepy.errors import PeerError, describe
from caffepy.layers.layer import Layer
from caffepy.utils.clocks import suspend_aware_seconds


def describe_error(error: BaseException) -> str:
    """`caffepy.errors.describe`, and the layer that was at work: the traceback holds its methods' `self`."""
    text = describe(error)
    owners = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
    layer = next((owner for owner in reversed(owners) if isinstance(owner, Layer)), None)
    if layer is None or f"'{layer.name}'" in text:
        return text
    return f"layer '{layer.name}' ({layer.type}): {text}"


class Heartbeat:
    """What one solver thread, or process group, is doing; read by the control plane's thread.

    Args:
        device: what the device is called.
        iteration: asks the solver for its iteration.
        begun: the first iteration is over; else it is when the iteration changes after `begin` was called.
    """

    def __init__(self, device: str, iteration: Callable[[], int] = lambda: 0, begun: bool = True) -> None:
        self.device = device
        self.iteration = iteration
        self.collectives = 0
        """How many operations that need all devices were begun."""
        self._first: int | None = -1 if begun else None
        # One tuple, replaced whole: the reader needs no lock to see values that belong together.
        self._now: tuple[str | Callable[[], str], float] = ("", suspend_aware_seconds())
        self._thread = 0

    def begin(self) -> None:
        """The first iteration begins."""
        self._first = self.iteration()

    @contextmanager
    def collective(self, what: str | Callable[[], str]) -> Iterator[None]:
        """Mark an operation that waits for all devices, by its name or by a function that describes its progress.

        Called by the solver thread.
        """
        # All devices begin the same operations in the same order: the device with the smallest count is the one that
        # the others wait for.
        self.collectives += 1
        self._mark(what)
        yield  # an operation that raised stays marked: the thread ends
        self._mark("")

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Mark the wait for an operation that was begun, and counted, before."""
        self._mark(what)
        try:
            yield
        finally:
            self._mark("")

    def status(self, rank: int, host: str) -> DeviceStatus:
        """A snapshot, for a process's rank and host."""
        waiting, begun = self._now
        # A thread that waits for others may also have data to wait for later; its present wait counts.
        data = None if waiting else awaited_data(self._thread)
        reading, begun = data or ("", begun)
        seconds = suspend_aware_seconds() - begun
        what = waiting if isinstance(waiting, str) else waiting()
        iteration = self.iteration()
        starting = self._first is None or iteration == self._first
        return DeviceStatus(
            rank, host, os.getpid(), self.device, iteration, self.collectives, what, seconds, reading, starting
        )

    def _mark(self, waiting: str | Callable[[], str]) -> None:
        self._thread = threading.get_ident()
        self._now = waiting, suspend_aware_seconds()


SECONDS = 0.5
"""Between two heartbeats."""
_JOIN_SECONDS = 5.0


class Monitor:
    """Hears of the first failure, until it is stopped.

    Args:
        channel: not closed here.
        statuses: what this process's devices do.
        on_failure: called once, in the monitor's thread, with what happened; also where the thread itself fails.
        seconds: between two heartbeats.
    """

    def __init__(
        self,
        channel: ControlChannel,
        statuses: Callable[[], Sequence[DeviceStatus]],
        on_failure: Callable[[Failure], None],
        seconds: float = SECONDS,
    ) -> None:
        self.channel = channel
        self.statuses = statuses
        self.seconds = seconds
        self.stopping = threading.Event()
        self._on_failure = on_failure
        self._thread = threading.Thread(target=self._run, name="control monitor", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Leave in good order. Idempotent."""
        if not self.stopping.is_set():
            self.stopping.set()
            # Said before the thread ends, so that the end of the connection is no failure.
            self.channel.leave(self.statuses())
        # The monitor itself may call this, from `on_failure`.
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)

    def look(self) -> Failure | None:
        """What this process finds out by itself; asked after each heartbeat."""
        return None

    def describe_end_of_root(self, error: PeerError) -> Failure:
        """The failure where rank 0 has ended."""
        return Failure(str(error))

    def _run(self) -> None:
        failure = None
        try:
            while failure is None and not self.stopping.is_set():
                failure = self._hear()
                if failure is None and (found := self.look()) is not None:
                    # A process that was suspended reads old heartbeats first, and then the others' reports of them.
                    failure = self._hear() or found
        except BaseException as error:
            # Without this thread a hang would go unnoticed, so its error ends the job
            # (docs/decisions/0013-never-hang.md).
            failure = Failure(f"the control plane of this process ended by {describe(error)}", error=error)
            self.statuses = list  # they may be what failed, and `stop` asks for them again
        if failure is not None and not self.stopping.is_set():
            self._on_failure(failure)

    def _hear(self) -> Failure | None:
        try:
            return self.channel.watch(self.statuses(), self.seconds)
        except PeerError as error:
            return self.describe_end_of_root(error)


_START_SECONDS = 60.0
"""How much longer a wait may be until the first iteration is over: kernels are compiled and data opened until then."""
_LEAVE_SECONDS = 10.0
"""How long rank 0, whose store may be all that connects the ranks, stays for the others to leave."""


@dataclass(frozen=True)
class Stall:
    """A wait that is too long.

    Args:
        waiter: the device that waits, the furthest ahead if there are several; for its data, where `reading` is set.
        stragglers: the devices it waits for, the furthest behind first; empty if all have begun the operation.
    """

    waiter: DeviceStatus
    stragglers: list[DeviceStatus]

    def describe(self, timeout: float, unknown: str) -> str:
        """Return a line: which device waits where for which, and what to do; `unknown` if there is no straggler."""
        waiter = self.waiter
        end = f"; look at that process, or allow more than {timeout:g} s with --timeout"
        if waiter.reading:
            return (
                f"{waiter} has waited {waiter.seconds:.0f} s in iteration {waiter.iteration} for {waiter.reading}; "
                f"look at that disk or network drive, or allow more than {timeout:g} s with --timeout"
            )
        begin = f"{waiter} has waited {waiter.seconds:.0f} s in {waiter.waiting} of iteration {waiter.iteration} for "
        if not self.stragglers:
            return f"{begin}{unknown}{end}"
        first = self.stragglers[0]
        more = f", and for {len(self.stragglers) - 1} more" if len(self.stragglers) > 1 else ""
        return f"{begin}{first}, which is in iteration {first.iteration} and {first.doing}{more}{end}"


def find_stall(statuses: list[DeviceStatus], timeout: float) -> Stall | None:
    """The wait of a device for others, else for its data, for longer than `timeout` seconds; or None."""
    late = [each for each in statuses if each.seconds > timeout + (_START_SECONDS if each.starting else 0.0)]
    waiting = [each for each in late if each.waiting]
    # A device that waits for its data makes the others wait for it, and is then named as their straggler. Where no
    # device waits for another, it is named by itself.
    if not waiting:
        return next((Stall(each, []) for each in late if each.reading), None)
    # The device that is furthest ahead waits for all that have begun less; the others may wait for one of these too.
    waiter = max(waiting, key=lambda each: each.collectives)
    stragglers = [each for each in statuses if each.collectives < waiter.collectives]
    # All have begun the operation: then a suspended process holds it up, or nothing that a heartbeat shows.
    stragglers = stragglers or [each for each in statuses if each.is_silent]
    return Stall(waiter, sorted(stragglers, key=lambda each: each.collectives))


class Watchdog(Monitor):
    """A monitor that looks for devices that keep others waiting.

    Args:
        world: the processes.
        channel: to them; the watchdog closes it.
        heartbeats: this process's devices; the caller may add some.
        timeout: longest wait in seconds.
        on_failure: called once, from the watchdog's thread, when training has to end; as rank 0 it tells the user and
            then the others (`tell_failure`), unless the failure was reported.
    """

    def __init__(
        self,
        world: World,
        channel: ControlChannel,
        heartbeats: list[Heartbeat],
        timeout: float,
        on_failure: Callable[[Failure], None],
    ) -> None:
        # At least four looks within the timeout, however short that is.
        super().__init__(channel, self._statuses, self._end, min(SECONDS, timeout / 4))
        self._world = world
        self._heartbeats = heartbeats
        self.timeout = timeout
        self._end_training = on_failure

    def stop(self) -> None:
        super().stop()
        # Rank 0 has the store. Were it to close at once, the others' last requests would fail in an orderly end.
        self.channel.wait_alone(_LEAVE_SECONDS)
        self.channel.close()

    def tell_failure(self, failure: Failure) -> None:
        """Tell rank 0, which tells the user unless that was done, and then all others; as rank 0 tell all others."""
        self.channel.publish(replace(failure, reported=failure.reported or self._world.rank == 0))

    def look(self) -> Failure | None:
        """Judge the devices that are known: rank 0 knows all, others their own."""
        if self._world.rank == 0:
            stall = find_stall([each for each in self.channel.statuses() if not each.left], self.timeout)
            unknown = "an operation that all devices have begun: MPI, NCCL or the network is stuck"
        else:
            # Rank 0 sees more and speaks first, unless it is itself what hangs.
            stall = find_stall(self._statuses(), self.timeout + 4 * self.seconds + 1.0)
            unknown = f"{self._world.name(0)}, which does not answer"
        return None if stall is None else Failure(stall.describe(self.timeout, unknown))

    def describe_end_of_root(self, error: PeerError) -> Failure:
        """Rank 1 speaks; others only if they live on, and where nothing ends them the first of each machine."""
        world = self._world
        # All ranks notice the end of rank 0 within milliseconds; one message is enough. A launcher usually ends the
        # others within that second.
        self.stopping.wait(0.0 if world.rank == 1 else 1.0)
        silent = world.channel is not None and world.rank != 1 and world.local_rank != 0
        return replace(lost_from_training(world.name(0), self._statuses()), reported=silent)

    def _end(self, failure: Failure) -> None:
        if failure.status != 0:  # rank 0 has left once all have agreed that training is over
            self._end_training(failure)

    def _statuses(self) -> list[DeviceStatus]:
        return [heartbeat.status(self._world.rank, self._world.host) for heartbeat in self._heartbeats]
