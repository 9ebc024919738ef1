"""The API of `import caffe`: BVLC's pycaffe and NVIDIA's additions, implemented with caffepy's nets and solvers.

`caffepy.as_caffe` makes this package importable as `caffe`. Names are imported on first use.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from caffepy.version import CAFFE_VERSION as __version__  # noqa: F401, N811

if TYPE_CHECKING:
    from caffepy.formats import proto as proto
    from caffepy.formats.proto.caffe_pb2 import TEST as TEST
    from caffepy.formats.proto.caffe_pb2 import TRAIN as TRAIN
    from caffepy.layers.python import PythonLayerBase as Layer  # noqa: F401
    from caffepy.pycaffe import classifier as classifier
    from caffepy.pycaffe import coord_map as coord_map
    from caffepy.pycaffe import detector as detector
    from caffepy.pycaffe import draw as draw
    from caffepy.pycaffe import io as io
    from caffepy.pycaffe import model_libs as model_libs
    from caffepy.pycaffe import net_spec as net_spec
    from caffepy.pycaffe.blob import Blob as Blob
    from caffepy.pycaffe.blob import BlobVec as BlobVec
    from caffepy.pycaffe.classifier import Classifier as Classifier
    from caffepy.pycaffe.detector import Detector as Detector
    from caffepy.pycaffe.device import Timer as Timer
    from caffepy.pycaffe.device import init_log as init_log
    from caffepy.pycaffe.device import log as log
    from caffepy.pycaffe.device import set_device as set_device
    from caffepy.pycaffe.device import set_devices as set_devices
    from caffepy.pycaffe.device import set_layer_by_layer as set_layer_by_layer
    from caffepy.pycaffe.device import set_math as set_math
    from caffepy.pycaffe.device import set_mode_cpu as set_mode_cpu
    from caffepy.pycaffe.device import set_mode_gpu as set_mode_gpu
    from caffepy.pycaffe.device import set_multiprocess as set_multiprocess
    from caffepy.pycaffe.device import set_random_seed as set_random_seed
    from caffepy.pycaffe.device import set_solver_count as set_solver_count
    from caffepy.pycaffe.device import set_solver_rank as set_solver_rank
    from caffepy.pycaffe.device import solver_count as solver_count
    from caffepy.pycaffe.device import solver_rank as solver_rank
    from caffepy.pycaffe.layer import LayerBase as LayerBase
    from caffepy.pycaffe.layer import LayerParameter as LayerParameter
    from caffepy.pycaffe.layer import create_layer as create_layer
    from caffepy.pycaffe.layer import layer_type_list as layer_type_list
    from caffepy.pycaffe.net import Net as Net
    from caffepy.pycaffe.net_spec import NetSpec as NetSpec
    from caffepy.pycaffe.net_spec import layers as layers
    from caffepy.pycaffe.net_spec import params as params
    from caffepy.pycaffe.net_spec import to_proto as to_proto
    from caffepy.pycaffe.solver import NCCL as NCCL
    from caffepy.pycaffe.solver import SGDSolver as SGDSolver
    from caffepy.pycaffe.solver import Solver as Solver
    from caffepy.pycaffe.solver import get_solver as get_solver
    from caffepy.pycaffe.solver import has_nccl as has_nccl

    AdaDeltaSolver = SGDSolver
    AdaGradSolver = SGDSolver
    AdamSolver = SGDSolver
    NesterovSolver = SGDSolver
    RMSPropSolver = SGDSolver

_NAMES = {
    "blob": "Blob BlobVec",
    "classifier": "Classifier",
    "detector": "Detector",
    "device": "Timer init_log log set_device set_devices set_layer_by_layer set_math set_mode_cpu set_mode_gpu "
    "set_multiprocess set_random_seed set_solver_count set_solver_rank solver_count solver_rank",
    "layer": "LayerBase LayerParameter create_layer layer_type_list",
    "net": "Net",
    "net_spec": "NetSpec layers params to_proto",
    "solver": "AdaDeltaSolver AdaGradSolver AdamSolver NCCL NesterovSolver RMSPropSolver SGDSolver Solver get_solver "
    "has_nccl",
}
"""Names by module of this package."""

_ELSEWHERE = {
    "Layer": ("caffepy.layers.python", "PythonLayerBase"),
    "TEST": ("caffepy.formats.proto.caffe_pb2", "TEST"),
    "TRAIN": ("caffepy.formats.proto.caffe_pb2", "TRAIN"),
}
"""Names from other packages: (module, name in it)."""

_LAZY = {name: (f"{__name__}.{module}", name) for module, names in _NAMES.items() for name in names.split()}
_LAZY |= _ELSEWHERE
_MODULES = {
    name: f"{__name__}.{name}"
    for name in ("classifier", "coord_map", "detector", "draw", "io", "model_libs", "net_spec")
}
_MODULES["proto"] = "caffepy.formats.proto"

__all__ = sorted(["__version__", *_LAZY, *_MODULES])


if not TYPE_CHECKING:  # hides `__getattr__` from type checkers, which would accept any name

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            # By the name `caffe`, a fork's model_libs precedes caffepy's.
            is_caffe = sys.modules.get("caffe") is sys.modules[__name__]
            value: Any = importlib.import_module(f"caffe.{name}" if is_caffe else _MODULES[name])
            if name == "proto":
                importlib.import_module("caffepy.formats.proto.caffe_pb2")
        elif name in _LAZY:
            module, attribute = _LAZY[name]
            value = getattr(importlib.import_module(module), attribute)
        else:
            raise AttributeError(f"module 'caffe' (caffepy.pycaffe) has no attribute '{name}'")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LAZY, *_MODULES})
