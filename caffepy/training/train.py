"""`caffepy.train`: training from a program, with callbacks and a result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from google.protobuf.message import EncodeError

from caffepy.backend import create_backend
from caffepy.errors import ConfigError
from caffepy.formats.caffemodel import write_caffemodel
from caffepy.formats.load import read_net, read_solver
from caffepy.formats.proto.caffe_pb2 import NetParameter, SolverParameter
from caffepy.formats.upgrade import upgrade_net, upgrade_solver
from caffepy.net import Net
from caffepy.net.describe import table
from caffepy.training.devices import check_gpus
from caffepy.training.options import TrainOptions
from caffepy.training.p2p_manager import P2PManager
from caffepy.training.prepare import configure, train_options
from caffepy.training.snapshot import SavedSolver
from caffepy.training.solver import Solver, create_solver
from caffepy.utils.options import check_names, options_of
from caffepy.utils.progress import interactive, progress_bar
from caffepy.utils.registry import suggest

AnyCallback: TypeAlias = "Callback | IterationCallback | Any"
StrPath: TypeAlias = "str | PathLike[str]"
SolverSource: TypeAlias = "StrPath | SolverParameter | Mapping[str, Any]"
NetSource: TypeAlias = "StrPath | NetParameter | Any"
"""A file, a message, or an object with `to_proto`, such as pycaffe's NetSpec."""

_NETS = ("net", "net_param", "train_net", "train_net_param")


def train(
    solver: SolverSource,
    *,
    net: NetSource | None = None,
    weights: StrPath | Sequence[StrPath] = (),
    snapshot: StrPath | None = None,
    devices: Sequence[int] | str | None = None,
    callbacks: AnyCallback | Sequence[AnyCallback] = (),
    **options: Any,
) -> TrainResult:
    """Train a net to its solver's max_iter, or until a callback or a signal stops it, as `caffepy train` does.

        trained = caffepy.train("models/lenet/solver.prototxt", max_iter=500)
        trained.losses, trained.scores, trained.net

    Args:
        solver: a prototxt's path, a SolverParameter, or a mapping of a solver's fields. solver_mode and device_id are
            ignored.
        net: replaces the solver's net: a prototxt's path, a NetParameter or a NetSpec.
        weights: .caffemodel files to start from; later files override earlier ones.
        snapshot: a .solverstate to resume from, or "auto" for the newest valid one.
        devices: indices of GPUs, or "all"; None: the CPU.
        callbacks: one or several callbacks, see `caffepy.Callback`.
        options: `progress`, whether to show a progress bar (by default in interactive sessions); the other options of
            the command, such as `max_iter`, `set` or `cpu_solvers`, see docs/reference/options.md.

    Raises:
        UserError: files, solver, net or options are invalid.
        RunError: training failed.
    """
    progress = options.pop("progress", None)
    record, made = Record(), []

    def make_options() -> TrainOptions:
        files = [weights] if isinstance(weights, (str, PathLike)) else list(weights)
        starts = {"weights": [Path(file) for file in files], "snapshot": snapshot, "devices": _devices(devices)}
        listed = [record, *(callbacks if isinstance(callbacks, (list, tuple)) else [callbacks])]
        made.append(_options(solver_of(solver, net), {**options, **starts}, listed))
        return made[0]

    manager = P2PManager(make_options)
    shown = interactive() if progress is None else progress
    with progress_bar(lambda: manager.iteration, lambda: made[0].solver.max_iter, wanted=shown):
        manager.run()
    saved = manager.trained
    stopped = saved.message.iter < made[0].solver.max_iter
    return TrainResult(_maker(made[0], saved), record, saved.message.iter, stopped)


def _options(
    source: tuple[SolverParameter, Path | None], options: dict[str, Any], callbacks: list[Any]
) -> TrainOptions:
    param, path = source
    if options["snapshot"] is not None and options["weights"]:
        raise ConfigError("snapshot and weights exclude each other: a snapshot brings its own weights; leave one out")
    check_names(options, [*(one.name for one in options_of(TrainOptions)), "progress"], "train")
    configure(param, path, options)
    return train_options(param, path, options, callbacks=callbacks, keeps_trained=True)


