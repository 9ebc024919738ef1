"""The names of `import caffe`: BVLC's pycaffe and what NVIDIA added, on top of caffepy's nets and solvers.

`caffepy.as_caffe` makes this package importable as `caffe`. Names are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

from caffepy.version import __version__ as __version__

_NAMES = {
    "blob": "Blob BlobVec",
    "classifier": "Classifier",
    "detector": "Detector",
    "layer": "LayerBase LayerParameter create_layer layer_type_list",
    "mode": "init_log log set_device set_devices set_mode_cpu set_mode_gpu set_multiprocess set_random_seed "
    "set_solver_count set_solver_rank solver_count solver_rank",
    "nccl": "NCCL has_nccl",
    "net": "Net",
    "net_spec": "NetSpec layers params to_proto",
    "solver": "AdaDeltaSolver AdaGradSolver AdamSolver NesterovSolver RMSPropSolver SGDSolver Solver get_solver",
    "timer": "Timer",
}
"""By module of this package."""

_ELSEWHERE = {
    "Layer": ("caffepy.layers.python.python_layer", "PythonLayerBase"),
    "TEST": ("caffepy.proto.caffe_pb2", "TEST"),
    "TRAIN": ("caffepy.proto.caffe_pb2", "TRAIN"),
}
"""Names of other packages: (module, name there)."""

_LAZY = {name: (f"{__name__}.{module}", name) for module, names in _NAMES.items() for name in names.split()}
_LAZY |= _ELSEWHERE
_MODULES = {name: f"{__name__}.{name}" for name in ("classifier", "coord_map", "detector", "draw", "io", "net_spec")}
_MODULES["proto"] = "caffepy.proto"

__all__ = sorted(["__version__", *_LAZY, *_MODULES])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value: Any = importlib.import_module(_MODULES[name])
        if name == "proto":
            importlib.import_module("caffepy.proto.caffe_pb2")
    elif name in _LAZY:
        module, attribute = _LAZY[name]
        value = getattr(importlib.import_module(module), attribute)
    else:
        raise AttributeError(f"module 'caffe' (caffepy.pycaffe) has no attribute '{name}'")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_MODULES})
