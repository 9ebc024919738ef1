"""A net computed by onnxruntime on the CPU: exported in memory and compared with the net once. inference uses it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.errors import ConfigError, MissingExtraError
from caffepy.net import Net
from caffepy.onnx.libraries import EXTRA, Session, has_runtime, require_onnx

log = logging.getLogger(__name__)

ENGINES = ("own", "onnxruntime")
"""What can compute a net on the CPU; "own" are the backend's kernels."""
LIMIT = 1e-5
"""Largest difference between both, relative to an output's largest value."""

Arrays = dict[str, NDArray[Any]]


def wants_runtime(engine: str | None, on_cpu: bool = True, dtype: str | None = None) -> bool:
    """Whether `engine`, as a user gives it, is onnxruntime; None is "own".

    Raises:
        ConfigError: it is none of `ENGINES`; onnxruntime together with a GPU or another dtype than float32.
        MissingExtraError: onnxruntime is wanted and not installed.
    """
    if engine is None or engine == "own":
        return False
    if engine != "onnxruntime":
        raise ConfigError(f"engine is '{engine}'; it can be {' or '.join(ENGINES)}")
    if not on_cpu or dtype not in (None, "float32"):
        found = "a GPU" if not on_cpu else f"dtype {dtype}"
        raise ConfigError(f"engine onnxruntime with {found}: it computes in float32 on the CPU; leave one of them out")
    require_onnx("to compute nets by onnxruntime")
    if not has_runtime():
        raise MissingExtraError("onnxruntime", EXTRA, "to compute nets by it")
    return True


class RuntimeNet:
    """What onnxruntime made of a net: its shapes, and its parameters as they are now.

    Args:
        net: of the TEST phase, on the CPU, with Input layers.
        threads: how many to use.

    Raises:
        ConfigError: a layer has no ONNX form, or leaves its state to the next pass.
        RunError: onnxruntime refuses the model, or an output differs by more than `LIMIT` for random inputs.
    """

    def __init__(self, net: Net, threads: int) -> None:
        from caffepy.onnx.export.write import serialised, to_model

        for layer in net.layers:
            if layer.state():
                raise ConfigError(
                    f"layer '{layer.name}' ({layer.type}) goes on with the state of the pass before, which onnxruntime "
                    "does not keep; use engine 'own'"
                )
        model = to_model(net)
        self._session = Session(serialised(model), threads)
        self._names = {info.name for info in model.graph.input}
        self._compare(net)

    def _compare(self, net: Net) -> None:
        from caffepy.onnx.check import compare, random_inputs, refuse_large, run_net

        inputs = random_inputs(net)
        differences = compare(self.run(inputs), run_net(net, inputs))
        refuse_large(differences, LIMIT, "use engine 'own'")
        for one in differences:
            log.info("Net '%s' is computed by onnxruntime; %s", net.name, one)

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> Arrays:
        """The outputs for inputs of the net's shapes.

        Raises:
            RunError: onnxruntime fails.
        """
        feeds = {name: np.ascontiguousarray(inputs[name], np.float32) for name in self._names}
        return self._session.run(feeds)
