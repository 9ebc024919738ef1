"""caffepy: trains Caffe's prototxt nets on CPUs and GPUs, in one process or under MPI.

The names below are imported on first use, so that `import caffepy` itself loads nothing heavy.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_LAZY = {
    "CaffepyError": "caffepy.errors",
    "Net": "caffepy.net",
    "create_backend": "caffepy.backend",
    "create_solver": "caffepy.solvers",
    "read_net": "caffepy.config.load",
    "read_solver": "caffepy.config.load",
    "read_weights": "caffepy.config.load",
}

__all__ = [
    "CaffepyError",
    "Net",
    "__version__",
    "create_backend",
    "create_solver",
    "read_net",
    "read_solver",
    "read_weights",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'caffepy' has no attribute '{name}'")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
