"""caffepy: trains Caffe's prototxt nets on CPUs and GPUs, in one process or under MPI.

The names below are imported on first use, so that `import caffepy` itself loads nothing heavy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from caffepy.version import __version__

if TYPE_CHECKING:
    from caffepy.backend import Backend, create_backend
    from caffepy.errors import CaffepyError, RunError, UserError
    from caffepy.formats.alias import register_alias
    from caffepy.formats.caffemodel import read_weights
    from caffepy.formats.load import read_net, read_solver
    from caffepy.formats.paths import PathResolver
    from caffepy.formats.proto.schemas import register_proto
    from caffepy.infer.model import Model, load
    from caffepy.layers import register_layer
    from caffepy.net import Net
    from caffepy.net.gradient_check import check_gradient
    from caffepy.training.callbacks.loggers import Logger
    from caffepy.training.solver import Solver, create_solver
    from caffepy.training.train import Callback, TrainResult, train

_LAZY = {
    "Backend": "caffepy.backend",
    "Callback": "caffepy.training.train",
    "CaffepyError": "caffepy.errors",
    "Logger": "caffepy.training.callbacks.loggers",
    "Model": "caffepy.infer.model",
    "Net": "caffepy.net",
    "PathResolver": "caffepy.formats.paths",
    "RunError": "caffepy.errors",
    "Solver": "caffepy.training.solver",
    "TrainResult": "caffepy.training.train",
    "UserError": "caffepy.errors",
    "check_gradient": "caffepy.net.gradient_check",
    "create_backend": "caffepy.backend",
    "create_solver": "caffepy.training.solver",
    "load": "caffepy.infer.model",
    "read_net": "caffepy.formats.load",
    "read_solver": "caffepy.formats.load",
    "read_weights": "caffepy.formats.caffemodel",
    "register_alias": "caffepy.formats.alias",
    "register_layer": "caffepy.layers",
    "register_proto": "caffepy.formats.proto.schemas",
    "train": "caffepy.training.train",
}

__all__ = [
    "Backend",
    "CaffepyError",
    "Callback",
    "Logger",
    "Model",
    "Net",
    "PathResolver",
    "RunError",
    "Solver",
    "TrainResult",
    "UserError",
    "__version__",
    "check_gradient",
    "create_backend",
    "create_solver",
    "load",
    "read_net",
    "read_solver",
    "read_weights",
    "register_alias",
    "register_layer",
    "register_proto",
    "train",
]

if not TYPE_CHECKING:  # a type checker would take any name for one of these

    def __getattr__(name: str) -> Any:
        if name not in _LAZY:
            raise AttributeError(f"module 'caffepy' has no attribute '{name}'")
        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LAZY})
