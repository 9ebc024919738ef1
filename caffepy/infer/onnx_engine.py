"""Inference by onnxruntime on the CPU: the net is exported in memory and checked once.

`RuntimeNet` computes a whole net (`caffepy.load`). `RuntimeExecutor` computes a TEST net with data layers up to its
losses and scores (`caffepy test`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.errors import ConfigError
from caffepy.export.onnx.libraries import EXTRA, Session, has_runtime, require_onnx
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.blob import Blob
from caffepy.layers.layer import PassCounter
from caffepy.net import Net
from caffepy.net.deploy import Deploy, deploy_net
from caffepy.net.executor import MAX_SHAPES, Shapes
from caffepy.net.graph import Node
from caffepy.utils.installation import MissingExtraError

log = logging.getLogger(__name__)

ENGINES = ("own", "onnxruntime")
"""CPU engines; "own" means the backend's kernels."""
LIMIT = 1e-5
"""Tolerance between both engines, relative to an output's largest absolute value."""

Arrays = dict[str, NDArray[Any]]


def wants_runtime(engine: str | None, on_cpu: bool = True, dtype: str | None = None) -> bool:
    """Return whether the user's `engine` is onnxruntime; None means "own".

    Raises:
        ConfigError: `engine` is unknown, or onnxruntime is combined with a GPU or a dtype other than float32.
        MissingExtraError: onnxruntime is requested and not installed.
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
    """An onnxruntime session of a net, with its current shapes and parameters.

    Args:
        net: a TEST net on the CPU with Input layers.
        threads: number of threads.

    Raises:
        ConfigError: a layer has no ONNX form, or keeps state between passes.
        RunError: onnxruntime rejects the model, or an output differs by more than `LIMIT` for random inputs.
    """

    def __init__(self, net: Net, threads: int) -> None:
        from caffepy.export.onnx.write import serialised, to_model

        for layer in net.layers:
            if layer.state():
                raise ConfigError(
                    f"layer '{layer.name}' ({layer.type}) keeps its state between passes, which onnxruntime "
                    "does not support; use engine 'own'"
                )
        model = to_model(net)
        self._session = Session(serialised(model), threads)
        self._names = {info.name for info in model.graph.input}
        read = {bottom for node in net.nodes for bottom in node.bottoms}
        tops = {top for node in net.nodes if node.layer.type == "Input" for top in node.tops}
        self._passed = [name for name, blob in net.outputs.items() if blob in tops - read]
        """Inputs that no layer reads, which are outputs of the net."""
        self._compare(net)

    def _compare(self, net: Net) -> None:
        from caffepy.export.check import compare_outputs, random_inputs, refuse_large, run_net
        from caffepy.export.onnx.write import run_as_onnx

        inputs = random_inputs(net)
        differences = compare_outputs(self.run(inputs), run_net(net, inputs), net, inputs, run_as_onnx, LIMIT)
        refuse_large(differences, LIMIT, "use engine 'own'")
        for one in differences:
            log.info("Net '%s' is computed by onnxruntime; %s", net.name, one)

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> Arrays:
        """Return the outputs for inputs of the net's shapes.

        Raises:
            RunError: onnxruntime fails.
        """
        feeds = {name: np.ascontiguousarray(inputs[name], np.float32) for name in self._names}
        return self._session.run(feeds) | {name: np.array(inputs[name], np.float32) for name in self._passed}


class RuntimeExecutor:
    """Runs a net forward: data layers, then a part by onnxruntime, then layers that read labels or have no ONNX form.

    Args:
        net: a trained TEST net on the CPU, neither fused nor sharing memory.
        param: its message as read.
        state: the NetState that selected its layers.

    Raises:
        ConfigError: no layer can be computed by onnxruntime.
    """

    def __init__(self, net: Net, param: caffe_pb2.NetParameter, state: caffe_pb2.NetState) -> None:
        self.net = net
        self._param = caffe_pb2.NetParameter()
        self._param.CopyFrom(param)
        self._param.state.CopyFrom(state)
        part = _Part(net)
        self._inputs, self._outputs = part.inputs, part.outputs
        self._sources = [node for node in net.nodes if not node.bottoms]
        self._rest = [node for node in net.nodes if node.bottoms and node not in part.nodes and not part.inside(node)]
        self._runtimes: dict[Shapes, RuntimeNet] = {}
        net.after_forward.append(self._after)

    def forward(self) -> None:
        """Run one pass.

        Raises:
            RunError: onnxruntime fails, or its results differ from the net's for a new shape.
        """
        self.net.forward_part([*self._sources, *self._rest])

    def _after(self, node: Node) -> None:
        if node is not self._sources[-1]:
            return
        arrays = {blob.name: blob.host_data() for blob in self._inputs}
        results = self._runtime(tuple(blob.shape for blob in self._inputs)).run(arrays)
        for blob in self._outputs:
            blob.reshape(results[blob.name].shape)
            self.net.backend.from_host(results[blob.name], blob.data)

    def _runtime(self, shapes: Shapes) -> RuntimeNet:
        if shapes not in self._runtimes:
            if len(self._runtimes) >= MAX_SHAPES:
                self._runtimes.clear()
            wanted = {blob.name: shape for blob, shape in zip(self._inputs, shapes, strict=True)}
            param = deploy_net(self._param, Deploy(wanted, [blob.name for blob in self._outputs]))
            body = Net(param, replace(self.net.context, passes=PassCounter(), run_fillers=False))
            body.share_trained_layers_with(self.net)
            self._runtimes[shapes] = RuntimeNet(body, self.net.backend.threads)
        return self._runtimes[shapes]

    def close(self) -> None:
        """Free the memory. Idempotent."""
        self._runtimes.clear()
        self.net.close()


class _Part:
    """The layers of a net that onnxruntime computes: those before unsupported layers, losses and scores."""

    def __init__(self, net: Net) -> None:
        from caffepy.export.onnx import rules
        from caffepy.layers.export_rules import ONNX, import_families

        _ = rules  # its functions register themselves
        import_families(layer.type for layer in net.layers)
        self._net = net
        self._known = ONNX.functions
        self._origin: dict[Blob, Blob] = {}
        for node in net.nodes:
            if node.layer.type == "Split":
                self._origin |= dict.fromkeys(node.tops, self._origin.get(node.bottoms[0], node.bottoms[0]))
        self._given = {top for node in net.nodes if not node.bottoms for top in node.tops}
        self.nodes = self._possible()
        while self._demote():
            continue
        if not self.nodes:
            raise ConfigError(f"net '{net.name}' has no layers that onnxruntime can compute; use engine 'own'")
        self.outputs = self._read_outside()
        read = [blob for node in self.nodes for blob in self._bottoms(node)]
        self.inputs = [blob for blob in dict.fromkeys(read) if blob in self._given]

    def _bottoms(self, node: Node) -> list[Blob]:
        return [self._origin.get(blob, blob) for blob in node.bottoms]

    def _possible(self) -> list[Node]:
        made: set[Blob] = set()
        nodes = []
        for node in self._net.nodes:
            bottoms, layer = self._bottoms(node), node.layer
            known = layer.type in self._known and not any(layer.loss_weights) and not layer.no_gradient_bottoms
            known = known and layer.dtype == "float32" and bool(bottoms) and layer.type != "Split"
            known = known and not layer.state()  # a session has no state
            if known and made.union(self._given).issuperset(bottoms) and self._given.isdisjoint(node.tops):
                nodes.append(node)
                made.update(node.tops)
        return nodes

    def _made(self) -> set[Blob]:
        return {top for node in self.nodes for top in node.tops}

    def _read_outside(self) -> list[Blob]:
        """Return the part's tops that outside layers read or that are outputs of the net."""
        others = (node for node in self._net.nodes if node not in self.nodes and node.layer.type != "Split")
        read = [blob for node in others for blob in self._bottoms(node)]
        made = self._made()
        return [blob for blob in dict.fromkeys([*read, *self._net.outputs.values()]) if blob in made]

    def _demote(self) -> bool:
        """Remove readers of the part's outputs from the part, so that no layer in it reads an output."""
        outputs = set(self._read_outside())
        kept = [n for n in self.nodes if outputs.isdisjoint(b for b in self._bottoms(n) if b not in n.tops)]
        changed = len(kept) < len(self.nodes)
        self.nodes = kept
        return changed

    def inside(self, node: Node) -> bool:
        """Return whether only layers of the part read a Split's tops."""
        origin = self._bottoms(node)[0]
        return node.layer.type == "Split" and origin in self._made() and origin not in self.outputs