def _maker(options: TrainOptions, saved: SavedSolver) -> Callable[[], Solver]:
    """Return a function that restores the trained solver on the first device."""

    def make() -> Solver:
        device, engine, param = options.local_devices[0], options.engine, SolverParameter()
        param.CopyFrom(options.solver)
        del param.weights[:]
        backend = create_backend(device, options.threads, options.math, engine.autotune, engine.deterministic)
        try:
            with backend.activate():
                solver = create_solver(param, backend, resolve=options.resolve, engine=engine)
                solver.snapshots.restore_from_memory(saved)
                return solver
        except BaseException:
            backend.close()
            raise

    return make


def _devices(devices: Sequence[int] | str | None) -> list[int] | None:
    if devices is None or devices == "all":
        return None if devices is None else check_gpus("all")
    if isinstance(devices, str) or not all(isinstance(number, int) and number >= 0 for number in devices):
        raise ConfigError(f"devices is {devices!r}; give a list of GPU indices, 'all', or None for the CPU")
    return check_gpus(list(devices))


# -- callbacks -------------------------------------------------------------------------------------------


class Callback:
    """An optional base class of callbacks; any object with one of these methods is a callback.

    The methods are called on rank 0, in the thread of the first device. Returning True stops training; several devices
    stop some iterations later, all after the same iteration. An exception ends training.
    """

    interval: int = 1
    """The interval of `after_iteration` in iterations. On a GPU each call waits for the device."""

    def after_iteration(self, solver: Solver) -> bool | None:
        """Called after iteration `solver.iteration - 1`."""

    def before_test(self, solver: Solver) -> bool | None:
        """Called before a test."""

    def after_test(self, solver: Solver, scores: list[dict[str, np.ndarray]]) -> bool | None:
        """Called after a test; `scores` has the mean of each output by name, for each test net."""

    def after_snapshot(self, solver: Solver, path: Path) -> bool | None:
        """Called after a snapshot; `path` is the .solverstate."""


@runtime_checkable
class IterationCallback(Protocol):
    """A function called after each iteration."""

    def __call__(self, solver: Solver) -> bool | None:
        """See `Callback.after_iteration`."""


# -- the solver and its net ------------------------------------------------------------------------------


def solver_of(source: SolverSource, net: NetSource | None = None) -> tuple[SolverParameter, Path | None]:
    """Return the upgraded solver with its net, and its file or None.

    Raises:
        ConfigError: a file cannot be read, a field is invalid, or the type is not supported.
    """
    path = Path(source) if isinstance(source, (str, PathLike)) else None
    if path is not None:
        param = read_solver(path)
    else:
        param = _message(source)
        upgrade_solver(param, "solver")
        _check_snapshots(param)
    if net is not None:
        for name in _NETS:
            param.ClearField(name)
        param.net_param.CopyFrom(_net_of(net))
    return param, path


def _message(source: Any) -> SolverParameter:
    """Return the solver from a message of any schema or from a mapping of fields."""
    if isinstance(source, Mapping):
        return _from_fields(source)
    known = "a solver is a prototxt's path, a SolverParameter or a mapping of fields"
    param: SolverParameter = _copied(source, SolverParameter, known)
    return param


def _from_fields(fields: Mapping[str, Any]) -> SolverParameter:
    param = SolverParameter()
    for name, value in fields.items():
        known = list(SolverParameter.DESCRIPTOR.fields_by_name)
        if name not in known:
            raise ConfigError(f"solver: unknown field '{name}'; {suggest(str(name), known)}")
        try:
            param.MergeFrom(SolverParameter(**{name: value}))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"solver: {name} is {value!r}: {error}; use the form of a solver's prototxt") from error
    return param


def _copied(source: Any, kind: Any, known: str) -> Any:
    descriptor = getattr(source, "DESCRIPTOR", None)
    if descriptor is None or descriptor.name != kind.DESCRIPTOR.name:
        raise ConfigError(f"{known}; {type(source).__name__} is none of these")
    try:
        return kind.FromString(source.SerializeToString())
    except EncodeError as error:
        raise ConfigError(f"{descriptor.name}: {error}") from error


