"""A timeline of training in the trace event format that Chrome (chrome://tracing) and Perfetto read.

A `Trace` belongs to one device and holds what it did in a window of iterations: spans of time in rows. Nets, solvers
and whoever connects devices put their spans into it; whoever made it asks for its `events` once training is over. Where
nobody traces, the same calls reach `NO_TRACE`, which does nothing. Captured work reports its spans once, while it is
captured; the device takes their times in each replay.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

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
        device_timer: takes the time of each end of a span; its last timestamp compares it with the host's clock.
        timestamps: how many it can take.
    """

    def __init__(self, device_timer: DeviceTimer, timestamps: int) -> None:
        self._timer = device_timer
        self._timestamps = timestamps
        self._used = 0
        self._host: float | None = None
        self._spans: list[tuple[str, str, int, int]] = []

    def take_timestamp(self) -> int:
        """Take the time here, in every replay; gives the timestamp's index."""
        index = self._used
        assert index < self._timestamps - 1, "the work has more spans than its timer has timestamps for"
        self._used += 1
        self._timer.start(index)
        return index

    def add(self, row: str, name: str, first: int, last: int) -> None:
        """What lies between two timestamps is a span."""
        self._spans.append((row, name, first, last))

    @contextmanager
    def span(self, row: str, name: str) -> Iterator[None]:
        """A `with` block is a span."""
        first = self.take_timestamp()
        yield
        self.add(row, name, first, self.take_timestamp())

    def spans(self, iteration: int) -> Iterator[Span]:
        """The spans of the replay that was asked for last; waits for the device."""
        if self._host is None:
            self._timer.start(self._timestamps - 1)
            own = self._timer.times()[-1]
            self._host = time.perf_counter() - own
        times = [self._host + seconds for seconds in self._timer.times()]
        for row, name, first, last in self._spans:
            yield Span(f"device: {row}", name, iteration, times[first], times[last])


class Tracer(Protocol):
    """What nets, solvers and whoever connects devices put their spans into."""

    @property
    def active(self) -> bool:
        """Whether spans are taken at present."""

    @property
    def record_timed_event(self) -> Callable[[], Any] | None:
        """Records a timed event on the device's current stream, for `add_device`; None where nobody wants it."""

    def watch_device(self, record_timed_event: Callable[[], TimedEvent], synchronize: Callable[[], None]) -> None:
        """Take the device's own times too.

        Called once, before training, where the device works behind the host.

        Args:
            record_timed_event: `Backend.record_timed_event`.
            synchronize: `Backend.synchronize`.
        """

    def begin(self, iteration: int) -> None:
        """An iteration begins; the first one after the window ends the tracing."""

    def span(self, row: str, name: str = "") -> AbstractContextManager[None]:
        """Take the time of a `with` block, on the host and on a device that works behind it; by any thread."""

    def add(self, row: str, name: str, start: float, end: float) -> None:
        """A span whose times (`time.perf_counter`) were taken elsewhere; by any thread."""

    def add_device(self, row: str, name: str, first: Any, last: Any) -> None:
        """A span between two timed events of the device, which `record_timed_event` gave."""

    def paused(self) -> AbstractContextManager[None]:
        """Take no spans within a `with` block: work that is captured is not done."""

    def recording(self, device_timer: DeviceTimer, timestamps: int) -> AbstractContextManager[None]:
        """Within a `with` block work is captured; the device takes the times of its spans whenever it is replayed."""

    def replayed(self) -> None:
        """What was captured while `recording` has been replayed once more; waits for the device."""

    def events(self, process: int, name: str) -> list[dict[str, Any]]:
        """Trace events: one for each span, and the names of the device and its rows.

        Call it when the device is idle.

        Args:
            process: the device's number among all devices; the viewers call it a process.
            name: what the viewers call the device.
        """


class NoTrace:
    """Takes no times."""

    active = False
    record_timed_event: Callable[[], Any] | None = None

    def watch_device(self, record_timed_event: Callable[[], TimedEvent], synchronize: Callable[[], None]) -> None: ...

    def begin(self, iteration: int) -> None: ...

    def span(self, row: str, name: str = "") -> AbstractContextManager[None]:
        return _NOTHING

    def add(self, row: str, name: str, start: float, end: float) -> None: ...

    def add_device(self, row: str, name: str, first: Any, last: Any) -> None: ...

    def paused(self) -> AbstractContextManager[None]:
        return _NOTHING

    def recording(self, device_timer: DeviceTimer, timestamps: int) -> AbstractContextManager[None]:
        return _NOTHING

    def replayed(self) -> None: ...

    def events(self, process: int, name: str) -> list[dict[str, Any]]:
        return []


NO_TRACE = NoTrace()


class Trace:
    """What one device did, see `Tracer`.

    Args:
        window: iterations to trace; None: a few after the first ones.
    """

    def __init__(self, window: range | None = None) -> None:
        self.active = False
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
    def record_timed_event(self) -> Callable[[], Any] | None:
        if not self.active:
            return None
        if self._capturing and self._recording is not None:
            return self._recording.take_timestamp
        return self._record_timed_event

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
    def recording(self, device_timer: DeviceTimer, timestamps: int) -> Iterator[None]:
        self._recording = _Recording(device_timer, timestamps)
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
        spans = list(self._spans)
        if self._origin is not None:
            begin, origin = self._origin
            for row, name, iteration, first, last in self._device_spans:
                start = begin + first.seconds_since(origin)
                spans.append(Span(f"device: {row}", name, iteration, start, start + last.seconds_since(first)))
        return spans

    def events(self, process: int, name: str) -> list[dict[str, Any]]:
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
    with atomic_write(path) as file:
        file.write(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}).encode())
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

    def sort_key(row: str) -> tuple[bool, int, int, str]:
        stage = row.removeprefix("device: ")
        # Shorter names first: bucket 9 comes before bucket 10.
        return row.startswith("device: "), ROWS.index(stage) if stage in ROWS else len(ROWS), len(row), row

    return sorted(rows, key=sort_key)


def _naming(kind: str, process: int, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": row, "name": kind, "args": {"name": name}}


def _sorting(kind: str, process: int, row: int, index: int) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": row, "name": kind, "args": {"sort_index": index}}
