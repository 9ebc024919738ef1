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


_TERM_SECONDS = 2.0
"""Between SIGTERM and SIGKILL."""
_DRAIN_SECONDS = 2.0
"""How long the rest of its output is read after the process has ended: another process may hold the pipe open."""
_ERROR = re.compile(rb"(?:[EF]\d{4} [\d:.]+ +\d+ \S+\] (?:\[rank \d+\] )?|caffepy: error: )(.+)")
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


class Child:
    """A process in a session of its own, so that a terminal's Ctrl-C comes to this process alone.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, command: Command) -> None:
        self.error = ""
        """The first error that it has printed."""
        self._process = _start(command)
        # Read all the time: a process whose pipe is full would stop in its next log line.
        self._reader = threading.Thread(target=self._forward, name="launcher's stderr", daemon=True)
        self._reader.start()

    def status(self) -> int | None:
        """The exit status as a shell has it; None while it runs."""
        code = self._process.poll()
        return None if code is None else shell_status(code)

    def read_rest(self) -> None:
        """Wait until all that it wrote was forwarded."""
        self._reader.join(_DRAIN_SECONDS)

    def _forward(self) -> None:
        assert self._process.stderr is not None
        rest = b""
        with self._process.stderr as file:
            while part := os.read(file.fileno(), _LONGEST_LINE):
                # Bytes are passed on before lines are looked at, so that progress lines without an end appear at once.
                write_through(part)
                *lines, rest = (rest + part).split(b"\n")
                # A line without an end must not take memory without one.
                rest = rest[-_LONGEST_LINE:]
                for line in lines:
                    self._look(line)
        self._look(rest)

    def _look(self, line: bytes) -> None:
        if not self.error and (match := _ERROR.match(line)):
            self.error = match[1].decode(errors="replace").strip()

    def terminate(self) -> None:
        """Ask it to end."""
        self._process.terminate()

    def wait_or_kill(self, end: float) -> None:
        """Wait for its end until a time, by `time.monotonic`; kill it then."""
        try:
            self._process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def end_all(children: Sequence[Child]) -> None:
    """End running children: by SIGTERM, and two seconds later by SIGKILL."""
    alive = [child for child in children if child.status() is None]
    for child in alive:
        child.terminate()
    end = time.monotonic() + _TERM_SECONDS
    for child in alive:
        child.wait_or_kill(end)


def write_through(part: bytes) -> None:
    """Write bytes to stderr; a stderr that was closed is no reason to end a job."""
    try:
        sys.stderr.buffer.write(part)
        sys.stderr.buffer.flush()
    except (OSError, ValueError):
        return


def shell_status(code: int) -> int:
    """The exit status that a shell gives: 128 and its number for a process that a signal has ended."""
    return code if code >= 0 else 128 - code


def _start(command: Command) -> subprocess.Popen[bytes]:
    library, parent = ctypes.CDLL(None, use_errno=True), os.getpid()

    def die_with_parent() -> None:
        if hasattr(library, "prctl"):
            # The session of its own keeps Ctrl-C away, and with it the end of the terminal: the kernel ends the process
            # with this one.
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


@dataclass(frozen=True)
class ExitReport:
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
        """Signals that arrived and were not handled yet."""
        self._waiting: deque[tuple[int, float]] = deque()
        """Signals that no rank has received so far, with their times."""
        self._next_try = 0.0
        self._interrupts = 0
        self._end_at = float("inf")
        """When all is ended by force."""

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

    def run(self, commands: Sequence[Command]) -> ExitReport:
        """Start processes and wait for them.

        Raises:
            OSError: a program cannot be started.
        """
        children: list[Child] = []
        self._end_at = float("inf")
        self._waiting.clear()
        try:
            for command in commands:  # started ones are ended in any case
                children.append(Child(command))
            return self._wait(children)
        finally:
            end_all(children)
            if any(child.status() for child in children):
                self._clear()

    def pause(self, seconds: float) -> None:
        """Wait before another start, unless a signal asks for the end."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.stopping:
            self._look_at_signals()
            time.sleep(_POLL)

    # -- signals ------------------------------------------------------------------------------------

    def _take(self, number: int, frame: FrameType | None) -> None:
        # A handler may interrupt any line; the work is done in the loop.
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
        # The ranks are in sessions of their own, where the terminal's Ctrl-Z does not reach them.
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
            if now - came > _START_SECONDS and self._stops.get(signal.Signals(number), False) and self._end_at > now:
                name = signal.Signals(number).name
                logger.error("no rank has taken %s for %g s (are all suspended?): ending", name, now - came)
                self._end_at = now

    # -- processes ----------------------------------------------------------------------------------

    def _wait(self, children: Sequence[Child]) -> ExitReport:
        status, running = 0, list(children)
        while running:
            self._look_at_signals()
            self._forward()
            for child in [child for child in running if child.status() is not None]:
                running.remove(child)
                # The first failure's status is the job's; processes that end later mostly end because of it.
                if not status and (status := child.status() or 0):
                    self._end_at = min(self._end_at, time.monotonic() + END_SECONDS)
            if time.monotonic() > self._end_at:
                end_all(children)
            time.sleep(_POLL)
        for child in children:
            child.read_rest()
        again = self._interrupts > 1
        error = next((child.error for child in children if child.error), "")
        return ExitReport(128 + signal.SIGINT if again else status, error, self.stopping)
