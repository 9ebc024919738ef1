"""Kernels that are compiled ahead of time: which ones some work would call, and how processes share them out.

Owns nothing that runs in a process that trains; see `caffepy/phases/kernel_processes.py`.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from numba.core.registry import cpu_target

from caffepy.backend.cpu.jit.cache import can_keep
from caffepy.backend.cpu.jit.kernel import Entry
from caffepy.backend.cpu.jit.recording import CURRENT, Recording
from caffepy.backend.cpu.jit.threads import LOOP_NAME, compile_parallel_loop

logger = logging.getLogger(__name__)

Job = tuple[str, Callable[[], object]]
"""A kernel's name and what compiles it."""
_NUMBER = struct.Struct("=I")
MAX_JOBS = 4096
"""Jobs at most: a pipe holds their numbers, 16 KiB, before anybody reads them (pipe(7))."""
_LARGE = ("convolution", "winograd", "gemm")
"""Folders whose kernels take longest to compile."""


class ForeseenKernels(Recording):
    """Notes the kernels of some work, which are not run."""

    foresees = True

    def __init__(self) -> None:
        super().__init__()
        self.entries: dict[Entry, None] = {}
        self.is_parallel = False

    def take(self, entry: Entry, pieces: int) -> bool:
        """Note a call; it is not to be made."""
        self.entries[entry] = None
        self.is_parallel = self.is_parallel or pieces > 1
        return True

    def note(self, work: Callable[[], object]) -> None:
        """Do some work without its kernels; one that fails has been noted until there."""
        CURRENT.recording = self
        try:
            work()
        except Exception as error:  # what is not computed may be no label and no index
            logger.debug("not all kernels of a net are foreseen: %r", error)
        finally:
            CURRENT.recording = None

    def jobs(self) -> list[Job]:
        """What compiles each kernel: first what all of them wait for, last those that take no time.

        Processes that begin with long ones end at the same time.
        """
        entries = sorted(self.entries, key=lambda entry: Path(entry.file).parent.name not in _LARGE)
        loop: list[Job] = [(LOOP_NAME, compile_parallel_loop)] * self.is_parallel
        return [*loop, *((entry.name, entry.compile) for entry in entries)][:MAX_JOBS]


def warm_up() -> None:
    """Do what numba does before it compiles its first function, 0.3 s."""
    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()


def compile_all(jobs: Sequence[Job], processes: int, done: Callable[[str], None]) -> None:
    """Compile kernels by this process and forks of it; returns when all have ended.

    Forks are made only where no other thread runs, which might hold a lock. A process takes the next job from a pipe,
    so that none is done twice and one that dies takes a single job with it. It takes no more when it cannot keep what
    it compiles, on a full disk: nobody would have anything of it.

    Args:
        jobs: in the order in which they are begun.
        processes: how many work at once, with this one.
        done: called, in the process that did it, with the name of each kernel, whether it could be compiled or not.
    """
    reader, writer = os.pipe()
    for number in range(len(jobs)):
        os.write(writer, _NUMBER.pack(number))
    os.close(writer)
    forks = _fork(min(processes, len(jobs)) - 1 if _may_fork() else 0, lambda: _work(reader, jobs, done))
    try:
        _work(reader, jobs, done)
    finally:
        os.close(reader)
        for fork in forks:
            os.waitpid(fork, 0)


def _fork(count: int, work: Callable[[], None]) -> list[int]:
    """Processes that do the work and end; fewer where the system gives no more."""
    forks: list[int] = []
    for _ in range(count):
        try:
            fork = os.fork()
        except OSError as error:
            logger.debug("no further process to compile kernels: %s", error)
            break
        if fork == 0:
            try:
                work()
            finally:
                os._exit(0)
        forks.append(fork)
    return forks


def _work(reader: int, jobs: Sequence[Job], done: Callable[[str], None]) -> None:
    while can_keep() and (number := os.read(reader, _NUMBER.size)):
        name, compile_kernel = jobs[_NUMBER.unpack(number)[0]]
        try:
            compile_kernel()
        except Exception as error:  # who calls the kernel will see it
            logger.debug("%s cannot be compiled: %r", name, error)
        done(name)


def _may_fork() -> bool:
    """Whether this process has one thread alone, a library's included."""
    try:
        threads = len(os.listdir("/proc/self/task"))
    except OSError:
        return False
    return hasattr(os, "fork") and threads == threading.active_count() == 1
