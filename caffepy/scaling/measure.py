"""Profiles of a net, measured on this machine or estimated from known times."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from caffepy.backend import Backend
from caffepy.backend.meta import MetaBackend
from caffepy.data.sharding import Shard
from caffepy.errors import ConfigError
from caffepy.formats.load import read_solver
from caffepy.formats.paths import PathResolver
from caffepy.formats.proto import caffe_pb2
from caffepy.formats.solver_check import check_solver
from caffepy.layers.layer import LayerContext
from caffepy.net import Net
from caffepy.net.graph import Node
from caffepy.net.memory_plan import with_batch
from caffepy.net.parameters import ALIGNMENT, bucket_count
from caffepy.net.record_shape import without_data
from caffepy.net.timing import measure, milliseconds_since
from caffepy.scaling.profile import Gradient, LayerProfile, Profile
from caffepy.training.net_factory import NetFactory
from caffepy.training.solver import Solver, create_solver

WARM_UP = 3
"""Untimed iterations for allocation, compilation, tuning and capture."""
GROUPS = 5
"""Number of timed groups of iterations; the result is their median."""


@dataclass(frozen=True)
class ProfiledNet:
    """A solver's training without tests, snapshots and log.

    Args:
        solver: the solver, with its net in `net_param`.
        resolve: resolves file names in the net.
        state: phase, level and stages of the net.
    """

    solver: caffe_pb2.SolverParameter
    resolve: PathResolver
    state: caffe_pb2.NetState


@dataclass(frozen=True)
class Device:
    """The device of a profile.

    Args:
        description: text for messages.
        is_cpu: whether it is a CPU.
    """

    description: str
    is_cpu: bool


def read_subject(path: Path, batch: int | None = None, shape: Sequence[int] | None = None) -> ProfiledNet:
    """Return the training of a solver's prototxt.

    Args:
        path: the solver.
        batch: replaces the net's `batch_size`.
        shape: shape of one record; data layers then produce synthetic records.

    Raises:
        ConfigError: the solver is invalid.
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
    return ProfiledNet(param, context.resolve, state)


def measure_profile(subject: ProfiledNet, backend: Backend, iterations: int) -> Profile:
    """Train on the active backend and return the measured profile.

    Args:
        subject: the training.
        backend: the device.
        iterations: the number of iterations timed as a whole, and again layer by layer.

    Raises:
        ConfigError: the net has no data layer, so its batch size is unknown.
        CaffepyError: net, data or device cannot be used.
    """
    solver = create_solver(subject.solver, backend, resolve=subject.resolve)
    try:
        _check_batch(solver.net)
        solver.step(WARM_UP)
        iteration = _time_iterations(solver, iterations)
        # As in `caffepy time`: outside the solver's loop the layers count passes themselves.
        solver.net.context.passes.on_device = None
        times = measure(solver.net, iterations).medians()
        device = Device(backend.device_description(), backend.name == "cpu")
        return _profile(subject, solver.net, device, iteration, _time_update(solver), times)
    finally:
        solver.close()


def _time_iterations(solver: Solver, iterations: int) -> float:
    """Return the milliseconds of an iteration, run as in `caffepy train`, with CUDA graphs if possible."""
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
    """Return the milliseconds of the update of all parameters, at learning rate 0."""
    samples = []
    for _ in range(GROUPS + 1):
        solver.backend.synchronize()
        start = time.perf_counter()
        solver.update.run(1.0, 0.0, 0.0, solver.update.numbers(0, 0.0, 0.5))
        solver.backend.synchronize()
        samples.append(milliseconds_since(start))
    return median(samples[1:])


def estimate_profile(subject: ProfiledNet, forward_ms: float, backward_ms: float, on_cpu: bool) -> Profile:
    """Return a profile from known times, divided among the layers by their multiplications.

    Args:
        subject: the training.
        forward_ms: milliseconds of a whole forward pass.
        backward_ms: milliseconds of a whole backward pass.
        on_cpu: whether the times are for a CPU.

    Raises:
        ConfigError: the net has no data layer.
        CaffepyError: net or data cannot be used.
    """
    net = _dry_net(subject)
    _check_batch(net)
    work = [_multiplications(node) for node in net.nodes]
    total = sum(work) or 1
    times = [(forward_ms * part / total, backward_ms * part / total) for part in work]
    iteration = subject.solver.iter_size * (forward_ms + backward_ms)
    return _profile(subject, net, Device("times as given", on_cpu), iteration, 0.0, times)


def with_settings_of(path: Path, profile: Profile, origin: str) -> Profile:
    """Return a profile with a solver's current settings for the gradient exchange.

    Args:
        path: the solver's prototxt.
        profile: a profile of the same net.
        origin: the profile's file, for messages.

    Raises:
        ConfigError: net or iter_size of profile and solver differ.
    """
    solver = read_subject(path).solver
    if (solver.net_param.name, solver.iter_size) != (profile.net, profile.passes):
        raise ConfigError(
            f"{origin} is of net '{profile.net}' with iter_size {profile.passes}, {path} of "
            f"'{solver.net_param.name}' with {solver.iter_size}: measure again, or leave --solver out"
        )
    return replace(
        profile,
        reduce_buckets=bucket_count(solver.net_param),
        layer_wise_reduce=solver.layer_wise_reduce,
    )


def _dry_net(subject: ProfiledNet) -> Net:
    """Return the net on a backend that does not compute."""
    context = LayerContext(MetaBackend(), resolve=subject.resolve)
    return Net(subject.solver.net_param, context, subject.state)


def _multiplications(node: Node) -> float:
    """Return the multiplications of a layer with a weight matrix or filters; 0 for other layers."""
    weights = next((blob for blob in node.layer.blobs if len(blob.shape) > 1), None)
    if weights is None or not node.tops:
        return 0.0
    return weights.count * sum(top.count for top in node.tops) / weights.shape[0]


def _check_batch(net: Net) -> None:
    if not net.batch_size():
        raise ConfigError(f"net '{net.name}' has no data layer, so its batch size is unknown")


def _profile(
    subject: ProfiledNet,
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
    """Return the gradients of a net in the order of its flat buffer."""
    learned = sorted((p for p in net.parameters.parameters if p.lr_mult != 0), key=lambda p: p.start)
    node_index = {
        layer: index
        for index, node in enumerate(net.schedule)
        for layer in getattr(node.layer, "members", [node.layer])
    }
    gradients, last = [], len(net.schedule)
    for parameter in learned:
        # Buckets are reduced in order, so a gradient is ready only when all earlier gradients in the buffer are.
        last = min(last, node_index[parameter.layer])
        count = -(-parameter.blob.count // ALIGNMENT) * ALIGNMENT
        gradients.append(Gradient(last, 4 * count))
    return tuple(gradients)
