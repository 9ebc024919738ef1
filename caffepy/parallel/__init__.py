"""The parallel engine: training with several threads, GPUs and MPI ranks. Imported by `distributed` and `cli`.

The root holds the engine itself; each folder owns one of its parts. The four names below are those of NVIDIA Caffe and
are imported on first use: NcclCommunicator needs CuPy.
"""

from __future__ import annotations

import importlib
from typing import Any

_LAZY = {
    "NcclCommunicator": "caffepy.parallel.communicators.nccl",
    "P2PManager": "caffepy.parallel.p2p_manager",
    "P2PSync": "caffepy.parallel.p2p_sync",
    "SharedScores": "caffepy.parallel.communicators.local",
}

__all__ = ["NcclCommunicator", "P2PManager", "P2PSync", "SharedScores"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'caffepy.parallel' has no attribute '{name}'")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
