"""The CPU kernels of `caffepy train`, compiled by processes beside Python's imports and the building of nets."""

from __future__ import annotations

import os
import sys

from caffepy import version
from caffepy.caches import cache_folder
from caffepy.parallel.processes.launcher import find_launcher
from caffepy.phases.kernel_processes import PROCESSES

MAX_PROCESSES = 8
"""That compile at the same time, even where there are more cores."""


def begin() -> None:
    """Start the processes where nothing was compiled before; else the first kernel that has to be compiled starts them.

    Not with one core, nor under MPI, whose ranks would each start as many.
    """
    processes = min(MAX_PROCESSES, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    if processes < 2 or not sys.executable or find_launcher() is not None or PROCESSES.wanted:
        return
    if _is_cold():
        PROCESSES.start(command(processes))
    else:
        PROCESSES.allow(command(processes))


def _is_cold() -> bool:
    """Whether there is a cache folder without any kernels of this version."""
    folder = cache_folder()
    return folder is not None and not any(folder.glob(f"kernels-{version.__version__}-*"))


def command(processes: int) -> list[str]:
    """The line that starts `kernel_worker.py`; it imports what this process would."""
    program = f"import sys; sys.path[:] = {sys.path!r}; from caffepy.training.kernel_worker import main; main()"
    return [sys.executable, "-I", "-c", program, str(processes)]
