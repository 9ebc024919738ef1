"""Profiles of a net: measured over a few iterations on this machine, or made from known times."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from caffepy.backend import Backend
from caffepy.backend.meta import MetaBackend
from caffepy.config.load import read_solver
from caffepy.config.paths import PathResolver
from caffepy.config.solver_check import check_solver
from caffepy.data.schedule import Shard
from caffepy.errors import ConfigError
from caffepy.layers.core.base import LayerContext
from caffepy.net import Net
from caffepy.net.memory_plan import with_batch
from caffepy.net.parameters import ALIGNMENT, bucket_count
from caffepy.net.record_shape import without_data
from caffepy.net.timing import measure, milliseconds_since
from caffepy.net.wiring import Node
from caffepy.plan.profile import Gradient, LayerProfile, Profile
from caffepy.proto import caffe_pb2
from caffepy.solvers import Solver, create_solver
from caffepy.solvers.net_factory import NetFactory

WARM_UP = 3
"""Iterations before the clock starts: they allocate, compile, tune and capture."""
GROUPS = 5
"""Groups of iterations that are timed; their median counts."""


@dataclass(frozen=True)
class Subject:
    """A solver's training, and nothing but that: no tests, no snapshots, no lines in the log.

    Args:
        solver: holds its net as `net_param`.
        resolve: finds the files that the net names.
        state: phase, level and stages of the net.
    """

    solver: caffe_pb2.SolverParameter
    resolve: PathResolver
    state: caffe_pb2.NetState


@dataclass(frozen=True)
class Device:
    """What times are of.

    Args:
        description: in words.
        is_cpu: whether it is a CPU.
    """

    description: str
    is_cpu: bool


def read_subject(path: Path, batch: int | None = None, shape: Sequence[int] | None = None) -> Subject:
    """The training of a solver's prototxt.

    Args:
        path: the solver.
        batch: `batch_size` instead of what the net says.
        shape: of one record; data layers then give made-up records and need no data.

    Raises:
        ConfigError: the solver does not hold together.
    """
    param = read_solver(path)
    check_solver(param, str(path))
    factory = NetFactory(param, MetaBackend(), Shard(), PathResolver(path))
    net, context, state = factory.train_setup()
    if batch is not None:
        net = with_batch(net, batch)
    if shape is not None:
        net = without_data(net, {layer.top[0]: shape for layer in net.layer if layer.top and not layer.bottom})
    for field in ("net", "train_net", "train_net_param", "net_param", "test_net", "test_net_param", "test_iter",
                  "test_state", "test_interval", "test_initialization", "display", "snapshot", "weights"):  # fmt: skip
        param.ClearField(field)
    param.net_param.CopyFrom(net)
    param.test_initialization = param.snapshot_after_train = param.debug_info = False
    param.random_seed = max(param.random_seed, 0)
    assert isinstance(context.resolve, PathResolver)
    return Subject(param, context.resolve, state)


def measure_profile(subject: Subject, backend: Backend, iterations: int) -> Profile:
    """Train on a backend that is active here, and take the times.

    Args:
        subject: what to train.
        backend: the device.
        iterations: how many whole ones are timed, and then again as many layer by layer.

    Raises:
        ConfigError: the net has no batch, so that there are no images to count.
        CaffepyError: whatever is wrong with the net, its data or the device.
    """
    solver = create_solver(subject.solver, backend, resolve=subject.resolve)
    try:
        _check_batch(solver.net)
        solver.step(WARM_UP)
        iteration = _time_iterations(solver, iterations)
        # As `caffepy time` does: outside of the solver's loop the layers count passes by themselves.
        solver.net.context.passes.on_device = None
        times = measure(solver.net, iterations).medians()
        device = Device(backend.device_description(), backend.name == "cpu")
        return _profile(subject, solver.net, device, iteration, _time_update(solver), times)
    finally:
        solver.close()


def _time_iterations(solver: Solver, iterations: int) -> float:
    """Milliseconds of an iteration, run as `caffepy train` does: with captured CUDA graphs where possible."""
    size = -(-iterations // GROUPS)
    samples = []
    for _ in range(GROUPS):
        solver.backend.synchronize()
        start = time.perf_counter()
        solver.step(size)
        solver.backend.synchronize()
        samples.append(milliseconds_since(start) / size)
    return median(samples)


def _time_update(solver: Solver) -> float:
    """Milliseconds of the update of all parameters, at rate 0."""
    samples = []
    for _ in range(GROUPS + 1):
        solver.backend.synchronize()
        start = time.perf_counter()
        solver.update.run(1.0, 0.0, 0.0, solver.update.numbers(0, 0.0, 0.5))
        solver.backend.synchronize()
        samples.append(milliseconds_since(start))
    return median(samples[1:])


def estimate_profile(subject: Subject, forward_ms: float, backward_ms: float, on_cpu: bool) -> Profile:
    """A profile of times that are known from elsewhere, divided among the layers by their multiplications.

    Args:
        subject: what is trained.
        forward_ms: a whole forward pass.
        backward_ms: a whole backward pass.
        on_cpu: whether they are a CPU's.

    Raises:
        ConfigError: the net has no batch.
        CaffepyError: whatever is wrong with the net or its data.
    """
    net = _dry_net(subject)
    _check_batch(net)
    work = [_multiplications(node) for node in net.nodes]
    total = sum(work) or 1
    times = [(forward_ms * part / total, backward_ms * part / total) for part in work]
    iteration = subject.solver.iter_size * (forward_ms + backward_ms)
    return _profile(subject, net, Device("times as given", on_cpu), iteration, 0.0, times)


def with_settings_of(path: Path, profile: Profile, origin: str) -> Profile:
    """A profile with what a solver says today about the exchange of gradients.

    Args:
        path: the solver's prototxt.
        profile: of the same net.
        origin: the profile's file, for messages.

    Raises:
        ConfigError: the profile is another net's, or of iterations of more or fewer passes.
    """
    solver = read_subject(path).solver
    if (solver.net_param.name, solver.iter_size) != (profile.net, profile.passes):
        raise ConfigError(
            f"{origin} is of net '{profile.net}' with iter_size {profile.passes}, {path} of "
            f"'{solver.net_param.name}' with {solver.iter_size}: measure anew, or leave --solver out"
        )
    return replace(
        profile,
        reduce_buckets=bucket_count(solver.net_param),
        layer_wise_reduce=solver.layer_wise_reduce,
    )


def _dry_net(subject: Subject) -> Net:
    """The net on a backend that computes nothing."""
    context = LayerContext(MetaBackend(), resolve=subject.resolve)
    return Net(subject.solver.net_param, context, subject.state)


def _multiplications(node: Node) -> float:
    """Of a layer with a matrix or filters, for each element of its top; the other layers' work is left out."""
    weights = next((blob for blob in node.layer.blobs if len(blob.shape) > 1), None)
    if weights is None or not node.tops:
        return 0.0
    return weights.count * sum(top.count for top in node.tops) / weights.shape[0]


