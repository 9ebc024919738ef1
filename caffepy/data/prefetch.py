"""Prefetching: threads of each data layer fill batches while the device computes.

Holds the queue between the prefetch threads and the solver's thread. Every wait is bounded: the solver's wait ends with
the batch, the error of reading it, `close`, an exception from `check_wait`, or `timeout`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from caffepy.backend.types import ImageSlot, memory_order, view
from caffepy.errors import AbortedError, CaffepyError, RunError
from caffepy.utils.clocks import suspend_aware_seconds
from caffepy.utils.process_fork import tell_after_fork

logger = logging.getLogger(__name__)


_GROWTH = 8
"""Growth factor of the passes per uint8 batch, from 1 up to a whole block."""
_POLL_SECONDS = 0.1
"""Interval at which a waiting solver checks its timeout and calls `check_wait`."""

_waits: dict[int, tuple[Callable[[], str], float]] = {}
"""Maps the identifier of a waiting solver thread to the record it waits for and the start time."""


def awaited_data(thread: int) -> tuple[str, float] | None:
    """Return the record that a thread waits for and the start time of the wait, or None.

    Args:
        thread: thread identifier (`threading.get_ident`).

    Returns:
        For example ``record 12 of LMDB 'x'``, and a time from `suspend_aware_seconds`.
    """
    wait = _waits.get(thread)
    return None if wait is None else (wait[0](), wait[1])


def never_cancel() -> None:
    """Default `check_wait`: does not cancel the wait."""


Memory = Callable[[int], NDArray[np.uint8]]
"""Allocates a 1-D array of the given number of bytes."""


def plain_memory(size: int) -> NDArray[np.uint8]:
    """Allocate pageable host memory."""
    return np.empty(size, np.uint8)


class Batch:
    """One device's samples: one pass as float32 arrays, or several passes as uint8 images. Batches are reused.

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
        self.least_rows = 0
        """Rows that an array with a variable number of rows has at least, a power of two; 0: only those with values."""
        self.bytes: NDArray[np.uint8] = np.empty(0, np.uint8)
        self.arrays: list[NDArray[np.float32]] = [np.empty(0, np.float32)] * tops
        self._memory = memory

    def array(self, top: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Return the array of a top with the given logical shape; images are channels-last in memory, as on devices."""
        if self.arrays[top].shape != shape:
            flat = self._memory(4 * math.prod(shape)).view(np.float32)
            self.arrays[top] = view(flat, shape)
        return self.arrays[top]

    def array_bytes(self) -> list[NDArray[np.uint8]]:
        """Return the memory of each array as bytes: 1-D views, in memory order."""
        return [memory_order(array).reshape(-1).view(np.uint8) for array in self.arrays]

    def padded_rows(self, rows: int) -> int:
        """Return the rows of an array with a variable number of rows: `rows`, or a power of two with `least_rows`."""
        if self.least_rows:
            self.least_rows = rows = max(self.least_rows, 1 << (rows - 1).bit_length())
        return rows

    def reserve(self, slot: ImageSlot, passes: int) -> NDArray[np.uint8]:
        """Return the byte buffer, grown to `passes` slots."""
        self.slot = slot
        if self.bytes.size != slot.size * passes:
            self.bytes = self._memory(slot.size * passes)
        return self.bytes


class Loader(Protocol):
    """Fills batches from a source. Not thread-safe."""

    @property
    def reading(self) -> str:
        """The current record, for messages: ``record 12 of LMDB 'x'``."""

    def load(self, first: int, count: int, batch: Batch) -> None:
        """Fill `batch` with the samples [first, first + count) as float32."""

    def load_bytes(self, firsts: Sequence[int], count: int, slot: ImageSlot, block: NDArray[np.uint8]) -> int:
        """Fill each slot with `count` samples starting at one of `firsts`; return the number of filled slots."""

    def close(self) -> None:
        """Stop worker threads. Idempotent."""


def _describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


class Prefetcher:
    """Fills the batches of consecutive passes in threads, which the first `get` starts.

    Args:
        loaders: fill the batches, each in a thread of its own, several batches at the same time.
        first_sample: maps a pass to the global number of this device's first sample.
        count: samples in a batch.
        tops: arrays in a batch.
        depth: maximum number of prefetched batches; each loader after the first adds one.
        where: the layer, for messages.
        slot: layout of a pass of uint8 images; None: batches are float32. After a record that does not fit the layout,
            batches are float32.
        block: maximum passes of a uint8 batch; each batch ends at or before a multiple of `block`. 1 for several
            loaders: the last pass of a batch must be known before the next batch is begun.
        least_rows: `Batch.least_rows` of the first batch; later batches have at least the rows of earlier ones.
        memory: allocates the batches' memory.
        warn_after: seconds of waiting after which the log names the current record.
        timeout: seconds of waiting after which training fails.
        check_wait: called every 0.1 s while `get` waits; cancels the wait by raising.
    """

    def __init__(
        self,
        loaders: Sequence[Loader],
        first_sample: Callable[[int], int],
        count: int,
        tops: int,
        depth: int = 4,
        where: str = "data layer",
        slot: ImageSlot | None = None,
        block: int = 1,
        least_rows: int = 0,
        memory: Memory = plain_memory,
        warn_after: float = 30.0,
        timeout: float = 600.0,
        check_wait: Callable[[], None] = never_cancel,
    ) -> None:
        self._loaders = loaders
        self._first_sample = first_sample
        self._count = count
        self._tops = tops
        self._next = 0
        """First pass of the next batch to fill; the first `get` initialises it."""
        self.depth = max(depth, 1) + len(loaders) - 1
        """Maximum number of batches that are ready or being filled. With a limit of ready batches alone, loaders that
        finish at the same time would also wait at the same time."""
        self._where = where
        self._slot = slot
        self._block = block if len(loaders) == 1 else 1
        self._max_passes = 1
        """Maximum passes of the next uint8 batch. Starts small so that the first batch is ready early."""
        self._least_rows = least_rows
        self._memory = memory
        self.waited = 0.0
        """Total seconds that `get` waited for batches."""
        self._warn_after = warn_after
        self._timeout = timeout
        self._check_wait = check_wait
        self._closed = False
        self._changed = threading.Condition()
        self._filling: dict[int, Loader] = {}
        """The loader that fills the batch that begins with a pass."""
        self._ready: dict[int, Batch] = {}
        self._failed: dict[int, BaseException] = {}
        """The errors of passes. No other batch is begun after an error."""
        self._free: deque[Batch] = deque()
        self._threads: list[threading.Thread] = []
        tell_after_fork(self)

    def forked(self) -> None:
        """Reset after a fork: the next `get` starts threads in the child."""
        self._changed = threading.Condition()
        for kept in (self._filling, self._ready, self._failed, self._free, self._threads):
            kept.clear()

    def get(self, number: int) -> Batch:
        """Return the batch that begins with pass `number`. Batches must be consecutive.

        Raises:
            AbortedError: `close` was called during the wait.
            RunError: no batch arrived within the timeout, or reading failed unexpectedly.
            CaffepyError: the loader raised it.
            Exception: `check_wait` raised it; a later `get` returns the batch.
        """
        with self._changed:
            if not self._threads and not self._closed:
                self._next = number
                for loader in self._loaders:
                    thread = threading.Thread(
                        target=self._run, args=(loader,), name=f"prefetch {self._where}", daemon=True
                    )
                    thread.start()
                    self._threads.append(thread)
            self._wait_for_batch(number)
            batch = self._ready.pop(number)
            self._changed.notify_all()
        return batch

    def release(self, batch: Batch) -> None:
        """Return a batch to the prefetch threads for reuse."""
        with self._changed:
            self._free.append(batch)

    def close(self, timeout: float = 10.0) -> bool:
        """Stop the threads and wake waiters; return whether they ended within `timeout`. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        end = time.monotonic() + timeout
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(end - time.monotonic(), 0.0))
        if any(thread.is_alive() for thread in self._threads if thread is not threading.current_thread()):
            logger.warning("%s: the prefetch thread did not stop; it is reading %s", self._where, self._reading())
            return False
        return True

    def _reading(self) -> str:
        """The record that is read, of the first batch that is not ready."""
        filling = sorted(self._filling.items())
        return (filling[0][1] if filling else self._loaders[0]).reading

    def _wait_for_batch(self, number: int) -> None:
        """Wait, holding the lock, until the batch that begins with pass `number` is ready."""
        if number in self._ready:
            return
        started, thread = suspend_aware_seconds(), threading.get_ident()
        _waits[thread] = (self._reading, started)
        try:
            self._poll_until_ready(number, started)
        finally:
            del _waits[thread]
            self.waited += suspend_aware_seconds() - started

    def _poll_until_ready(self, number: int, started: float) -> None:
        warn_at = started + self._warn_after
        while number not in self._ready:
            if number in self._failed:
                raise self._failed[number]
            if self._closed:
                raise AbortedError(f"{self._where}: closed while waiting for data")
            if not any(thread.is_alive() for thread in self._threads):
                ended = RunError(f"{self._where}: the prefetch thread has ended; see the log above")
                raise next(iter(self._failed.values()), ended)
            self._check_wait()
            now = suspend_aware_seconds()
            if now >= started + self._timeout:
                raise RunError(
                    f"{self._where}: no data for {now - started:.0f} s while reading {self._reading()}; "
                    "is the disk or network drive available?"
                )
            if now >= warn_at:
                logger.warning(
                    "%s: waiting for data for %.0f s, reading %s", self._where, now - started, self._reading()
                )
                warn_at += self._warn_after
            self._changed.wait(min(max(min(warn_at, started + self._timeout) - now, 0.001), _POLL_SECONDS))

    # -- the prefetch threads ------------------------------------------------------------------------

    def _run(self, loader: Loader) -> None:
        number = self._next
        try:
            while (batch := self._begin_batch(loader)) is not None:
                number, planned = batch.number, batch.passes
                self._fill(batch, loader)
                with self._changed:
                    self._next -= planned - batch.passes  # several loaders plan one pass each
                    self._least_rows = max(self._least_rows, batch.least_rows)
                    del self._filling[number]
                    self._ready[number] = batch
                    self._changed.notify_all()
        except BaseException as error:
            self._fail(number, error, loader)
        finally:
            loader.close()

    def _begin_batch(self, loader: Loader) -> Batch | None:
        """Wait until another batch is to be filled, then return it; None: no more."""
        with self._changed:
            while not self._closed and not self._failed and len(self._ready) + len(self._filling) >= self.depth:
                self._changed.wait(60)
            if self._closed or self._failed:
                return None
            batch = self._free.popleft() if self._free else Batch(self._tops, self._memory)
            batch.number, batch.passes, batch.slot = self._next, 1, self._slot
            batch.least_rows = self._least_rows
            if self._slot is not None:
                end = min((self._next // self._block + 1) * self._block, self._next + self._max_passes)
                batch.passes = end - self._next
                self._max_passes = min(_GROWTH * self._max_passes, self._block)
            self._next += batch.passes
            self._filling[batch.number] = loader
            return batch

    def _fill(self, batch: Batch, loader: Loader) -> None:
        if batch.slot is not None:
            firsts = [self._first_sample(batch.number + i) for i in range(batch.passes)]
            block = batch.reserve(batch.slot, self._block)
            batch.passes = loader.load_bytes(firsts, self._count, batch.slot, block)
            if batch.passes:
                return
            self._slot = None
        batch.slot, batch.passes, batch.bytes = None, 1, np.empty(0, np.uint8)
        loader.load(self._first_sample(batch.number), self._count, batch)

    def _fail(self, number: int, error: BaseException, loader: Loader) -> None:
        if not isinstance(error, CaffepyError):
            try:
                failure = RunError(f"{self._where}: reading {loader.reading} failed: {_describe_error(error)}")
            except Exception:  # `reading` failed too, for example out of memory
                failure = RunError(f"{self._where}: reading failed: {type(error).__name__}")
            failure.__cause__ = error
            error = failure
        with self._changed:
            self._failed[number] = error
            self._changed.notify_all()
