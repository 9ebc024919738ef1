"""Compares one way of running a net with another: losses, outputs, statistics and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from wide_nets import Values, WideNet

from caffepy.backend import Backend, create_backend
from caffepy.backend.cpu.backend import CpuBackend
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.layer import LayerContext
from caffepy.net import Net
from caffepy.net.memory_plan import plan_memory

Differences = dict[str, float]
"""How far one way is from another, by what and where, in proportion to the largest value."""

TOLERANCE = 2e-5
FUSED = 2e-3
"""`TOLERANCE` of two passes with gradients."""
PASSES = 2
"""Passes of a comparison; the second one's gradients are added to the first one's."""


class SpoilingBackend(CpuBackend):
    """Overwrites the leased workspace before and after each layer."""

    @contextmanager
    def workspace_lease(self, buffer: Any) -> Iterator[None]:
        self._spoil(buffer)
        yield
        self._spoil(buffer)

    @staticmethod
    def _spoil(buffer: Any) -> None:
        if buffer is not None:
            buffer.view(np.uint8)[...] = 0xFF


def build(param: caffe_pb2.NetParameter, phase: int, backend: Backend, fuse: bool, share: bool = False) -> Net:
    """A net on a backend, fused or not, with blobs that share memory or not."""
    net = Net(param, LayerContext(backend, phase=phase, seed=7), fuse=fuse)
    if share:
        plan = plan_memory(param, LayerContext(backend, phase=phase, seed=7), fuse=fuse)
        arena = plan.new_arena(backend)
        backend.fill(arena.view("float32"), float("nan"))
        plan.bind(net, arena)
    return net


Passes = Callable[[Net], None]


def pass_once(net: Net) -> None:
    """A forward pass and, in training, a backward pass."""
    net.forward()
    if net.phase == caffe_pb2.TRAIN:
        net.backward()


def run(net: Net, inputs: Values, passes: Passes = pass_once) -> Values:
    """Outputs, losses, parameters, their gradients and, with force_backward, those of the data."""
    found: Values = {}
    net.context.passes.number = 0
    net.clear_param_diffs()
    for number in range(PASSES):
        for name, values in inputs.items():
            net.backend.from_host(values, net.blobs[name].data)
        passes(net)
        found[f"loss {number}"] = np.float32(net.loss())
        found.update({f"{name} {number}": blob.host_data() for name, blob in net.outputs.items()})
    for layer in net.layers:
        for index, blob in enumerate(layer.blobs):
            found[f"{layer.name}[{index}]"] = blob.host_data()
            if net.phase == caffe_pb2.TRAIN and layer.propagate_to_params[index] and blob.gradient_started:
                found[f"d {layer.name}[{index}]"] = blob.host_diff()
    if net.param.force_backward and net.phase == caffe_pb2.TRAIN:
        found["d data"] = net.blobs["data"].host_diff()
    return found


def largest(values: Any) -> float:
    """The largest of them, whatever its sign."""
    return float(np.abs(values).max(initial=0.0))


def root_mean_square(values: Any) -> float:
    """Their usual size."""
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64)))) if values.size else 0.0


def errors(
    found: Values, wanted: Values, measure: Callable[[Any], float] = largest, smallest: float = 0.01
) -> dict[str, float]:
    """By name the distance in proportion to the wanted values; what only one has is infinitely far away.

    Gradients that are sums of others which cancel out, as a bias's before a BatchNorm, consist of roundings: none is
    measured by less than the part `smallest` of the net's largest one.
    """
    sizes = {name: measure(values) for name, values in wanted.items()}
    least = smallest * max((size for name, size in sizes.items() if name.startswith("d ")), default=0.0)
    result = dict.fromkeys(found.keys() ^ wanted.keys(), np.inf)
    for name in found.keys() & wanted.keys():
        size = max(sizes[name], least if name.startswith("d ") else 0.0, 1e-3)
        distance = _distance(found[name], wanted[name], measure)
        result[name] = distance / size if 0 < distance < np.inf else distance
    return result


def _distance(found: Any, wanted: Any, measure: Callable[[Any], float]) -> float:
    if not (np.isfinite(found).all() and np.isfinite(wanted).all()):
        return 0.0 if np.array_equal(found, wanted, equal_nan=True) else np.inf
    return measure(np.asarray(found - wanted))


def groups(net: Net) -> list[str]:
    """The types of layers that are computed as one."""
    return [node.layer.type for node in net.schedule if " + " in node.layer.type]


def fusible_param(wide: WideNet, kind: str = "FLOAT") -> tuple[caffe_pb2.NetParameter, int]:
    """The net as it is fused, and its phase: one of ten is tested, one of five gives its data a gradient."""
    param = wide.param(kind)
    param.force_backward = wide.seed % 5 == 0
    return param, caffe_pb2.TEST if wide.seed % 10 == 9 else caffe_pb2.TRAIN


def compare_fused(wide: WideNet, attempt: int = 0) -> Differences:
    """A fused net, whose blobs share memory with half of the seeds, and a plain one."""
    param, phase = fusible_param(wide)
    share = wide.seed // 10 % 2 == 1
    plain, fused = create_backend(None, 1), SpoilingBackend(1) if share else create_backend(None, 1)
    inputs = wide.values(attempt)
    wanted = run(build(param, phase, plain, False), inputs)
    got = run(build(param, phase, fused, True, share), inputs)
    if share and "d data" in got:
        got["d data"] = wanted["d data"]  # others may use its memory when the pass is over
    return {name: error for name, error in errors(got, wanted).items() if not error <= FUSED}


def give_parameters(net: Net, seed: int = 1) -> None:
    """Values such as training leaves: statistics that are not 0, variances that are not small."""
    generator = np.random.default_rng(seed)
    for layer in net.layers:
        for index, blob in enumerate(layer.blobs):
            values = blob.host_data()
            if layer.type == "BatchNorm" and index < 3:
                values = (
                    generator.normal(0, 0.3, blob.shape)
                    if index == 0
                    else generator.uniform(0.5, 2, blob.shape)
                    if index == 1
                    else np.ones(blob.shape)
                )
            elif blob.gradient_owner is blob:
                values = values + generator.normal(0, 0.05, blob.shape)
            net.backend.from_host(values.astype(np.float32), blob.data)


def distance(found: Any, wanted: Any) -> float:
    """The largest difference in proportion to the largest value; infinite where shapes or NaNs differ."""
    if np.shape(found) != np.shape(wanted) or not np.array_equal(np.isfinite(found), np.isfinite(wanted)):
        return np.inf
    with np.errstate(invalid="ignore"):
        apart = np.abs(np.asarray(found, np.float64) - wanted)[np.isfinite(wanted)]
    return float(apart.max(initial=0) / max(np.abs(wanted[np.isfinite(wanted)]).max(initial=0), 1e-2))


def differences(found: Values, wanted: Values, where: str, limit: float | None = None) -> Differences:
    """Those beyond the limit, `TOLERANCE` by default; 0 wants the same bits."""
    limit = TOLERANCE if limit is None else limit
    apart = dict.fromkeys((f"{where}: {name}" for name in found.keys() ^ wanted.keys()), np.inf)
    for name in found.keys() & wanted.keys():
        same = np.array_equal(found[name], wanted[name], equal_nan=True)
        error = 0.0 if same else distance(np.asarray(found[name]), np.asarray(wanted[name]))
        if error > limit or (limit == 0 and not same):
            apart[f"{where}: {name}"] = error
    return apart
