"""A timeline of training in the trace event format that Chrome (chrome://tracing) and Perfetto read.

A `Trace` belongs to one device and holds spans of time, in rows, of a window of iterations. Nets, solvers and
communicators add spans; the owner reads `events` when training is over. `NO_TRACE` takes the same calls and does
nothing. Captured work reports its spans once, during capture; the device takes their times in each launch of the graph.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from caffepy.utils.files import atomic_write

if TYPE_CHECKING:
    from caffepy.backend.types import DeviceTimer, TimedEvent

ROWS = ("iteration", "feed", "forward", "backward", "exchange", "update", "test", "snapshot", "waits")
"""The rows in the order in which they are shown; further rows, such as those of buckets, come after them."""
ON_DEVICE = ("iteration", "forward", "backward", "exchange", "update")
"""Rows whose work is asynchronous on a GPU."""
FIRST = 5
"""The default window leaves out this many iterations, which allocate, compile and tune."""
LENGTH = 10
"""Iterations in the default window."""

_NOTHING = nullcontext()


class Span(NamedTuple):
    """A span of time.

    Args:
        row: where it is shown.
        name: of the work.
        iteration: of the solver.
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
    """Spans of captured work.

    Args:
        device_timer: takes a timestamp at each end of a span; its last one calibrates it to the host's clock.
        timestamps: its capacity.
    """

    def __init__(self, device_timer: DeviceTimer, timestamps: int) -> None:
        self._timer = device_timer
        self._timestamps = timestamps
        self._used = 0
        self._host: float | None = None
        self._spans: list[tuple[str, str, int, int]] = []

    def take_timestamp(self) -> int:
        """Take a timestamp here, in every launch of the graph; returns its index."""
        index = self._used
        assert index < self._timestamps - 1, "the work has more spans than its timer has timestamps for"
        self._used += 1
        self._timer.start(index)
        return index

    def add(self, row: str, name: str, first: int, last: int) -> None:
        """Add a span between two timestamps."""
        self._spans.append((row, name, first, last))

    @contextmanager
    def span(self, row: str, name: str) -> Iterator[None]:
        """Add the `with` block as a span."""
        first = self.take_timestamp()
        yield
        self.add(row, name, first, self.take_timestamp())

    def spans(self, iteration: int) -> Iterator[Span]:
        """The spans of the graph's last launch; waits for the device."""
        if self._host is None:
            self._timer.start(self._timestamps - 1)
            own = self._timer.times()[-1]
            self._host = time.perf_counter() - own
        times = [self._host + seconds for seconds in self._timer.times()]
        for row, name, first, last in self._spans:
            yield Span(f"device: {row}", name, iteration, times[first], times[last])


class Tracer(Protocol):
    """The interface through which nets, solvers and communicators add spans."""

    @property
    def active(self) -> bool:
        """Whether spans are being recorded."""

    @property
    def record_timed_event(self) -> Callable[[], Any] | None:
        """Records a timed event on the device's current stream, for `add_device`; None while inactive."""

    def watch_device(self, record_timed_event: Callable[[], TimedEvent], synchronize: Callable[[], None]) -> None:
        """Take times on the device too.

        Called once, before training, on devices that work asynchronously.

        Args:
            record_timed_event: `Backend.record_timed_event`.
            synchronize: `Backend.synchronize`.
        """

    def begin(self, iteration: int) -> None:
        """Begin an iteration; the first one after the window ends the tracing."""

    def span(self, row: str, name: str = "") -> AbstractContextManager[None]:
        """Time a `with` block on the host and on an asynchronous device. Thread-safe."""

    def add(self, row: str, name: str, start: float, end: float) -> None:
        """Add a span with given times of `time.perf_counter`. Thread-safe."""

    def add_device(self, row: str, name: str, first: Any, last: Any) -> None:
        """Add a span between two timed events that `record_timed_event` returned."""

    def paused(self) -> AbstractContextManager[None]:
        """Record no spans within a `with` block, such as the capture of work that is not executed."""

    def recording(self, device_timer: DeviceTimer, timestamps: int) -> AbstractContextManager[None]:
        """Capture the spans of a `with` block; the device takes their times in each launch of the graph."""

    def replayed(self) -> None:
        """Add the spans of another launch of the work captured under `recording`; waits for the device."""

    def events(self, process: int, name: str) -> list[dict[str, Any]]:
        """Return trace events: one for each span, and the names of the device and its rows.

        The device must be idle.

        Args:
            process: the device's number among all devices; viewers show it as a process.
            name: of the device, as viewers show it.
        """


class NoTrace:
    """A tracer that records nothing."""

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
    """The timeline of one device, see `Tracer`.

    Args:
        window: iterations to trace; None: `LENGTH` iterations after the `FIRST` ones.
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
        """Return the recorded spans; rows of an asynchronous device are named ``device: forward``.

        The device must be idle.
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


MARK = b'{"displayTimeUnit"'
"""The first bytes of a trace."""


def write_trace(path: Path, devices: Iterable[Sequence[dict[str, Any]]]) -> int:
    """Write the events of all devices to one file; returns the number of spans.

    Times count from the earliest span, by the hosts' clocks.

    Raises:
        RunError: the file cannot be written.
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
    """Compress the events of a process's devices, to send them to the root."""
    return zlib.compress(json.dumps(devices).encode())


def unpack_events(packed: bytes) -> list[list[dict[str, Any]]]:
    """The inverse of `pack_events`."""
    devices: list[list[dict[str, Any]]] = json.loads(zlib.decompress(packed))
    return devices


def _in_order(rows: set[str]) -> list[str]:
    """Sort rows: the stages of `ROWS`, other rows, then the device's rows in the same order."""

    def sort_key(row: str) -> tuple[bool, int, int, str]:
        stage = row.removeprefix("device: ")
        # Shorter names first: bucket 9 comes before bucket 10.
        return row.startswith("device: "), ROWS.index(stage) if stage in ROWS else len(ROWS), len(row), row

    return sorted(rows, key=sort_key)


def _naming(kind: str, process: int, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": row, "name": kind, "args": {"name": name}}


def _sorting(kind: str, process: int, row: int, index: int) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": row, "name": kind, "args": {"sort_index": index}}
