"""Profiles, the times of a net's layers on one device: their JSON file, and their measurement or estimation.

A profile is measured on this machine or estimated from known times.
"""

from __future__ import annotations

import json
import reprlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

from caffepy.backend import Backend
from caffepy.backend.meta import MetaBackend
from caffepy.errors import ConfigError
from caffepy.formats.load import read_solver
from caffepy.formats.paths import PathResolver
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.layer import LayerContext
from caffepy.net import Net
from caffepy.net.graph import Node
from caffepy.net.memory_plan import with_batch
from caffepy.net.parameters import ALIGNMENT, bucket_count
from caffepy.net.record_shape import without_data
from caffepy.net.timing import measure, milliseconds_since
from caffepy.training.net_factory import NetFactory
from caffepy.training.solver import Solver, create_solver
from caffepy.training.solver_check import check_solver
from caffepy.utils.files import atomic_write, read_regular

# -- the file ------------------------------------------------------------------------------------------

MAX_BYTES = 2**26
"""Size limit of the file."""
MAX_NUMBER = 1e15
"""Largest valid number in the file."""
FORMAT = "caffepy profile 1"
"""First field of the file, with the version of the format."""


@dataclass(frozen=True)
class LayerProfile:
    """One layer of the schedule.

    Args:
        name: the layer's name.
        forward_ms: milliseconds of the forward pass.
        backward_ms: milliseconds of the backward pass.
    """

    name: str
    forward_ms: float
    backward_ms: float


@dataclass(frozen=True)
class Gradient:
    """The gradient of one learned parameter.

    Args:
        layer: index of the layer whose backward pass completes it; for a shared parameter the first such layer.
        bytes: bytes of its float32 values, including alignment padding.
    """

    layer: int
    bytes: int


@dataclass(frozen=True)
class Profile:
    """The profile of a net in training on one device.

    Args:
        net: the net's name.
        device: description of the device.
        on_cpu: whether the device is a CPU.
        batch: images per iteration on the device, over all passes.
        passes: forward and backward passes per iteration (iter_size).
        iteration_ms: milliseconds of an iteration on a single device.
        update_ms: milliseconds of the update within it.
        reduce_buckets: number of gradient buckets: the net's field or its default.
        layer_wise_reduce: the solver's field: whether gradients are reduced during the backward pass.
        layers: the layers in forward order.
        gradients: the gradients in the order of completion.
    """

    net: str
    device: str
    on_cpu: bool
    batch: int
    passes: int
    iteration_ms: float
    update_ms: float
    reduce_buckets: int
    layer_wise_reduce: bool
    layers: tuple[LayerProfile, ...]
    gradients: tuple[Gradient, ...]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(gradient.bytes for gradient in self.gradients)

    @property
    def forward_ms(self) -> float:
        """Milliseconds of one forward pass."""
        return sum(layer.forward_ms for layer in self.layers)

    @property
    def backward_ms(self) -> float:
        """Milliseconds of one backward pass."""
        return sum(layer.backward_ms for layer in self.layers)

    @property
    def other_ms(self) -> float:
        """Milliseconds of an iteration outside passes and update: data and logging."""
        return self.iteration_ms - self.update_ms - self.passes * (self.forward_ms + self.backward_ms)

    def fitted(self) -> Profile:
        """Return the profile scaled so that `other_ms` is at least 0.

        Separately timed layers, with the device idle in between, can exceed the time of the iteration; their times are
        scaled down.
        """
        if self.other_ms >= 0:
            return self
        update = min(self.update_ms, self.iteration_ms)
        passes = self.passes * (self.forward_ms + self.backward_ms)
        scale = (self.iteration_ms - update) / passes if passes else 0.0
        layers = tuple(
            replace(layer, forward_ms=layer.forward_ms * scale, backward_ms=layer.backward_ms * scale)
            for layer in self.layers
        )
        return replace(self, update_ms=update, layers=layers)


def write_profile(path: Path, profile: Profile) -> None:
    """Write the profile as JSON.

    Raises:
        RunError: the file cannot be written.
    """
    with atomic_write(path) as file:
        file.write((json.dumps({"format": FORMAT, **asdict(profile)}, indent=1) + "\n").encode())


