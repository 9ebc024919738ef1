"""The parent of a launcher, or of ranks without one: forwards signals, reads the log, leaves no process behind."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)

_POLL = 0.05
"""Seconds between looks at the processes."""
_RETRY_SECONDS = 0.5
"""Between attempts to forward a signal while there is no rank yet."""
_START_SECONDS = 60.0
"""How long a signal waits for ranks that can take it; then the launcher is ended."""
_AGAIN_SECONDS = 2.0
"""What the ranks are given after a second Ctrl-C to say that they end."""
END_SECONDS = 12.0
"""What processes are given to end when others of their job have failed: more than the ten seconds that they promise."""
_TERM_SECONDS = 2.0
"""Between SIGTERM and SIGKILL for a launcher."""
_DRAIN_SECONDS = 2.0
"""How long what was written is read after the processes have ended: somebody may hold the pipe open."""
_ERROR = re.compile(rb"(?:E\d{4} [\d:.]+ +\d+ \S+\] (?:\[rank \d+\] )?|caffepy: error: )(.+)")
_LONGEST_LINE = 1 << 16
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Command:
    """A process to start.

    Args:
        line: program and arguments.
        environment: all of it.
        last_signal: what the kernel sends it when this process ends before it.
    """

    line: Sequence[str]
    environment: Mapping[str, str]
    last_signal: int = signal.SIGTERM


@dataclass(frozen=True)
class Ending:
    """How processes ended.

    Args:
        status: the exit status as a shell has it, of the first process that failed; 0: none did.
        error: the first error that any of them has printed; empty: none.
        stopped: a signal to this process had asked for the end.
    """

    status: int
    error: str = ""
    stopped: bool = False


class Supervisor:
    """Runs processes to their end; a context manager that takes SIGINT, SIGTERM, SIGHUP and SIGTSTP meanwhile.

    Args:
        deliver: sends a signal to the ranks, wherever they run; returns whether any got it.
        clear: ends all that is left of the job on this machine; returns how many processes that were.
        suspend: sends a signal to all processes of the job on this machine.
        interrupt_stops: whether SIGINT makes the ranks end, so that a second one ends them at once.
        terminate_stops: whether SIGTERM makes the ranks end.
    """

    def __init__(
        self,
        deliver: Callable[[int], bool],
        clear: Callable[[], int] = lambda: 0,
        suspend: Callable[[int], Any] = lambda number: None,
        interrupt_stops: bool = True,
        terminate_stops: bool = True,
    ) -> None:
        self.stopping = False
        """Whether a signal has asked for the end."""
        self._deliver = deliver
        self._clear = clear
        self._suspend = suspend
        self._stops = {signal.SIGINT: interrupt_stops, signal.SIGTERM: terminate_stops}
        self._signals: deque[int] = deque()
        """Those that came and have not been looked at."""
        self._waiting: deque[tuple[int, float]] = deque()
        """Those that no rank has got so far, and when they came."""
        self._next_try = 0.0
        self._interrupts = 0
        self._end_at = float("inf")
        """When all is ended by force."""
        self._processes: list[subprocess.Popen[bytes]] = []

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Take signals within a `with` block."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP)
        before = {number: signal.signal(number, self._take) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def run(self, commands: Sequence[Command]) -> Ending:
        """Start processes and wait for them.

        Raises:
            OSError: a program cannot be started.
        """
        listeners: list[_Listener] = []
        self._end_at = float("inf")
        self._waiting.clear()
        try:
            for command in commands:
                process = start(command)
                self._processes.append(process)
                listeners.append(_Listener(process))
            return self._wait(listeners)
        finally:
            self._end_processes()
            if any(process.returncode for process in self._processes):
                self._clear()
            self._processes = []

    def pause(self, seconds: float) -> None:
        """Wait before another start, unless a signal asks for the end."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.stopping:
            self._look_at_signals()
            time.sleep(_POLL)

    # -- signals ------------------------------------------------------------------------------------

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _look_at_signals(self) -> None:
        now = time.monotonic()
        while self._signals:
            number = self._signals.popleft()
            if number == signal.SIGTSTP:
                self._stop_with_all()
                continue
            if self._stops.get(signal.Signals(number), False):
                self.stopping = True
                self._interrupts += number == signal.SIGINT
            if self._interrupts > 1 and self._end_at == float("inf"):
                logger.error("interrupted again: ending at once")
                self._end_at = now + _AGAIN_SECONDS
            self._waiting.append((number, now))

    def _stop_with_all(self) -> None:
        """Ctrl-Z and what follows it."""
        self._suspend(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._suspend(signal.SIGCONT)

    def _forward(self) -> None:
        """Send what waits, in order; where no rank has come up in time for it, the launcher is ended."""
        now = time.monotonic()
        while self._waiting and now >= self._next_try:
            number, came = self._waiting[0]
            if self._deliver(number):
                self._waiting.popleft()
                continue
            self._next_try = now + _RETRY_SECONDS
            if now - came > _START_SECONDS and self._stops.get(signal.Signals(number), False):
                self._end_at = now

    # -- processes ----------------------------------------------------------------------------------

    def _wait(self, listeners: Sequence[_Listener]) -> Ending:
        status, counted = 0, set[int]()
        while len(counted) < len(self._processes):
            self._look_at_signals()
            self._forward()
            for process in self._processes:
                if process.poll() is None or process.pid in counted:
                    continue
                counted.add(process.pid)
                if process.returncode and not status:
                    status = shell_status(process.returncode)
                    self._end_at = min(self._end_at, time.monotonic() + END_SECONDS)
            if time.monotonic() > self._end_at:
                self._end_processes()
            time.sleep(_POLL)
        for listener in listeners:
            listener.join()
        again = self._interrupts > 1
        error = next((listener.error for listener in listeners if listener.error), "")
        return Ending(128 + signal.SIGINT if again else status, error, self.stopping)

    def _end_processes(self) -> None:
        """End what still runs."""
        alive = [process for process in self._processes if process.poll() is None]
        for process in alive:
            process.terminate()
        end = time.monotonic() + _TERM_SECONDS
        for process in alive:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class _Listener:
    """Forwards what a process writes to stderr, and keeps the first error in it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.error = ""
        self._file = process.stderr
        self._thread = threading.Thread(target=self._run, name="launcher's stderr", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until all was read."""
        self._thread.join(_DRAIN_SECONDS)

    def _run(self) -> None:
        assert self._file is not None
        rest = b""
        with self._file as file:
            while part := os.read(file.fileno(), _LONGEST_LINE):
                write_through(part)
                *lines, rest = (rest + part).split(b"\n")
                rest = rest[-_LONGEST_LINE:]
                for line in lines:
                    self._look(line)
        self._look(rest)

    def _look(self, line: bytes) -> None:
        if not self.error and (match := _ERROR.match(line)):
            self.error = match[1].decode(errors="replace").strip()


def write_through(part: bytes) -> None:
    """Write to stderr as it is; a stderr that went away is no reason to end a job."""
    try:
        sys.stderr.buffer.write(part)
        sys.stderr.buffer.flush()
    except (OSError, ValueError):
        return


def shell_status(code: int) -> int:
    """The exit status that a shell gives: 128 and its number for a process that a signal has ended."""
    return code if code >= 0 else 128 - code


def start(command: Command) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, so that a terminal's Ctrl-C comes to this process alone.

    Raises:
        OSError: it cannot be started.
    """
    library, parent = ctypes.CDLL(None, use_errno=True), os.getpid()

    def die_with_parent() -> None:
        if hasattr(library, "prctl"):
            library.prctl(_PR_SET_PDEATHSIG, int(command.last_signal), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(128 + command.last_signal)

    return subprocess.Popen(
        command.line,
        env=dict(command.environment),
        # a terminal that is not the session's own cannot be read
        stdin=subprocess.DEVNULL if os.isatty(0) else None,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
