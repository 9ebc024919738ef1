"""How a failure ends all processes: the first one is kept, told to the user once and to all ranks, and ends the run."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from typing import Any

from caffepy.distributed.device_threads import DeviceThreads
from caffepy.distributed.liveness import Watchdog, describe_error
from caffepy.distributed.processes.world import World
from caffepy.distributed.store.wire import Failure
from caffepy.errors import INTERRUPTED, AbortedError, CaffepyError, NonFiniteError, PeerError, RunError, exit_status
from caffepy.utils.glog import ENDS

logger = logging.getLogger(__name__)

_JOIN_SECONDS = 2.0
"""How long a failed run waits for its threads, all together."""
_LAST_RESORT_SECONDS = 6.0
"""When a process ends after a failure, even if its main thread is stuck in MPI."""
_TELL_SECONDS = 1.0
"""How long the others may take to hear of a failure, and rank 0 to answer."""


class Failures:
    """Keeps the first failure of a run, releases the waiting threads of this process, and ends the other ranks.

    Args:
        world: the processes.
        threads: this process's device threads.
    """

    def __init__(self, world: World, threads: DeviceThreads[Any]) -> None:
        self.verbose = False
        """Whether errors are reported with their traceback."""
        self._world = world
        self._threads = threads
        self._watchdog: Watchdog | None = None
        self._first: Failure | None = None
        self._lock = threading.Lock()
        self._reporting = threading.Lock()
        self._heard = threading.Event()
        """Set when another rank has told the user of a failure."""

    @property
    def failed(self) -> bool:
        """Whether the run ends because of a failure."""
        return self._first is not None

    def watch(self, watchdog: Watchdog) -> None:
        """Start the watchdog that tells other ranks of failures; its `on_failure` is `peer_failed`."""
        self._watchdog = watchdog
        watchdog.start()

    def close(self) -> None:
        """Stop the watchdog."""
        if self._watchdog is not None:
            self._watchdog.stop()

    # -- the first failure --------------------------------------------------------------------------

    def device_failed(self, error: BaseException, location: str) -> None:
        """Record the failure of a device of this process. Callable from any thread.

        Args:
            error: what the device's thread raised.
            location: device and iteration; empty where training has one device.
        """
        text = error.reason if location and isinstance(error, NonFiniteError) else describe_error(error)
        if isinstance(error, AbortedError):
            # A thread that another failure has released comes here after that failure was recorded.
            text = f"training was stopped, and no device said why ({text}); go on from the last snapshot"
        self._record(self._own_failure(text, error, location))

    def peer_failed(self, failure: Failure) -> None:
        """Record what the watchdog found; called in its thread, while the main thread may be stuck in MPI."""
        if failure.reported:
            self._heard.set()
        self._record(failure)
        if self._world.size > 1:
            self._report()
            # The main thread may wait in MPI, where no signal and no exception reaches it.
            timer = threading.Timer(_LAST_RESORT_SECONDS, self._world.end, (failure.status,))
            timer.daemon = True
            timer.start()

    def raise_first(self) -> None:
        """Raise the first failure, if there is one; for the main thread.

        Raises:
            PeerError: there are several ranks, or the watchdog found it.
            CaffepyError: the error of a device of this, the only process, with the device in its message.
        """
        failure = self._first
        if failure is None:
            return
        error = failure.error
        if self._world.size > 1 or error is None:
            raise PeerError(failure.message) from error
        if isinstance(error, CaffepyError):
            error.args = (failure.message,)
            raise error
        if len(self._threads) > 1:
            raise RunError(failure.message) from error
        raise error

    # -- the end ------------------------------------------------------------------------------------

    def end(self, error: BaseException) -> None:
        """Release and join this process's threads; end the world too, unless all ranks have agreed on the error."""
        world = self._world
        failure = self._record(self._own_failure(describe_error(error), error))
        alone = world.size == 1 or world.ended_together
        if not alone:
            self._report(through_root=True)
        # Aborted threads still write to the log and hold the device; most end at once. One that does not must not hold
        # up the end.
        self._threads.join(_JOIN_SECONDS)
        if not alone:
            world.end(failure.status)

    def interrupted_again(self) -> None:
        """End all processes at once: the second SIGINT."""
        message = "interrupted again: ending at once"
        logger.critical(message, extra=ENDS)
        if self._watchdog is not None:
            # In a thread: this handler may have interrupted the main thread where that holds the channel's lock.
            failure = Failure(message, INTERRUPTED, reported=True)
            telling = threading.Thread(target=self._watchdog.tell_failure, args=(failure,), daemon=True)
            telling.start()
            telling.join(_TELL_SECONDS)
        self._world.end(INTERRUPTED)

    def _own_failure(self, text: str, error: BaseException, location: str = "") -> Failure:
        rank = self._world.name(self._world.rank) if self._world.size > 1 else ""
        where = ", ".join(filter(None, (rank, location)))
        return Failure(f"{where}: {text}" if where else text, exit_status(error), error=error)

    def _record(self, failure: Failure) -> Failure:
        """Keep the first failure, and return it."""
        with self._lock:
            # What follows the first failure is mostly its consequence: aborted waits, closed connections.
            if self._first is not None:
                return self._first
            self._first = failure
        # Outside of the lock: threads that are woken record failures of their own.
        self._threads.abort()
        return failure

    def _report(self, through_root: bool = False) -> None:
        """Print the first failure, unless some rank has, and tell the other ranks; returns when that is done."""
        # A second thread waits for the first, because the caller may end the process.
        with self._reporting:
            with self._lock:
                failure = self._first
                if failure is None or failure.reported:
                    return
                self._first = replace(failure, reported=True)
            # Rank 0 prints for all: several ranks that fail by one cause give one message.
            if self._heard.is_set() or (through_root and self._root_reports(failure)):
                return
            # Printed before others are told: they end then, and a launcher may kill this process next.
            logger.critical("%s", failure.message, exc_info=failure.error if self.verbose else None, extra=ENDS)
            if self._watchdog is not None:
                self._watchdog.tell_failure(replace(failure, reported=True))

    def _root_reports(self, failure: Failure) -> bool:
        """Tell rank 0 of the failure; returns whether it answers that the user was told."""
        if self._world.rank == 0 or self._watchdog is None:
            return False
        self._watchdog.tell_failure(failure)
        heard = self._heard.wait(_TELL_SECONDS)
        if heard and self.verbose:
            logger.debug("%s", failure.message, exc_info=failure.error)
        return heard
