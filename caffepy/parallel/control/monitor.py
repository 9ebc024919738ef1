"""The thread of each process that sends its heartbeats, and hears when a rank has failed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from caffepy.errors import PeerError, describe
from caffepy.parallel.store.records import DeviceStatus, Failure
from caffepy.parallel.store.store import ControlChannel

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
            self.channel.leave(self.statuses())
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
                failure = self._hear() or self.look()
        except BaseException as error:
            failure = Failure(f"the control plane of this process ended by {describe(error)}", error=error)
            self.statuses = list  # they may be what failed, and `stop` asks for them again
        if failure is not None and not self.stopping.is_set():
            self._on_failure(failure)

    def _hear(self) -> Failure | None:
        try:
            return self.channel.watch(self.statuses(), self.seconds)
        except PeerError as error:
            return self.describe_end_of_root(error)
