"""A process that `caffepy launch` has started: its end, and what it writes to stderr."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_TERM_SECONDS = 2.0
"""Between SIGTERM and SIGKILL."""
_DRAIN_SECONDS = 2.0
"""How long what was written is read after the process has ended: somebody may hold the pipe open."""
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


class Child:
    """A process in a session of its own, so that a terminal's Ctrl-C comes to this process alone.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, command: Command) -> None:
        self.error = ""
        """The first error that it has printed."""
        self._process = _start(command)
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
                write_through(part)
                *lines, rest = (rest + part).split(b"\n")
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
    """End those that still run: by SIGTERM, and two seconds later by SIGKILL."""
    alive = [child for child in children if child.status() is None]
    for child in alive:
        child.terminate()
    end = time.monotonic() + _TERM_SECONDS
    for child in alive:
        child.wait_or_kill(end)


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


def _start(command: Command) -> subprocess.Popen[bytes]:
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