def read_profile(path: Path) -> Profile:
    """Read a file of `write_profile`.

    Raises:
        ConfigError: the file is missing, is not a profile, or a field is missing or invalid.
    """
    try:
        content = json.loads(read_regular(path, MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot be read as a profile: {reason}; make one with --save-profile") from error
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise ConfigError(f"{path}: is not a '{FORMAT}'; make one with caffepy plan --save-profile")
    for field, kind in (("layers", LayerProfile), ("gradients", Gradient)):
        content[field] = _checked_list(kind, content.get(field), f"{path}: {field}")
    profile: Profile = _checked(Profile, content, f"{path}")
    _check_gradients(profile, f"{path}: gradients")
    return profile


_MINIMUM = {"batch": 1, "passes": 1, "bytes": 1}
"""Smallest valid values of fields; 0 for other numbers."""
_KINDS: dict[str, tuple[type, ...]] = {"float": (int, float), "int": (int,), "str": (str,), "bool": (bool,)}


def _check_gradients(profile: Profile, where: str) -> None:
    """Check that gradients refer to layers and have the order of the backward pass."""
    before = len(profile.layers) - 1
    for i, gradient in enumerate(profile.gradients):
        if gradient.layer > before:
            limit = f"at most {before}, the one before it" if i else f"below the number of layers, {before + 1}"
            raise ConfigError(f"{where}[{i}].layer: is {gradient.layer}, must be {limit}")
        before = gradient.layer


def _checked_list(kind: type, values: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(values, list):
        raise ConfigError(f"{where}: must be a list, not {_shown(values)}")
    return tuple(_checked(kind, value, f"{where}[{i}]") for i, value in enumerate(values))


def _checked(kind: type, values: Any, where: str) -> Any:
    """Return a dataclass object from a JSON object with exactly its fields."""
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: must be an object, not {_shown(values)}")
    known = {field.name: str(field.type) for field in fields(kind)}
    if odd := sorted(known.keys() ^ values.keys()):
        state = "is missing" if odd[0] in known else "is unknown"
        raise ConfigError(f"{where}: field '{odd[0]}' {state}")
    for name, type_name in known.items():
        if type_name in _KINDS:
            _check_value(values[name], type_name, _MINIMUM.get(name, 0), f"{where}.{name}")
    return kind(**values)


def _check_value(value: Any, type_name: str, least: int, where: str) -> None:
    fits = isinstance(value, _KINDS[type_name]) and isinstance(value, bool) == (type_name == "bool")
    if type_name in ("int", "float"):
        fits = fits and least <= value <= MAX_NUMBER
    if not fits:
        raise ConfigError(f"{where}: is {_shown(value)}, must be a {type_name}{_range(type_name, least)}")


def _range(type_name: str, least: int) -> str:
    return f" of at least {least} and at most {MAX_NUMBER:g}" if type_name in ("int", "float") else ""


def _shown(value: Any) -> str:
    """Return a shortened repr of a value; Python does not convert integers of more than 4,300 digits."""
    return reprlib.repr(value) if not isinstance(value, int) or abs(value) < 1 << 128 else "an integer beyond 2^128"


# -- measurement and estimation ------------------------------------------------------------------------

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
    factory = NetFactory(param, LayerContext(MetaBackend(), resolve=PathResolver(path)))
    net, context, state = factory.train_setup()
    if batch is not None:
        net = with_batch(net, batch)
    if shape is not None:
        net = without_data(net, {layer.top[0]: shape for layer in net.layer if layer.top and not layer.bottom})
    for field in (
        "net",
        "train_net",
        "train_net_param",
        "net_param",
        "test_net",
        "test_net_param",
        "test_iter",
        "test_state",
        "test_interval",
        "test_initialization",
        "display",
        "snapshot",
        "weights",
    ):
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
        net.name,
        device.description,
        device.is_cpu,
        net.batch_size() * solver.iter_size,
        solver.iter_size,
        iteration_ms,
        update_ms,
        bucket_count(solver.net_param),
        solver.layer_wise_reduce,
        tuple(layers),
        gradients_of(net),
    ).fitted()


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
