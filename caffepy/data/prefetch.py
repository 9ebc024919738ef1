"""Prefetching: each data layer has a thread that fills batches while the device computes on earlier ones.

Owns the queue between the prefetch thread and the solver's. No wait is endless: the solver's ends with the batch,
with the prefetch thread's error, with `close`, by what `check_wait` raises, or after `timeout`.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from caffepy.backend.input_ring import ImageSlot
from caffepy.backend.layout import view
from caffepy.errors import AbortedError, CaffepyError, RunError
from caffepy.forks import tell_after_fork
from caffepy.monotonic_clock import suspend_aware_seconds

logger = logging.getLogger(__name__)


_GROWTH = 8
"""How many times as many passes each of the first batches of bytes has as the one before, up to a whole block."""
_POLL_SECONDS = 0.1
"""Interval at which a waiting solver checks its timeout, and whether it is to wait any longer."""

_waits: dict[int, tuple[Callable[[], str], float]] = {}
"""By thread identifier: what a solver thread waits for, and since when."""


def awaited_data(thread: int) -> tuple[str, float] | None:
    """The record that a thread waits for, and since when; None if it waits for no data.

    Args:
        thread: its identifier, `threading.get_ident`.

    Returns:
        For example ``record 12 of LMDB 'x'``, and a time of `suspend_aware_seconds`.
    """
    wait = _waits.get(thread)
    return None if wait is None else (wait[0](), wait[1])


def never_cancel() -> None:
    """The `check_wait` that never ends a wait."""


Memory = Callable[[int], NDArray[np.uint8]]
"""Allocates so many bytes: a 1-D array."""


def plain_memory(size: int) -> NDArray[np.uint8]:
    """Pageable host memory."""
    return np.empty(size, np.uint8)


class Batch:
    """One device's samples: of one pass as float32 arrays, or of several passes as uint8 images. Reused.

    Args:
        tops: number of float32 arrays.
        memory: allocates the arrays (for example in page-locked memory).
    """

    def __init__(self, tops: int, memory: Memory = plain_memory) -> None:
        self.number = -1
        """The first pass of the batch."""
        self.passes = 1
        """Number of passes in the batch."""
        self.slot: ImageSlot | None = None
        """The layout of each pass in `bytes`; None: the batch is in `arrays`."""
        self.bytes: NDArray[np.uint8] = np.empty(0, np.uint8)
        self.arrays: list[NDArray[np.float32]] = [np.empty(0, np.float32)] * tops
        self._memory = memory

    def array(self, top: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """The array of a top, of the given logical shape; images are channels last in memory, as on the devices."""
        if self.arrays[top].shape != shape:
            flat = self._memory(4 * math.prod(shape)).view(np.float32)
            self.arrays[top] = view(flat, shape)
        return self.arrays[top]

    def reserve(self, slot: ImageSlot, passes: int) -> NDArray[np.uint8]:
        """Return the byte buffer, grown to `passes` slots."""
        self.slot = slot
        if self.bytes.size != slot.size * passes:
            self.bytes = self._memory(slot.size * passes)
        return self.bytes


class Loader(Protocol):
    """Fills batches from a source. Used by one thread at a time."""

    @property
    def reading(self) -> str:
        """The record that is being read, for messages: ``record 12 of LMDB 'x'``."""

    def load(self, first: int, count: int, batch: Batch) -> None:
        """Fill `batch` with the floats of the global samples [first, first + count)."""

    def load_bytes(self, firsts: Sequence[int], count: int, slot: ImageSlot, block: NDArray[np.uint8]) -> int:
        """Fill each slot with `count` samples from one of `firsts` on; returns how many slots are filled."""

    def close(self) -> None:
        """Stop worker threads. Idempotent."""


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


class Prefetcher:
    """Fills the batches of consecutive passes in a thread, which starts with the first `get`.

    Args:
        loader: fills the batches.
        first_sample: the global number of the first sample that this device takes in a pass.
        count: samples in a batch.
        tops: arrays in a batch.
        depth: batches that are filled in advance.
        where: the layer, for messages.
        slot: the layout of a pass of uint8 images; None: batches are float32. From the first record on that does not
            fit the layout, batches are float32.
        block: passes of a batch of bytes; each batch ends before a multiple of it.
        memory: allocates the batches' memory.
        warn_after: seconds without a batch after which the log says what is being read.
        timeout: seconds without a batch after which training fails.
        check_wait: called every 0.1 s while `get` waits; ends the wait by raising.
    """

    def __init__(  # noqa: PLR0913 -- one keyword a setting
        self,
        loader: Loader,
        first_sample: Callable[[int], int],
        count: int,
        tops: int,
        depth: int = 4,
        where: str = "data layer",
        slot: ImageSlot | None = None,
        block: int = 1,
        memory: Memory = plain_memory,
        warn_after: float = 30.0,
        timeout: float = 600.0,
        check_wait: Callable[[], None] = never_cancel,
    ) -> None:
        self._loader = loader
        self._first_sample = first_sample
        self._count = count
        self._tops = tops
        self._next = 0
        """The first pass of the batch that the thread fills next: in the beginning that of the first `get`."""
        self._depth = max(depth, 1)
        self._where = where
        self._slot = slot
        self._block = block
        self._at_once = 1
        """Passes of the next batch of bytes, at most: few at first, so that the first one comes soon."""
        self._memory = memory
        self.waited = 0.0
        """Seconds that `get` has waited for batches."""
        self._warn_after = warn_after
        self._timeout = timeout
        self._check_wait = check_wait
        self._changed = threading.Condition()
        self._ready: deque[Batch] = deque()
        self._free: deque[Batch] = deque()
        self._error: BaseException | None = None
        self._closed = False
        self._ended = False
        self._thread: threading.Thread | None = None
        tell_after_fork(self)

    def forked(self) -> None:
        """Begin anew in a child: with the batch of the next `get`, in a thread of the child's."""
        self._changed = threading.Condition()
        self._ready.clear()
        self._free.clear()
        self._error, self._ended, self._thread = None, False, None

    def get(self, number: int) -> Batch:
        """The batch that begins with pass `number`; call with consecutive batches.

        Raises:
            AbortedError: `close` was called meanwhile.
            RunError: nothing came within the timeout, or reading failed unexpectedly.
            CaffepyError: what the loader raised.
            Exception: what `check_wait` raised; the batch is still to come.
        """
        with self._changed:
            if self._thread is None and not self._closed:
                self._next = number
                self._thread = threading.Thread(target=self._run, name=f"prefetch {self._where}", daemon=True)
                self._thread.start()
            self._wait_for_batch()
            batch = self._ready.popleft()
            self._changed.notify_all()
        assert batch.number == number, (batch.number, number)
        return batch

    def release(self, batch: Batch) -> None:
        """Return a batch to the prefetch thread, which fills it again."""
        with self._changed:
            self._free.append(batch)

    def close(self, timeout: float = 10.0) -> bool:
        """Stop the thread and wake waiters; returns whether it ended within `timeout`. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)
            if self._thread.is_alive():
                logger.warning("%s: the reading thread does not end; busy with %s", self._where, self._loader.reading)
                return False
        return True

    def _wait_for_batch(self) -> None:
        """Wait, holding the lock, until a batch is ready."""
        if self._ready:
            return
        started, thread = suspend_aware_seconds(), threading.get_ident()
        _waits[thread] = (lambda: self._loader.reading, started)
        try:
            self._wait_since(started)
        finally:
            del _waits[thread]
            self.waited += suspend_aware_seconds() - started

    def _wait_since(self, started: float) -> None:
        warn_at = started + self._warn_after
        while not self._ready:
            if self._error is not None:
                raise self._error
            if self._closed:
                raise AbortedError(f"{self._where}: closed while waiting for data")
            if self._ended or not (self._thread and self._thread.is_alive()):
                raise RunError(f"{self._where}: the thread that reads its data has ended; see the log above")
            self._check_wait()
            now = suspend_aware_seconds()
            if now >= started + self._timeout:
                raise RunError(
                    f"{self._where}: no data for {now - started:.0f} s while reading {self._loader.reading}; "
                    "is the disk or network drive still there?"
                )
            if now >= warn_at:
                logger.warning(
                    "%s: waiting for data for %.0f s, reading %s", self._where, now - started, self._loader.reading
                )
                warn_at += self._warn_after
            self._changed.wait(min(max(min(warn_at, started + self._timeout) - now, 0.001), _POLL_SECONDS))

    # -- the prefetch thread -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (batch := self._next_batch()) is not None:
                batch.number = self._next
                self._fill(batch)
                self._next += batch.passes
                with self._changed:
                    self._ready.append(batch)
                    self._changed.notify_all()
        except BaseException as error:
            self._fail(error)
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()
            self._loader.close()

    def _fill(self, batch: Batch) -> None:
        if self._slot is not None:
            end = min((self._next // self._block + 1) * self._block, self._next + self._at_once)
            passes, self._at_once = range(self._next, end), min(_GROWTH * self._at_once, self._block)
            firsts = [self._first_sample(number) for number in passes]
            block = batch.reserve(self._slot, self._block)
            batch.passes = self._loader.load_bytes(firsts, self._count, self._slot, block)
            if batch.passes:
                return
            self._slot = None
        batch.slot, batch.passes, batch.bytes = None, 1, np.empty(0, np.uint8)
        self._loader.load(self._first_sample(self._next), self._count, batch)

    def _fail(self, error: BaseException) -> None:
        if not isinstance(error, CaffepyError):
            try:
                failure = RunError(f"{self._where}: reading {self._loader.reading} failed: {_said(error)}")
            except Exception:  # the loader cannot even say what it reads: out of memory, or the cause of the failure
                failure = RunError(f"{self._where}: reading failed: {type(error).__name__}")
            failure.__cause__ = error
            error = failure
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _next_batch(self) -> Batch | None:
        """Wait until fewer than `depth` batches are ready, then return one to fill; None after `close`."""
        with self._changed:
            while len(self._ready) >= self._depth and not self._closed:
                self._changed.wait(60)
            if self._closed:
                return None
            return self._free.popleft() if self._free else Batch(self._tops, self._memory)
