"""The thread of each process that tells the others what it does, and hears when one of them has failed."""

from __future__ import annotations

import threading
from collections.abc import Callable

from caffepy.errors import PeerError
from caffepy.parallel.store.store import State, Store

_SECONDS = 0.5
"""Between two reports."""
_JOIN_SECONDS = 3.0


class Monitor:
    """Watches over a group until it is stopped or somebody fails.

    Args:
        store: the group's.
        state: what this process does.
        on_failure: called once, in the monitor's thread, with what happened.
    """

    def __init__(self, store: Store, state: Callable[[], State], on_failure: Callable[[str], None]) -> None:
        self._store = store
        self._state = state
        self._on_failure = on_failure
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="process group monitor", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, wake: Callable[[], None]) -> None:
        """End without a word; callable twice.

        Args:
            wake: makes the store's watch return.
        """
        self._stopping.set()
        wake()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                news = self._store.watch(self._state(), _SECONDS)
            except PeerError as error:
                news = str(error)
            if news is not None and not self._stopping.is_set():
                self._on_failure(news)
                return
