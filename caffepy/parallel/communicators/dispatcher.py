"""Carries calls of solver threads to the thread that may call MPI (MPI_THREAD_FUNNELED and SERIALIZED)."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError  # another class than TimeoutError until Python 3.11
from typing import Any, TypeVar

from caffepy.errors import AbortedError

T = TypeVar("T")

_POLL = 0.002
"""How long the main thread waits for a call, in seconds."""


class MainThreadDispatcher:
    """Runs MPI calls of solver threads: in the caller, or on the main thread where MPI allows no other.

    Args:
        direct: MPI provides MPI_THREAD_MULTIPLE.
    """

    def __init__(self, direct: bool) -> None:
        self.direct = direct
        self._main = threading.get_ident()
        self._calls: queue.Queue[tuple[Callable[[], Any], Future[Any]]] = queue.Queue()
        self._aborted = threading.Event()

    def call(self, function: Callable[[], T]) -> T:
        """The result of `function`.

        Raises:
            AbortedError: `abort` was called first.
        """
        if self._aborted.is_set():
            raise AbortedError("training was stopped")
        if self.direct or threading.get_ident() == self._main:
            return function()
        future: Future[T] = Future()
        self._calls.put((function, future))
        while True:
            try:
                return future.result(timeout=0.5)
            except FutureTimeoutError:
                if self._aborted.is_set():
                    raise AbortedError("training was stopped") from None

    def serve(self) -> None:
        """Run queued calls until the queue stays empty for a moment; called by the main thread."""
        while True:
            try:
                function, future = self._calls.get(timeout=_POLL)
            except queue.Empty:
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

    def abort(self) -> None:
        """Wake all callers with AbortedError, now and later."""
        self._aborted.set()
