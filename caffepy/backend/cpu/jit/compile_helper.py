"""A helper process that compiles kernels of a pass from its end while this process makes the pass.

Kernels are compiled when they are called first; numba holds the GIL for half of that time. The first kernel that the
cache lacks forks the helper, which thereby has the net and every module. It calls the layers' passes from the last
to the first and executes no kernel: each is only compiled into the cache on disk, where this process finds it. The two
processes meet halfway.

The helper ends with the pass. Its arrays are copies, it prints nothing, and its failure only costs time: this process
compiles each kernel that it does not find.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LIMIT = 60
"""Seconds after which a helper ends in any case: a lock that another thread held may keep it waiting."""

Passes = Callable[[], Iterable[Callable[[], None]]]
"""Returns the layers' passes, from the last to the first."""


class _Helper(threading.local):
    """The helper of this thread's pass. Other threads that compile, as those of data layers, start none."""

    passes: Passes | None = None
    process = 0
    """Its process number."""


_HELPER = _Helper()
compiles_only = False
"""Whether this process is a helper, so that calls of kernels compile them and do nothing else."""


@contextmanager
def compile_helper(passes: Passes) -> Iterator[None]:
    """Let a helper process compile, once a kernel is missing in the block."""
    _HELPER.passes = passes if sys.platform == "linux" else None  # macOS's libraries do not survive a fork
    try:
        yield
    finally:
        _HELPER.passes = None
        process, _HELPER.process = _HELPER.process, 0
        if process:
            # The number belongs to another process if the program has waited for all of its children.
            with suppress(ChildProcessError):
                if os.waitpid(process, os.WNOHANG)[0] == 0:
                    os.kill(process, signal.SIGKILL)
                    os.waitpid(process, 0)


def start_helper() -> None:
    """Start the helper of this thread's pass, if it has none; called where the cache lacks a kernel."""
    passes, _HELPER.passes = _HELPER.passes, None
    if passes is None:
        return
    with warnings.catch_warnings(), suppress(OSError):  # no memory for a process
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of locks of other threads: see LIMIT
        _HELPER.process = process = os.fork()
        if process == 0:
            try:
                _compile(passes)
            finally:
                os._exit(0)


def _compile(passes: Passes) -> None:
    """Compile the kernels of these passes."""
    global compiles_only
    compiles_only = True
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LIMIT)
    with suppress(OSError):  # where memory runs out, this process ends and not the program
        Path("/proc/self/oom_score_adj").write_text("1000")
    gc.disable()  # no finalizer of the program's objects runs a second time
    logging.disable()
    with open(os.devnull, "w") as null:
        sys.stdout = sys.stderr = null  # in notebooks they have no descriptor
        for output in (1, 2):
            os.dup2(null.fileno(), output)
        for run in passes():
            # A backward pass may miss what its forward pass keeps for it.
            with suppress(Exception):
                run()
