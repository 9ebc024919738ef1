"""Processes that compile kernels before they are needed.

Each is `worker.py`, fed by a thread of this process through pipes, and ends when it has had nothing to do for a while,
when this process ends, however that comes about, or at the first fault. Whoever needs a kernel that none of them has
begun compiles it himself.
"""

from __future__ import annotations

import atexit
import logging
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

MAX_PROCESSES = 8
IDLE = 5.0
"""Seconds without a job after which a process ends."""
WAIT = 60.0
"""Seconds that a thread waits for a kernel that is being compiled before it compiles it itself."""


@dataclass(eq=False)
class Job:
    """A text to compile.

    Args:
        key: names the result.
        text: the CUDA text.
        options: NVRTC's.
    """

    key: str
    text: bytes
    options: Sequence[str]
    made: str = ""
    """The name of the file, empty where it was not made."""
    done: threading.Event = field(default_factory=threading.Event)

    def frame(self) -> bytes:
        """What the process reads."""
        return f"{self.key}\n{' '.join(self.options)}\n{len(self.text)}\n".encode() + self.text

    def finish(self, made: str) -> None:
        """Let whoever waits for it go on."""
        self.made, self.text = made, b""
        self.done.set()


class Pool:
    """Processes of one command.

    Args:
        command: of a process.
        most: how many there may be at once.
    """

    def __init__(self, command: Sequence[str], most: int) -> None:
        self._command = command
        self._most = most
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._jobs: dict[str, Job] = {}
        self._threads = 0
        self._idle = 0
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._closed = most < 1
        atexit.register(self.close)

    def add(self, job: Job) -> None:
        """Have a text compiled, once; nothing where there can be no processes."""
        with self._changed:
            if self._closed or job.key in self._jobs:
                return
            self._jobs[job.key] = job
            self._waiting.append(job)
            if self._idle < len(self._waiting) and self._threads < self._most:
                self._threads += 1
                threading.Thread(target=self._serve, name="compiling", daemon=True).start()
            self._changed.notify()

    def result(self, key: str) -> str:
        """The file of a text that was added, for which this waits while it is being compiled; else empty."""
        with self._changed:
            job = self._jobs.get(key)
            if job is None:
                return ""
            if job in self._waiting:
                self._waiting.remove(job)
                job.finish("")
        if not job.done.wait(WAIT):
            logger.debug("a process has not compiled %s in %.0f s", key, WAIT)
        return job.made

    def close(self) -> None:
        """End all processes."""
        with self._changed:
            self._closed = True
            processes = list(self._processes)
            while self._waiting:
                self._waiting.popleft().finish("")
            self._changed.notify_all()
        for process in processes:
            process.kill()
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(5.0)
        atexit.unregister(self.close)

    def _serve(self) -> None:
        """Feed one process until there is nothing to do."""
        process = None
        try:
            process = self._start()
            while job := self._next():
                try:
                    job.finish(_ask(process, job))
                finally:
                    job.finish(job.made)
        except (OSError, ValueError, RuntimeError) as error:
            logger.debug("kernels are not compiled by a process of their own: %s", error)
            self.close()
        finally:
            with self._changed:
                self._threads -= 1
            if process is not None:
                self._end(process)

    def _start(self) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        with self._changed:
            self._processes.add(process)
            if self._closed:
                process.kill()
        return process

    def _next(self) -> Job | None:
        with self._changed:
            self._idle += 1
            try:
                self._changed.wait_for(lambda: self._waiting or self._closed, IDLE)
            finally:
                self._idle -= 1
            return self._waiting.popleft() if self._waiting else None

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()
        try:
            process.wait(1.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5.0)
        with self._changed:
            self._processes.discard(process)


def _ask(process: subprocess.Popen[bytes], job: Job) -> str:
    """The answer of a process.

    Raises:
        OSError: it is not there any more.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(job.frame())
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        raise BrokenPipeError("the process ended")
    return answer.decode().strip()


def worker_command(program: str, library: str, folder: str) -> list[str]:
    """The line that starts `worker.py`; empty where there is no Python to start.

    Args:
        program: path of `worker.py`.
        library: path of libnvrtc.so.
        folder: where the files go.
    """
    return [sys.executable, "-I", "-S", program, library, folder] if sys.executable else []


def most_processes() -> int:
    """All cores that this process may use but the one that its main thread has, up to `MAX_PROCESSES`."""
    return min(MAX_PROCESSES, len(os.sched_getaffinity(0)) - 1)
