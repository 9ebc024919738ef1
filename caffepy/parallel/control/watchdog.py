"""The watchdog: notices that a rank has ended or keeps the others waiting, says which, and has training ended."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from caffepy.awake import awake_seconds
from caffepy.data.prefetch import awaited_data
from caffepy.parallel.control.failure import Failure
from caffepy.parallel.control.lifeline import Event, Lifeline
from caffepy.parallel.processes.world import World

logger = logging.getLogger(__name__)

_TICK = 0.5
"""Seconds between looks, and between reports to rank 0."""
_START_SECONDS = 60.0
"""How much longer a wait may be until the first iteration is over: kernels are compiled and data opened until then."""
_SILENT_TICKS = 6
"""A process that has not reported for so many ticks is silent."""


@dataclass(frozen=True)
class DeviceState:
    """What one device is doing.

    Args:
        rank: its process.
        host: its machine.
        pid: its process's number there.
        device: ``0`` for a GPU's number, ``CPU``.
        iteration: the iteration it is in.
        collectives: how many operations that need all devices it has begun; all devices begin the same ones.
        waiting: the operation that it waits in, empty where it computes.
        seconds: for how long it has waited or computed, without the time in which its process was suspended.
        reading: what it waits for to be read, empty where its data are there; then `seconds` is for how long.
        starting: its first iteration is not over.
    """

    rank: int
    host: str
    pid: int
    device: str
    iteration: int = 0
    collectives: int = 0
    waiting: str = ""
    seconds: float = 0.0
    reading: str = ""
    starting: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}, process {self.pid}, device {self.device}"

    @property
    def doing(self) -> str:
        """What it does instead of what others wait for."""
        if self.waiting:
            return f"waits in {self.waiting}"
        return f"waits for {self.reading} to be read" if self.reading else "computes"


class Progress:
    """What one solver thread says of itself; read by the watchdog's thread.

    Args:
        device: what the device is called.
        iteration: asks the solver for its iteration.
        begun: the first iteration is over; else it is when the iteration changes after `begin` was called.
    """

    def __init__(self, device: str, iteration: Callable[[], int] = lambda: 0, begun: bool = True) -> None:
        self.device = device
        self.iteration = iteration
        self._first: int | None = -1 if begun else None
        # One tuple, replaced whole: the reader needs no lock to see values that belong together.
        self._now: tuple[int, str | Callable[[], str], float] = (0, "", awake_seconds())
        self._thread = 0

    def begin(self) -> None:
        """The first iteration begins."""
        self._first = self.iteration()

    @contextmanager
    def waiting(self, what: str | Callable[[], str]) -> Iterator[None]:
        """Mark an operation that waits for all devices: what it is, or who says how far it has come.

        Called by the solver thread.
        """
        self._thread = threading.get_ident()
        count = self._now[0] + 1
        self._now = (count, what, awake_seconds())
        yield  # an operation that raised stays marked: the thread ends
        self._now = (count, "", awake_seconds())

    def state(self, world: World) -> DeviceState:
        """A snapshot."""
        collectives, waiting, since = self._now
        data = None if waiting else awaited_data(self._thread)
        reading, since = data or ("", since)
        seconds = awake_seconds() - since
        what = waiting if isinstance(waiting, str) else waiting()
        iteration = self.iteration()
        return DeviceState(
            world.rank,
            world.host,
            os.getpid(),
            self.device,
            iteration,
            collectives,
            what,
            seconds,
            reading,
            starting=self._first is None or iteration == self._first,
        )


@dataclass(frozen=True)
class Stall:
    """A wait that is too long.

    Args:
        waiter: the device that waits, the furthest ahead if there are several; for its data, where `reading` is set.
        late: those that it waits for, the furthest behind first; empty where all have begun the operation.
    """

    waiter: DeviceState
    late: list[DeviceState]

    def describe(self, timeout: float, unknown: str) -> str:
        """In a line: who waits where for whom, and what to do; `unknown` is said where nobody is late."""
        waiter = self.waiter
        end = f"; look at that process, or allow more than {timeout:g} s with --timeout"
        if waiter.reading:
            return (
                f"{waiter} has waited {waiter.seconds:.0f} s in iteration {waiter.iteration} for {waiter.reading}; "
                f"look at that disk or network drive, or allow more than {timeout:g} s with --timeout"
            )
        begin = f"{waiter} has waited {waiter.seconds:.0f} s in {waiter.waiting} of iteration {waiter.iteration} for "
        if not self.late:
            return f"{begin}{unknown}{end}"
        culprit = self.late[0]
        more = f", and for {len(self.late) - 1} more" if len(self.late) > 1 else ""
        state = f"which is in iteration {culprit.iteration} and {culprit.doing} since {culprit.seconds:.0f} s"
        return f"{begin}{culprit}, {state}{more}{end}"


def find_stall(states: list[DeviceState], timeout: float) -> Stall | None:
    """The wait of a device for others, else for its data, for longer than `timeout` seconds; or None."""
    late = [state for state in states if state.seconds > timeout + (_START_SECONDS if state.starting else 0.0)]
    waiting = [state for state in late if state.waiting]
    if not waiting:
        return next((Stall(state, []) for state in late if state.reading), None)
    waiter = max(waiting, key=lambda state: state.collectives)
    behind = [state for state in states if state.collectives < waiter.collectives]
    return Stall(waiter, sorted(behind, key=lambda state: state.collectives))


class Watchdog:
    """A thread of each process that reads the lifeline and looks for devices that keep others waiting.

    Args:
        world: the processes.
        lifeline: the connection to them; the watchdog closes it.
        progresses: this process's devices.
        timeout: longest wait in seconds.
        on_failure: called once, from the watchdog's thread, when training has to end; as rank 0 it tells the user and
            then the others (`tell_failure`), unless the failure was reported.
    """

    def __init__(
        self,
        world: World,
        lifeline: Lifeline,
        progresses: list[Progress],
        timeout: float,
        on_failure: Callable[[Failure], None],
    ) -> None:
        self._world = world
        self._lifeline = lifeline
        self._progresses = progresses
        self._timeout = timeout
        self._on_failure = on_failure
        self._others: dict[int, list[DeviceState]] = {}
        self._ended: set[int] = set()
        self._stopping = threading.Event()
        self._tick = min(_TICK, timeout / 4)
        self._looked = time.monotonic()
        self._heard: dict[int, float] = {}
        """When each other process reported last, in `awake_seconds`."""
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def tell_failure(self, failure: Failure) -> None:
        """Tell rank 0, which tells the user unless that was done, and then all others; as rank 0 tell all others."""
        self._lifeline.send(
            "failed",
            message=failure.message,
            status=failure.status,
            rank=self._world.rank,
            reported=failure.reported or self._world.rank == 0,
        )

    def stop(self) -> None:
        """End in good order: all ranks have agreed that training is over."""
        if not self._stopping.is_set():
            self._stopping.set()
            self._thread.join(5.0)
            self._lifeline.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            failure = next(filter(None, map(self._failure, self._lifeline.poll(self._tick))), None)
            now = time.monotonic()
            if failure is None and now - self._looked >= self._tick:
                self._looked = now
                failure = self._look()
            if failure is not None and not self._stopping.is_set():
                self._on_failure(failure)
                return

    def _failure(self, event: Event) -> Failure | None:
        """What an event means for training."""
        if event.kind == "failed":
            message, status = event.content["message"], int(event.content["status"])
            failure = Failure(message, status, reported=bool(event.content["reported"]))
            if self._world.rank == 0 and failure.reported:
                self.tell_failure(failure)
            return failure
        if event.kind == "bye":
            self._ended.add(event.rank)
            self._others.pop(event.rank, None)
        elif event.kind == "states":
            self._others[event.rank] = [DeviceState(**state) for state in event.content["devices"]]
            self._heard[event.rank] = awake_seconds()
        elif event.kind == "lost" and event.rank not in self._ended:
            return self._lost(event.rank)
        return None

    def _lost(self, rank: int) -> Failure:
        """A rank's process ended. Rank 0 speaks; where it is the one, rank 1 does, and others only if they live on."""
        if rank == 0:
            self._stopping.wait(0.0 if self._world.rank == 1 else 1.0)
        known = self._others.get(rank, [])
        process = f" (process {known[0].pid})" if known else ""
        own = [progress.state(self._world) for progress in self._progresses]
        at = f"{process} at iteration {max(state.iteration for state in (*known, *own))}"
        return Failure(
            f"{self._world.name(rank)}{at} ended unexpectedly: it was killed, crashed or lost its network; "
            f"training is stopped"
        )

    def _look(self) -> Failure | None:
        """Report this process's devices, and judge those that are known."""
        own = [progress.state(self._world) for progress in self._progresses]
        if self._world.rank == 0:
            stall = find_stall([*own, *(s for states in self._others.values() for s in states)], self._timeout)
            unknown = self._silent() or "an operation that all devices have begun: MPI, NCCL or the network is stuck"
        else:
            self._lifeline.send("states", devices=[asdict(state) for state in own])
            # Rank 0 sees more and speaks first, unless it is itself what hangs.
            stall = find_stall(own, self._timeout + 4 * self._tick + 1.0)
            unknown = f"{self._world.name(0)}, which does not answer"
        return None if stall is None else Failure(stall.describe(self._timeout, unknown))

    def _silent(self) -> str:
        """The process that has not reported for longest, if that is long ago; it has begun what all wait in."""
        rank = min(self._others, key=lambda rank: self._heard[rank], default=0)
        seconds = awake_seconds() - self._heard.get(rank, awake_seconds())
        if seconds < _SILENT_TICKS * self._tick:
            return ""
        name = f"{self._world.name(rank)}, process {self._others[rank][0].pid}"
        return f"{name}, which was last heard of {seconds:.0f} s ago (is it suspended?)"
