"""A timeline of training in the trace event format that Chrome (chrome://tracing) and Perfetto read.

A `Trace` belongs to one device and holds what it did in a window of iterations: spans of time in rows. Nets, solvers
and whoever connects devices put their spans into it; whoever made it asks for its `events` once training is over. Where
nobody traces, the same calls reach `NO_TRACE`, which does nothing.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from caffepy.files import atomic_write

if TYPE_CHECKING:
    from caffepy.backend.protocols import Stamp

ROWS = ("iteration", "feed", "forward", "backward", "exchange", "update", "test", "snapshot", "waits")
"""What a device does, in the order in which the rows are shown; others, such as buckets', come after them."""
ON_DEVICE = ("iteration", "forward", "backward", "exchange", "update")
"""Rows whose work a device may do behind the host."""
FIRST = 5
"""Iterations after the start that the default window leaves out: they allocate, compile and plan."""
LENGTH = 10
"""Iterations in the default window."""

_NOTHING = nullcontext()


class Span(NamedTuple):
    """One thing that took time.

    Args:
        row: where it is shown.
        name: what it was.
        iteration: when.
        start: seconds of `time.perf_counter`.
        end: likewise.
    """

    row: str
    name: str
    iteration: int
    start: float
    end: float


class _DeviceSpan(NamedTuple):
    row: str
    name: str
    iteration: int
    first: Stamp
    last: Stamp


class NoTrace:
    """The trace of whoever is not traced."""

    active = False
    """Whether spans are taken at present."""

    def begin(self, iteration: int) -> None:
        """An iteration begins; the first one after the window ends the tracing."""

    def span(self, row: str, name: str = "") -> AbstractContextManager[None]:
        """Take the time of a `with` block, on the host and on a device that works behind it; by any thread."""
        return _NOTHING

    def add(self, row: str, name: str, start: float, end: float) -> None:
        """A span whose times (`time.perf_counter`) were taken elsewhere; by any thread."""

    def add_device(self, row: str, name: str, first: Stamp, last: Stamp) -> None:
        """A span between two places in the device's work."""

    def paused(self) -> AbstractContextManager[None]:
        """Take no spans within a `with` block: work that is captured is not done."""
        return _NOTHING


NO_TRACE = NoTrace()


class Trace(NoTrace):
    """What one device did.

    Args:
        window: iterations to trace; None: a few after the first ones.
    """

    def __init__(self, window: range | None = None) -> None:
        self._window = window
        self._iteration = 0
        self._spans: list[Span] = []
        self._device_spans: list[_DeviceSpan] = []
        self._stamp: Callable[[], Stamp] | None = None
        self._origin: tuple[float, Stamp] | None = None
        self._epoch = time.time() - time.perf_counter()

    def watch_device(self, stamp: Callable[[], Stamp], synchronize: Callable[[], None]) -> None:
        """Take the device's own times too.

        Called once, before training, where the device works behind the host.

        Args:
            stamp: `Backend.stamp`.
            synchronize: `Backend.synchronize`.
        """
        self._stamp = stamp
        synchronize()
        self._origin = (time.perf_counter(), stamp())

    def begin(self, iteration: int) -> None:
        if self._window is None:
            self._window = range(iteration + FIRST, iteration + FIRST + LENGTH)
        self._iteration = iteration
        self.active = iteration in self._window

    def span(self, row: str, name: str = "") -> AbstractContextManager[None]:
        if not self.active:
            return _NOTHING
        return self._timed(row, name or row, self._stamp if row in ON_DEVICE else None)

    @contextmanager
    def _timed(self, row: str, name: str, stamp: Callable[[], Stamp] | None) -> Iterator[None]:
        first = stamp() if stamp is not None else None
        start = time.perf_counter()
        yield
        self._spans.append(Span(row, name, self._iteration, start, time.perf_counter()))
        if first is not None and stamp is not None:
            self._device_spans.append(_DeviceSpan(row, name, self._iteration, first, stamp()))

    def add(self, row: str, name: str, start: float, end: float) -> None:
        if self.active:
            self._spans.append(Span(row, name, self._iteration, start, end))

    def add_device(self, row: str, name: str, first: Stamp, last: Stamp) -> None:
        if self.active:
            self._device_spans.append(_DeviceSpan(row, name, self._iteration, first, last))

    @contextmanager
    def paused(self) -> Iterator[None]:
        active, self.active = self.active, False
        try:
            yield
        finally:
            self.active = active

    def spans(self) -> list[Span]:
        """What was traced; a row of a device that works behind the host is called ``device: forward``.

        Call it when the device is idle.
        """
        found = list(self._spans)
        if self._origin is not None:
            begin, origin = self._origin
            for row, name, iteration, first, last in self._device_spans:
                start = begin + first.seconds_since(origin)
                found.append(Span(f"device: {row}", name, iteration, start, start + last.seconds_since(first)))
        return found

    def events(self, process: int, name: str) -> list[dict[str, Any]]:
        """Trace events: one for each span, and the names of the device and its rows.

        Args:
            process: the device's number among all devices; the viewers call it a process.
            name: what the viewers call the device.
        """
        spans = self.spans()
        rows = _in_order({span.row for span in spans})
        named = [_naming("process_name", process, 0, name), _sorting("process_sort_index", process, 0, process)]
        for number, row in enumerate(rows):
            named.append(_naming("thread_name", process, number, row))
            named.append(_sorting("thread_sort_index", process, number, number))
        return named + [
            {
                "ph": "X",
                "pid": process,
                "tid": rows.index(span.row),
                "name": span.name,
                "cat": span.row,
                "ts": round((self._epoch + span.start) * 1e6, 3),
                "dur": round((span.end - span.start) * 1e6, 3),
                "args": {"iteration": span.iteration},
            }
            for span in spans
        ]


def write_trace(path: Path, devices: Iterable[Sequence[dict[str, Any]]]) -> int:
    """Write the events of all devices as one file; returns the number of spans.

    Times are counted from the earliest span, by the clocks of the machines.

    Raises:
        RunError: it cannot be written.
    """
    events = [event for device in devices for event in device]
    spans = [event for event in events if event["ph"] == "X"]
    begin = min((event["ts"] for event in spans), default=0.0)
    for event in spans:
        event["ts"] = round(event["ts"] - begin, 3)
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}))
    return len(spans)


def pack_events(devices: Sequence[Sequence[dict[str, Any]]]) -> bytes:
    """The events of a process's devices, small enough to be sent to the root."""
    return zlib.compress(json.dumps(devices).encode())


def unpack_events(packed: bytes) -> list[list[dict[str, Any]]]:
    """The inverse of `pack_events`."""
    devices: list[list[dict[str, Any]]] = json.loads(zlib.decompress(packed))
    return devices


def _in_order(rows: set[str]) -> list[str]:
    """Stages as they follow each other, then what else there is, then the device's rows likewise."""

    def place(row: str) -> tuple[bool, int, int, str]:
        stage = row.removeprefix("device: ")
        # Shorter names first: bucket 9 comes before bucket 10.
        return row.startswith("device: "), ROWS.index(stage) if stage in ROWS else len(ROWS), len(row), row

    return sorted(rows, key=place)


def _naming(kind: str, process: int, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": row, "name": kind, "args": {"name": name}}


def _sorting(kind: str, process: int, row: int, index: int) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": row, "name": kind, "args": {"sort_index": index}}
