"""A timeline of training in the trace event format that Chrome (chrome://tracing) and Perfetto read.

A `Trace` belongs to one device and holds what it did in a window of iterations: spans of time in rows. Nets, solvers
and whoever connects devices put their spans into it; whoever made it asks for its `events` once training is over. Where
nobody traces, the same calls reach `NO_TRACE`, which does nothing. Work that is captured tells its spans once, while it
is captured; the device takes their times in each replay.
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
    from caffepy.backend.handles import DeviceTimer, TimedEvent

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
    first: TimedEvent
    last: TimedEvent


class _Recording:
    """Spans of work that is captured.

    Args:
        device_timer: each place of it takes the time of one end of a span; the last place compares it with the host's.
        places: how many there are.
    """

    def __init__(self, device_timer: DeviceTimer, places: int) -> None:
        self._stopwatch = device_timer
        self._places = places
        self._taken = 0
        self._host: float | None = None
        self._spans: list[tuple[str, str, int, int]] = []

    def place(self) -> int:
        """Take the time here, in every replay."""
        place = self._taken
        assert place < self._places - 1, "the work has more spans than were reckoned with"
        self._taken += 1
        self._stopwatch.start(place)
        return place

    def add(self, row: str, name: str, first: int, last: int) -> None:
        """What lies between two places is a span."""
        self._spans.append((row, name, first, last))

    @contextmanager
    def span(self, row: str, name: str) -> Iterator[None]:
        """A `with` block is a span."""
        first = self.place()
        yield
        self.add(row, name, first, self.place())

    def spans(self, iteration: int) -> Iterator[Span]:
        """The spans of the replay that was asked for last; waits for the device."""
        if self._host is None:
            self._stopwatch.start(self._places - 1)
            own = self._stopwatch.times()[-1]
            self._host = time.perf_counter() - own
        times = [self._host + seconds for seconds in self._stopwatch.times()]
        for row, name, first, last in self._spans:
            yield Span(f"device: {row}", name, iteration, times[first], times[last])


class NoTrace:
    """The trace of whoever is not traced."""

    active = False
    """Whether spans are taken at present."""
    record_timed_event: Callable[[], Any] | None = None
    """Takes the time at a place of the device's current stream, for `add_device`; None where nobody wants it."""

    def begin(self, iteration: int) -> None:
        """An iteration begins; the first one after the window ends the tracing."""

    def span(self, row: str, name: str = "") -> AbstractContextManager[None]:
        """Take the time of a `with` block, on the host and on a device that works behind it; by any thread."""
        return _NOTHING

    def add(self, row: str, name: str, start: float, end: float) -> None:
        """A span whose times (`time.perf_counter`) were taken elsewhere; by any thread."""

    def add_device(self, row: str, name: str, first: Any, last: Any) -> None:
        """A span between two places in the device's work, which `record_timed_event` gave."""

    def paused(self) -> AbstractContextManager[None]:
        """Take no spans within a `with` block: work that is captured is not done."""
        return _NOTHING

    def recording(self, device_timer: DeviceTimer, places: int) -> AbstractContextManager[None]:
        """Within a `with` block work is captured; the device takes the times of its spans whenever it is replayed."""
        return _NOTHING

    def replayed(self) -> None:
        """What was captured while `recording` has been replayed once more; waits for the device."""


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
        self._record_timed_event: Callable[[], TimedEvent] | None = None
        self._recording: _Recording | None = None
        self._capturing = False
        self._origin: tuple[float, TimedEvent] | None = None
        self._epoch = time.time() - time.perf_counter()

    def watch_device(self, record_timed_event: Callable[[], TimedEvent], synchronize: Callable[[], None]) -> None:
        """Take the device's own times too.

        Called once, before training, where the device works behind the host.

        Args:
            record_timed_event: `Backend.record_timed_event`.
            synchronize: `Backend.synchronize`.
        """
        self._record_timed_event = record_timed_event
        synchronize()
        self._origin = (time.perf_counter(), record_timed_event())

    def begin(self, iteration: int) -> None:
        if self._window is None:
            self._window = range(iteration + FIRST, iteration + FIRST + LENGTH)
        self._iteration = iteration
        self.active = iteration in self._window

    def span(self, row: str, name: str = "") -> AbstractContextManager[None]:
        if not self.active:
            return _NOTHING
        if self._capturing:
            assert self._recording is not None
            return self._recording.span(row, name or row) if row in ON_DEVICE else _NOTHING
        return self._timed(row, name or row, self._record_timed_event if row in ON_DEVICE else None)

    @contextmanager
    def _timed(self, row: str, name: str, record_timed_event: Callable[[], TimedEvent] | None) -> Iterator[None]:
        first = record_timed_event() if record_timed_event is not None else None
        start = time.perf_counter()
        yield
        self._spans.append(Span(row, name, self._iteration, start, time.perf_counter()))
        if first is not None and record_timed_event is not None:
            self._device_spans.append(_DeviceSpan(row, name, self._iteration, first, record_timed_event()))

    def add(self, row: str, name: str, start: float, end: float) -> None:
        if self.active and not self._capturing:
            self._spans.append(Span(row, name, self._iteration, start, end))

    @property
    def record_timed_event(self) -> Callable[[], Any] | None:  # type: ignore[override]
        if not self.active:
            return None
        return self._recording.place if self._capturing and self._recording is not None else self._record_timed_event

    def add_device(self, row: str, name: str, first: Any, last: Any) -> None:
        if self._capturing and self._recording is not None:
            self._recording.add(row, name, first, last)
        elif self.active:
            self._device_spans.append(_DeviceSpan(row, name, self._iteration, first, last))

    @contextmanager
    def paused(self) -> Iterator[None]:
        active, self.active = self.active, False
        try:
            yield
        finally:
            self.active = active

    @contextmanager
    def recording(self, device_timer: DeviceTimer, places: int) -> Iterator[None]:
        self._recording = _Recording(device_timer, places)
        active, self.active, self._capturing = self.active, True, True
        try:
            yield
        finally:
            self.active, self._capturing = active, False

    def replayed(self) -> None:
        if self._recording is not None:
            self._spans += self._recording.spans(self._iteration)

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
