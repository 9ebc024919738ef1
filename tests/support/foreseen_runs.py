"""Which kernels of some nets are foreseen, and which their training asks for, on a GPU that computes nothing.

    python tests/support/foreseen_runs.py OUT.json

A process of its own, since it puts the fake where CuPy would be imported from.
"""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fake_cuda import ROOT, Recorder, fake_backend, install

NET = """
layer { name: "data" type: "DummyData" top: "data" top: "label" dummy_data_param {
  shape { dim: 4 dim: 3 dim: 24 dim: 24 } shape { dim: 4 } } }
layer { name: "a" type: "Convolution" bottom: "data" top: "a"
  convolution_param { num_output: 24 kernel_size: 5 stride: 2 bias_term: false } }
layer { name: "a_n" type: "BatchNorm" bottom: "a" top: "a" }
layer { name: "a_s" type: "Scale" bottom: "a" top: "a" scale_param { bias_term: true } }
layer { name: "a_r" type: "ReLU" bottom: "a" top: "a" }
layer { name: "d" type: "Convolution" bottom: "a" top: "d"
  convolution_param { num_output: 24 kernel_size: 3 pad: 1 group: 24 bias_term: false } }
layer { name: "d_n" type: "BatchNorm" bottom: "d" top: "d" }
layer { name: "d_s" type: "Scale" bottom: "d" top: "d" scale_param { bias_term: true } }
layer { name: "d_r" type: "ReLU" bottom: "d" top: "d" }
layer { name: "b" type: "Convolution" bottom: "d" top: "b" convolution_param { num_output: 24 kernel_size: 3 pad: 1 } }
layer { name: "b_r" type: "ReLU" bottom: "b" top: "b" }
layer { name: "n" type: "LRN" bottom: "b" top: "n" }
layer { name: "c" type: "Concat" bottom: "n" bottom: "a" top: "c" }
layer { name: "p" type: "Pooling" bottom: "c" top: "p" pooling_param { pool: MAX kernel_size: 3 stride: 2 } }
layer { name: "q" type: "Pooling" bottom: "p" top: "q" pooling_param { pool: AVE kernel_size: 2 stride: 1 } }
layer { name: "i" type: "InnerProduct" bottom: "q" top: "i" inner_product_param { num_output: 33 } }
layer { name: "i_r" type: "ReLU" bottom: "i" top: "i" }
layer { name: "i_d" type: "Dropout" bottom: "i" top: "i" }
layer { name: "j" type: "InnerProduct" bottom: "i" top: "j" inner_product_param { num_output: 7 } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "j" bottom: "label" top: "loss" }
"""


def train(backend: Any, recorder: Recorder, kind: str, solver: str) -> dict[str, Any]:
    """Texts that were foreseen, those of building the nets, and those of the first iteration."""
    from training import solver_param

    from caffepy.backend.cuda import compiler
    from caffepy.solvers import create_solver
    from caffepy.solvers.execution_options import ExecutionOptions

    foreseen: list[str] = []
    compiler.foresee = lambda text, target: foreseen.append(text)
    recorder.kernels.clear()
    compiler._function.cache_clear()
    compiler._module.cache_clear()
    for module in ("copy", "pooling", "batch_norm"):
        sys.modules[f"caffepy.backend.cuda.{module}"]._plan.cache_clear()
    sys.modules["caffepy.backend.cuda.elementwise.launch"]._plan_apply.cache_clear()
    sys.modules["caffepy.backend.cuda.elementwise.reduce"]._plan.cache_clear()
    types = f"default_forward_type: {kind} default_backward_type: {kind}\n"
    made = create_solver(solver_param(solver, types + NET), backend, engine=ExecutionOptions())
    built = {text for text, _ in recorder.kernels}
    made.step(1)
    made.close()
    asked = {text for text, _ in recorder.kernels}
    return {"foreseen": foreseen, "built": sorted(built), "asked": sorted(asked - built)}


@contextmanager
def foreseeing_anything() -> Any:
    """Foresee kernels for no NVRTC at all, each time anew."""
    from caffepy.backend.cuda.compilation import foreseeing_backend
    from caffepy.backend.cuda.compilation.target import Target

    foreseeing_backend.find_target = lambda: Target("none", "", ())
    foreseeing_backend.is_known = lambda *_: False
    foreseeing_backend.remember = lambda *_: None
    yield


def main() -> int:
    """Run each, write what was seen."""
    sys.path.insert(0, str(ROOT))
    recorder, runs = Recorder(), {}
    install(recorder)
    sgd = 'base_lr: 0.1 lr_policy: "fixed" momentum: 0.9 weight_decay: 0.1 clip_gradients: 1'
    adam = 'base_lr: 0.1 lr_policy: "fixed" momentum: 0.9 momentum2: 0.99 type: "Adam"'
    with fake_backend("fp32") as backend, foreseeing_anything():
        for kind, solver in (("FLOAT", sgd), ("FLOAT16", sgd), ("BFLOAT16", adam)):
            runs[kind] = train(backend, recorder, kind, solver)
    Path(sys.argv[1]).write_text(json.dumps(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
