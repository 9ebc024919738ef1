"""The names of `import caffe`: BVLC's pycaffe and what NVIDIA added, on top of caffepy's nets and solvers.

`caffepy.as_caffe` makes this package importable as `caffe`. Names are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from caffepy.version import __version__

if TYPE_CHECKING:
    from caffepy import proto
    from caffepy.layers.python.python_layer import PythonLayerBase as Layer
    from caffepy.proto.caffe_pb2 import TEST, TRAIN
    from caffepy.pycaffe import classifier, coord_map, detector, draw, io, net_spec
    from caffepy.pycaffe.blob import Blob, BlobVec
    from caffepy.pycaffe.classifier import Classifier
    from caffepy.pycaffe.detector import Detector
    from caffepy.pycaffe.layer import LayerBase, LayerParameter, create_layer, layer_type_list
    from caffepy.pycaffe.mode import (
        init_log,
        log,
        set_device,
        set_devices,
        set_mode_cpu,
        set_mode_gpu,
        set_multiprocess,
        set_random_seed,
        set_solver_count,
        set_solver_rank,
        solver_count,
        solver_rank,
    )
    from caffepy.pycaffe.nccl import NCCL, has_nccl
    from caffepy.pycaffe.net import Net
    from caffepy.pycaffe.net_spec import NetSpec, layers, params, to_proto
    from caffepy.pycaffe.solver import (
        AdaDeltaSolver,
        AdaGradSolver,
        AdamSolver,
        NesterovSolver,
        RMSPropSolver,
        SGDSolver,
        Solver,
        get_solver,
    )
    from caffepy.pycaffe.timer import Timer

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

__all__ = [
    "NCCL",
    "TEST",
    "TRAIN",
    "AdaDeltaSolver",
    "AdaGradSolver",
    "AdamSolver",
    "Blob",
    "BlobVec",
    "Classifier",
    "Detector",
    "Layer",
    "LayerBase",
    "LayerParameter",
    "NesterovSolver",
    "Net",
    "NetSpec",
    "RMSPropSolver",
    "SGDSolver",
    "Solver",
    "Timer",
    "__version__",
    "classifier",
    "coord_map",
    "create_layer",
    "detector",
    "draw",
    "get_solver",
    "has_nccl",
    "init_log",
    "io",
    "layer_type_list",
    "layers",
    "log",
    "net_spec",
    "params",
    "proto",
    "set_device",
    "set_devices",
    "set_mode_cpu",
    "set_mode_gpu",
    "set_multiprocess",
    "set_random_seed",
    "set_solver_count",
    "set_solver_rank",
    "solver_count",
    "solver_rank",
    "to_proto",
]

if not TYPE_CHECKING:  # a type checker would take any name for one of these

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            value = importlib.import_module(_MODULES[name])
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
