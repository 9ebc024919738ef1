"""How a device thread gets its communicator: when it asks for it, or ahead, while its solver builds the nets.

NCCL's start takes seconds. Its call returns only when all devices have made it. Where one of them fails before that,
its peers' calls are left to threads of their own, which the process does not wait for; the solver thread waits with an
eye on the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from caffepy.errors import AbortedError
from caffepy.parallel.communicators.communicator import Communicator

_POLL = 0.2
"""Seconds between two looks whether the wait is still worth it."""


class Connector:
    """Makes a device thread's communicator, in that thread.

    Args:
        connect: makes it.
    """

    def __init__(self, connect: Callable[[], Communicator]) -> None:
        self._connect = connect

    def begin(self) -> None:
        """Start to connect, if that can be done ahead of the call."""

    def give_up(self) -> None:
        """End a wait for the communicator. Callable from any thread."""

    def __call__(self) -> Communicator:
        """The communicator.

        Raises:
            AbortedError: training was stopped meanwhile.
            CaffepyError: what `connect` raised.
        """
        return self._connect()


class AsyncConnector(Connector):
    """Makes the communicator in a thread of its own.

    Args:
        connect: makes it, in any thread.
        name: the device's, for the thread's name.
    """

    def __init__(self, connect: Callable[[], Communicator], name: str = "") -> None:
        super().__init__(connect)
        self._name = name
        self._done = threading.Event()
        self._begun = False
        self._given_up = threading.Event()
        self._lock = threading.Lock()
        self._result: Communicator | None = None
        self._error: BaseException | None = None

    def begin(self) -> None:
        self._begun = True
        threading.Thread(target=self._run, name=f"connect {self._name}", daemon=True).start()

    def _run(self) -> None:
        try:
            result = self._connect()
        except BaseException as error:
            self._error = error
        else:
            with self._lock:
                self._result = result
                unwanted = self._given_up.is_set()
            if unwanted:
                result.abort()
        self._done.set()

    def give_up(self) -> None:
        """End the wait for the communicator and abort it, also one that comes later. Callable from any thread."""
        with self._lock:
            self._given_up.set()
            result = self._result
        if result is not None:
            result.abort()

    def __call__(self) -> Communicator:
        """The communicator; waits for it, and makes it here if nobody has begun."""
        if not self._begun:
            return self._connect()
        while not self._done.wait(_POLL):
            if self._given_up.is_set():
                raise AbortedError("training was stopped")
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result