def _check_batch(net: Net) -> None:
    if not net.batch_size():
        raise ConfigError(f"net '{net.name}' has no data layer, so its batch size is unknown")


def _profile(
    subject: Subject,
    net: Net,
    device: Device,
    iteration_ms: float,
    update_ms: float,
    times: Sequence[tuple[float, float]],
) -> Profile:
    solver = subject.solver
    layers = [LayerProfile(node.layer.name, *pair) for node, pair in zip(net.schedule, times, strict=True)]
    return Profile(
        net.name, device.description, device.is_cpu, net.batch_size() * solver.iter_size, solver.iter_size,
        iteration_ms, update_ms, bucket_count(solver.net_param), solver.layer_wise_reduce,
        tuple(layers), gradients_of(net),
    ).fitted()  # fmt: skip


def gradients_of(net: Net) -> tuple[Gradient, ...]:
    """The gradients of a net in the order of its flat buffer."""
    learned = sorted((p for p in net.parameters.parameters if p.lr_mult != 0), key=lambda p: p.start)
    node_index = {
        layer: index
        for index, node in enumerate(net.schedule)
        for layer in getattr(node.layer, "members", [node.layer])
    }
    gradients, last = [], len(net.schedule)
    for parameter in learned:
        # Buckets are reduced in order, so a gradient counts as ready only when all before it in the buffer are.
        last = min(last, node_index[parameter.layer])
        count = -(-parameter.blob.count // ALIGNMENT) * ALIGNMENT
        gradients.append(Gradient(last, 4 * count))
    return tuple(gradients)
