"""Processes beside this one that compile the CPU kernels of its nets before they are called; they keep them on disk.

Owns their start, their end and the wait for them. They are a program (`caffepy/training/kernel_worker.py`) that is told
about the nets; see docs/how-to/cpu.md. Whatever goes wrong with it, kernels are compiled by whoever calls them.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress

from caffepy.forks import tell_after_fork

logger = logging.getLogger(__name__)

WAIT = 60.0
"""Seconds that a thread waits for a kernel before it compiles it itself."""
NAMES_WAIT = 5.0
"""Seconds that it waits for the names of the kernels."""
_LIST, _DONE = "list", "done"


class KernelProcesses:
    """The processes of one program: it reads descriptions of nets, one a line, and writes what it does.

    Its lines are ``list`` with the names of all kernels that it will compile, and ``done`` with one that it has
    compiled or given up. What it compiled is in the cache.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._command: Sequence[str] = ()
        self._nets: list[str] = []
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread()
        self._submitted = self._ended = self._at_once = False
        self._names: frozenset[str] | None = None
        self._done: set[str] = set()
        tell_after_fork(self)

    def forked(self) -> None:
        """The program is the parent's: this process compiles its kernels itself."""
        self._changed = threading.Condition()
        self._process, self._ended = None, True
        atexit.unregister(self.close)

    def allow(self, command: Sequence[str]) -> None:
        """Let the program be started when a kernel is wanted that the cache does not have."""
        self._command = command

    def start(self, command: Sequence[str]) -> None:
        """Start the program at once: there is nothing in the cache."""
        self._command, self._at_once = command, True
        self._start()

    @property
    def wanted(self) -> bool:
        """Whether descriptions of nets are of any use."""
        return bool(self._command) and not self._submitted

    def foresee(self, net: str) -> None:
        """Describe a net, by one line, whose kernels will be called; see `submit`."""
        with self._changed:
            if self.wanted:
                self._nets.append(net)

    def submit(self) -> None:
        """All nets are described."""
        with self._changed:
            self._submitted = True
            self._changed.notify_all()

    def missed(self) -> None:
        """A kernel has to be compiled: have the program compile those that will follow."""
        if self._command and self._process is None and self._submitted and self._nets and not self._ended:
            self._start()

    def wait(self, name: str) -> None:
        """Wait until the program has done with a kernel, if that is one of its own."""
        if self._process is None or not self._submitted:
            return
        with self._changed:
            if self._names is None and self._at_once:
                self._changed.wait_for(lambda: self._names is not None or self._ended, NAMES_WAIT)
            if name not in (self._names or ()):
                return
            if not self._changed.wait_for(lambda: name in self._done or self._ended, WAIT):
                logger.debug("no process has compiled %s in %.0f s", name, WAIT)

    def close(self) -> None:
        """End the program."""
        with self._changed:
            process, self._ended = self._process, True
            self._changed.notify_all()
        if process is None:
            return
        _kill(process)
        if self._thread.is_alive():
            self._thread.join(5.0)
        atexit.unregister(self.close)

    def _start(self) -> None:
        pipe = subprocess.PIPE
        with self._changed:
            if self._process is not None:
                return
            try:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                logger.debug("CPU kernels are compiled by this process alone: %s", error)
                self._ended = True
                return
        thread = threading.Thread(target=self._serve, args=(self._process,), name="kernel processes", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system gives no more threads
            logger.debug("CPU kernels are compiled by this process alone: %s", error)
            self._ended = True
            with self._process as process:
                _kill(process)
            return
        self._thread = thread
        atexit.register(self.close)

    def _serve(self, process: subprocess.Popen[str]) -> None:
        """Tell the program about the nets, and read what it does until it ends."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._submitted or self._ended)
            with process.stdout as lines:
                with process.stdin as nets:
                    nets.writelines(f"{net}\n" for net in self._nets)
                for line in lines:
                    self._note(line)
        except (OSError, ValueError) as error:
            logger.debug("the processes that compile CPU kernels: %s", error)
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()
            self._end(process)

    def _note(self, line: str) -> None:
        word, *names = line.split()
        with self._changed:
            if word == _LIST:
                self._names = frozenset(names)
            elif word == _DONE:
                self._done.update(names)
            self._changed.notify_all()

    def _end(self, process: subprocess.Popen[str]) -> None:
        try:
            process.wait(1.0)
        except subprocess.TimeoutExpired:
            _kill(process)
            process.wait(5.0)


def _kill(process: subprocess.Popen[str]) -> None:
    """End a program and the processes that it has forked, which are a group."""
    if process.poll() is None:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)


PROCESSES = KernelProcesses()
"""Those of this process."""


def list_line(names: Sequence[str]) -> str:
    """What the program writes first."""
    return " ".join((_LIST, *names))


def done_line(name: str) -> str:
    """What it writes about each kernel."""
    return f"{_DONE} {name}"
