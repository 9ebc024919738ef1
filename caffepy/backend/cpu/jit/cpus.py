"""The number of CPUs, for code that divides work among threads before numba is imported."""

from __future__ import annotations

import os


def cpu_count() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
