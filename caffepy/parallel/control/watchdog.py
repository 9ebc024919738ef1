"""The watchdog: notices that a rank has ended or keeps the others waiting, says which, and has training ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from caffepy.errors import PeerError
from caffepy.parallel.control.heartbeat import Heartbeat
from caffepy.parallel.control.monitor import SECONDS, Monitor
from caffepy.parallel.processes.world import World
from caffepy.parallel.store.records import DeviceStatus, Failure
from caffepy.parallel.store.store import ControlChannel, lost_from_training

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
        """In a line: who waits where for whom, and what to do; `unknown` is said where there is no straggler."""
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
    if not waiting:
        return next((Stall(each, []) for each in late if each.reading), None)
    waiter = max(waiting, key=lambda each: each.collectives)
    stragglers = [each for each in statuses if each.collectives < waiter.collectives]
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
        super().__init__(channel, self._statuses, self._end, min(SECONDS, timeout / 4))
        self._world = world
        self._heartbeats = heartbeats
        self.timeout = timeout
        self._end_training = on_failure

    def stop(self) -> None:
        super().stop()
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
        self.stopping.wait(0.0 if world.rank == 1 else 1.0)
        silent = world.channel is not None and world.rank != 1 and world.local_rank != 0
        return replace(lost_from_training(world.name(0), self._statuses()), reported=silent)

    def _end(self, failure: Failure) -> None:
        if failure.status != 0:  # rank 0 has left once all have agreed that training is over
            self._end_training(failure)

    def _statuses(self) -> list[DeviceStatus]:
        return [heartbeat.status(self._world.rank, self._world.host) for heartbeat in self._heartbeats]
