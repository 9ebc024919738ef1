"""Compares one way of running a net with another: losses, outputs, statistics and gradients.

As a program it compares random nets on the CPU, fused ones whose blobs share memory with plain ones;
from the repository's root:

    python tests/support/compare_nets.py --count 2000
    python tests/support/compare_nets.py --first 1234 --count 1 --show
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from fusible_nets import CLASSES, FusibleNet

from caffepy.backend import Backend, create_backend
from caffepy.backend.cpu.backend import CpuBackend
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.layer import LayerContext
from caffepy.net import Net
from caffepy.net.memory_plan import plan_memory

Values = dict[str, Any]
"""What a run gave, NumPy arrays by name."""

PASSES = 2
"""Passes of a comparison; the second one's gradients are added to the first one's."""

TRIES = 3
"""Inputs with which two runs have to differ: a rounding beside the kink of a ReLU makes a difference with one only."""


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


def make_inputs(random_net: FusibleNet, seed: int) -> Values:
    """Numbers for the net's inputs."""
    generator = np.random.default_rng(seed)
    values: Values = {
        name: generator.standard_normal(shape).astype(np.float32) for name, shape in random_net.inputs.items()
    }
    values["label"] = generator.integers(0, CLASSES, random_net.inputs["label"]).astype(np.float32)
    return values


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
    for name, values in inputs.items():
        net.backend.from_host(values, net.blobs[name].data)
    net.clear_param_diffs()
    for number in range(PASSES):
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


# -- on the CPU --------------------------------------------------------------------------------------------

TOLERANCE = 2e-3


def compare_on_cpu(seed: int, shares: Sequence[bool] = (False, True)) -> tuple[dict[str, float], list[str]]:
    """How far a fused net is from a plain one.

    Args:
        seed: stands for the net.
        shares: whether the fused net's blobs share memory.

    Returns:
        The errors above `TOLERANCE` that every one of several inputs shows; and the groups that were fused.
    """
    random_net = FusibleNet(seed)
    param, phase = random_net.param(), random_net.phase
    plain, spoiling = create_backend(None, 1), SpoilingBackend(1)
    worst: dict[str, float] = {}
    fused: list[str] = []
    for attempt in range(TRIES):
        inputs = make_inputs(random_net, 1000 * seed + attempt)
        wanted = run(build(param, phase, plain, False), inputs)
        far: dict[str, float] = {}
        for share in shares:
            net = build(param, phase, spoiling if share else plain, True, share)
            fused, got = groups(net), run(net, inputs)
            if share and "d data" in got:
                got["d data"] = wanted["d data"]  # others may use its memory when the pass is over
            label = " (shared)" if share else ""
            far.update({name + label: e for name, e in errors(got, wanted).items() if not e <= TOLERANCE})
        worst = {name: min(e, worst.get(name, e)) for name, e in far.items() if attempt == 0 or name in worst}
        if not worst:
            break
    return worst, fused


def main() -> int:
    """Compare many nets; returns how many differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="how many nets (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first net's seed (default: %(default)s)")
    parser.add_argument("--show", action="store_true", help="print the nets that differ, or the only one")
    options = parser.parse_args()
    differing, fused, begin = [], Counter[str](), time.monotonic()
    for seed in range(options.first, options.first + options.count):
        worst, found = compare_on_cpu(seed)
        fused.update(found)
        if worst:
            differing.append(seed)
            print(f"net {seed} differs: {', '.join(f'{name} by {e:.3g}' for name, e in sorted(worst.items()))}")
        if options.show and (worst or options.count == 1):
            print(FusibleNet(seed).text)
    for types, count in fused.most_common():
        print(f"{count:6} {types}")
    seconds = time.monotonic() - begin
    print(f"{options.count} nets, {sum(fused.values())} groups, {len(differing)} nets differ, {seconds:.0f} s")
    return min(len(differing), 1)


if __name__ == "__main__":
    sys.exit(main())