def _net_of(net: Any) -> NetParameter:
    if isinstance(net, (str, PathLike)):
        return read_net(Path(net))
    message = net.to_proto() if callable(getattr(net, "to_proto", None)) else net
    param: NetParameter = _copied(message, NetParameter, "a net is a prototxt's path, a NetParameter or a NetSpec")
    upgrade_net(param, "net")
    return param


def _check_snapshots(param: SolverParameter) -> None:
    """Check that a solver that is not a file has a snapshot_prefix if it writes snapshots."""
    if param.HasField("snapshot_prefix"):
        return
    if param.snapshot or (param.HasField("snapshot_after_train") and param.snapshot_after_train):
        raise ConfigError("solver: snapshots are enabled and snapshot_prefix is missing; add snapshot_prefix")
    param.snapshot_after_train = False


# -- the result ------------------------------------------------------------------------------------------


class Record:
    """A callback that records scores, snapshots and the losses that the solver has read."""

    waits = False

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.scores: dict[int, list[dict[str, np.ndarray]]] = {}
        self.snapshots: list[Path] = []
        self._seen = 0

    def after_iteration(self, solver: Solver) -> None:
        if solver.losses.added != self._seen:
            self._seen = solver.losses.added
            self.losses[solver.iteration - 1] = solver.losses.values()[-1]

    def after_test(self, solver: Solver, scores: list[dict[str, np.ndarray]]) -> None:
        self.scores[solver.iteration] = scores

    def after_snapshot(self, solver: Solver, path: Path) -> None:
        self.snapshots.append(path)


class TrainResult:
    """The result of a training.

    Args:
        make: restores the solver in its final state.
        record: losses, scores and snapshots of the training.
        iteration: the number of completed iterations.
        stopped_early: whether training was stopped before max_iter.
    """

    def __init__(self, make: Callable[[], Solver], record: Record, iteration: int, stopped_early: bool) -> None:
        self._make = make
        self._solver: Solver | None = None
        self.iteration = iteration
        self.stopped_early = stopped_early
        self.losses = record.losses
        """The first device's loss by iteration: of all iterations on a CPU, of displayed or checked ones on a GPU."""
        self.scores = record.scores
        """For each iteration with a test: the mean outputs of each test net."""
        self.snapshots = record.snapshots
        """The written .solverstate files, the oldest first."""

    @property
    def solver(self) -> Solver:
        """The trained solver on the first device, for further calls of `step`, `test_all` or `snapshot`."""
        if self._solver is None:
            self._solver = self._make()
        return self._solver

    @property
    def net(self) -> Net:
        """The trained TRAIN net."""
        return self.solver.net

    @property
    def test_nets(self) -> list[Net]:
        """The TEST nets, which share the parameters."""
        return self.solver.test_nets

    def save(self, path: str | Path) -> None:
        """Write the weights as a .caffemodel, or as HDF5 if the name ends with .h5.

        Raises:
            RunError: the file cannot be written.
        """
        with self.solver.backend.activate():
            write_caffemodel(Path(path), self.net.name, self.net.layers)

    def close(self) -> None:
        """Free the device's memory. Idempotent."""
        if self._solver is not None:
            with self._solver.backend.activate():
                self._solver.close()
            self._solver.backend.close()

    def __enter__(self) -> TrainResult:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        parts = [f"{self.iteration} iterations" + (", stopped early" if self.stopped_early else "")]
        parts += [f"loss {list(self.losses.values())[-1]:.6g}"] if self.losses else []
        if self.scores:
            parts.append(", ".join(f"{name} {value}" for name, value in _flat(list(self.scores.values())[-1])))
        return f"<caffepy training: {'; '.join(parts)}>"

    def _repr_html_(self) -> str:
        rows = [(iteration, name, value) for iteration, scores in self.scores.items() for name, value in _flat(scores)]
        scores = table(("iteration", "output", "score"), rows) if rows else ""
        return scores + self.solver._repr_html_()


def _flat(scores: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return outputs and values as text; with several test nets, the name includes the net's index."""
    several = len(scores) > 1
    return [
        (f"#{index} {name}" if several else name, ", ".join(f"{number:.6g}" for number in np.ravel(value)))
        for index, net in enumerate(scores)
        for name, value in net.items()
    ]
