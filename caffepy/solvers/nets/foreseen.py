"""Which kernels a net and its update will call: an iteration is run on a backend that notes calls and computes nothing.

For a GPU this process runs it, for a CPU another process that is told of the net by a line of JSON
(`caffepy/training/kernel_worker.py`).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from caffepy.backend import Backend, Expression, foreseeing, foreseeing_on_cpu
from caffepy.config.dialect import Dialect
from caffepy.config.paths import PathResolver
from caffepy.data.schedule import Shard
from caffepy.layers.core.base import LayerContext, PassCounter
from caffepy.net import Net
from caffepy.phases import phase
from caffepy.phases.kernel_processes import PROCESSES
from caffepy.proto import caffe_pb2
from caffepy.solvers.rules.update import Update

_CONTEXT = ("phase", "seed", "test_iter", "iter_size", "sample_shapes")
"""What another process is told of a `LayerContext` as it is."""


@dataclass(frozen=True)
class ForeseenUpdate:
    """What follows on a backward pass.

    Args:
        rule, histories, clip, guard: as `Update` takes them; the number of histories.
        several: whether several devices train together.
    """

    rule: Expression
    histories: int
    clip: float
    guard: bool
    several: bool

    def run(self, net: Net) -> None:
        """Update a net's parameters once."""
        history = [net.parameters.new_history() for _ in range(self.histories)]
        guard = self.guard or "float16" in net.parameters.copies
        void = (lambda: net.parameters.void) if self.several else None
        update = Update(net, self.rule, history, self.clip, guard, 0, void=void)
        # The rule's arguments: data, diff and histories, two multipliers, these three, found_inf, its own.
        own = len(self.rule.parameters) - self.histories - 8
        values = net.backend.device_scalars(3 + own, 0).values
        update.run(values[0], values[1], values[2], values[3:])


@dataclass(frozen=True)
class ForeseenNet:
    """A net that is about to be run.

    Args:
        param: the net as read.
        context: the net's, with the shapes of its samples.
        state: as `Net` takes it.
        fuse: as `Net` takes it.
        update: what follows on the backward pass; None: there is no such pass.
    """

    param: caffe_pb2.NetParameter
    context: LayerContext
    state: caffe_pb2.NetState | None
    fuse: bool
    update: ForeseenUpdate | None

    def compile_kernels(self) -> None:
        """Let other processes compile the kernels that no cache has; returns before they are done."""
        context = self.context
        shard = replace(context.shard, rank=0)
        settings = (
            self.state, context.sample_shapes, shard, context.dialect, context.test_iter, self.fuse, self.update
        )  # fmt: skip
        text = f"{self.param.SerializeToString(deterministic=True).hex()} {settings}"
        with phase("kernels foreseen"), foreseeing(context.backend, text) as backend:
            if backend is not None:
                self.run(backend)
        own_code = any(layer.type == "Python" for layer in self.param.layer)
        if context.backend.name == "cpu" and PROCESSES.wanted and not own_code:
            with phase("kernels foreseen"):
                PROCESSES.foresee(self.described())

    def run(self, backend: Backend) -> None:
        """An iteration on a backend that computes nothing."""
        context = replace(
            self.context, backend=backend, passes=PassCounter(), first_sample=None, describe_sample=None
        )  # fmt: skip
        net = Net(self.param, context, self.state, self.fuse)
        try:
            net.debug_info = False
            net.prepare()
            net.forward()
            if self.update is not None:
                net.clear_param_diffs()
                net.backward()
                self.update.run(net)
        finally:
            net.close()

    def described(self) -> str:
        """A line for `run_described`."""
        context, state = self.context, self.state
        folder = getattr(context.resolve, "folder", None)
        description: dict[str, Any] = {
            "param": self.param.SerializeToString().hex(),
            "state": None if state is None else state.SerializeToString().hex(),
            "fuse": self.fuse,
            "threads": getattr(context.backend, "threads", None),
            "folder": None if folder is None else str(folder),
            "dialect": context.dialect and context.dialect.value,
            "shard": asdict(context.shard),
            "context": {name: getattr(context, name) for name in _CONTEXT},
        }
        if self.update is not None:
            rule = self.update.rule.function
            description["update"] = {**vars(self.update), "rule": (rule.__module__, rule.__name__)}
        return json.dumps(description, default=int)  # NumPy's integers


def run_described(line: str) -> None:
    """Run an iteration of the net that another process described, on a CPU backend that computes nothing."""
    read = json.loads(line)
    backend = foreseeing_on_cpu(read["threads"])
    context = LayerContext(
        backend,
        shard=Shard(**read["shard"]),
        resolve=PathResolver(None if read["folder"] is None else Path(read["folder"], "net.prototxt")),
        dialect=read["dialect"] and Dialect(read["dialect"]),
        **read["context"],
    )
    param = caffe_pb2.NetParameter.FromString(bytes.fromhex(read["param"]))
    state = None if read["state"] is None else caffe_pb2.NetState.FromString(bytes.fromhex(read["state"]))
    ForeseenNet(param, context, state, read["fuse"], _update_from(read.get("update"))).run(backend)


def _update_from(read: dict[str, Any] | None) -> ForeseenUpdate | None:
    if read is None:
        return None
    module, name = read["rule"]
    return ForeseenUpdate(**{**read, "rule": getattr(import_module(module), name)})
