"""`caffepy.train`: the training of `caffepy train`, called by a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

from caffepy.backend import create_backend
from caffepy.config.paths import PathResolver
from caffepy.errors import ConfigError
from caffepy.parallel.options import TrainOptions
from caffepy.parallel.p2p_manager import P2PManager
from caffepy.progress import interactive, progress_bar
from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.registry import suggest
from caffepy.solvers import Solver, create_solver
from caffepy.solvers.io.in_memory import SavedSolver, restore_from_memory
from caffepy.training.callback import Callback, IterationCallback
from caffepy.training.devices import check_gpus
from caffepy.training.prepare import first_launch_time, prepare_solver
from caffepy.training.source import NetSource, SolverSource, StrPath, solver_of
from caffepy.training.trained import Record, TrainResult

AnyCallback: TypeAlias = "Callback | IterationCallback | Any"
_OURS = frozenset(
    {"solver", "resolve", "devices", "share_gpus", "snapshot", "resume_newest", "resume_since", "weights",
     "callbacks", "keeps_trained"}
)  # fmt: skip
"""Fields of TrainOptions that arguments of `train` fill."""


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
        solver: a prototxt's path, a SolverParameter, or a mapping of a solver's fields. Its solver_mode and device_id
            are not looked at.
        net: the net, instead of the one that the solver names: a prototxt's path, a NetParameter or a NetSpec.
        weights: .caffemodel files to start from, later ones over earlier ones.
        snapshot: a .solverstate to go on from, or "auto" for the newest whole one.
        devices: numbers of GPUs, each with a thread of its own, or "all"; None: the CPU.
        callbacks: one or several, see `caffepy.Callback`.
        options: `max_iter`; `progress`, whether to show a bar (by default in notebooks and at Python's prompt); the
            fields of `caffepy.parallel.TrainOptions`, such as `cpu_solvers`, `keep_last` or `sync_bn`.

    Raises:
        UserError: files, solver, net or options are wrong.
        RunError: training failed.
    """
    progress = options.pop("progress", None)
    record, made = Record(), []

    def make_options() -> TrainOptions:
        listed = [record, *(callbacks if isinstance(callbacks, (list, tuple)) else [callbacks])]
        files = [weights] if isinstance(weights, (str, PathLike)) else list(weights)
        made.append(
            _options(solver_of(solver, net), files, snapshot, _devices(devices), {**options, "callbacks": listed})
        )
        return made[0]

    manager = P2PManager(make_options)
    shown = interactive() if progress is None else progress
    with progress_bar(lambda: manager.iteration, lambda: made[0].solver.max_iter, wanted=shown):
        manager.run()
    saved = manager.trained
    stopped = saved.message.iter < made[0].solver.max_iter
    return TrainResult(_maker(made[0], saved), record, saved.message.iter, stopped)


def _options(
    source: tuple[SolverParameter, Path | None],
    weights: list[StrPath],
    snapshot: StrPath | None,
    devices: list[int] | None,
    further: dict[str, Any],
) -> TrainOptions:
    param, path = source
    if snapshot is not None and weights:
        raise ConfigError("snapshot and weights exclude each other: a snapshot brings its own weights; leave one out")
    if "max_iter" in further:
        param.max_iter = _whole(further.pop("max_iter"))
    _check_names(further)
    prepare_solver(param, str(path or "solver"), bool(weights or snapshot))
    return TrainOptions(
        solver=param,
        resolve=PathResolver(path),
        devices=devices,
        snapshot=Path(snapshot) if snapshot is not None and snapshot != "auto" else None,
        resume_newest=snapshot == "auto",
        resume_since=first_launch_time(),
        weights=[Path(file) for file in weights],
        keeps_trained=True,
        **further,
    )


def _maker(options: TrainOptions, saved: SavedSolver) -> Callable[[], Solver]:
    """Makes a solver that goes on alone, on the first device, from where training ended."""

    def make() -> Solver:
        device, engine, param = options.local_devices[0], options.engine, SolverParameter()
        param.CopyFrom(options.solver)
        del param.weights[:]
        backend = create_backend(device, options.threads, options.math, engine.autotune, engine.deterministic)
        try:
            with backend.activate():
                solver = create_solver(param, backend, resolve=options.resolve, engine=engine)
                restore_from_memory(solver.state, saved)
                return solver
        except BaseException:
            backend.close()
            raise

    return make


def _check_names(options: dict[str, Any]) -> None:
    known = {field.name for field in fields(TrainOptions)} - _OURS
    for name in options.keys() - known - {"callbacks"}:
        near = suggest(name, [*sorted(known), "max_iter", "progress"])
        raise ConfigError(f"train has no option '{name}'; {near}")


def _whole(max_iter: Any) -> int:
    if not isinstance(max_iter, int) or not 0 <= max_iter < 1 << 31:
        raise ConfigError(f"max_iter is {max_iter!r}; it must be a whole number of 0 or more")
    return max_iter


def _devices(devices: Sequence[int] | str | None) -> list[int] | None:
    if devices is None or devices == "all":
        return None if devices is None else check_gpus("all")
    if isinstance(devices, str) or not all(isinstance(number, int) and number >= 0 for number in devices):
        raise ConfigError(f"devices is {devices!r}; give a list of GPUs' numbers, 'all', or None for the CPU")
    return check_gpus(list(devices))
