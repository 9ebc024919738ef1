"""`caffe.SGDSolver` and the other solvers, with pycaffe's nets, and `NCCL`, which trains with one process per device.

Training with one process per device is that of Caffe's `python/train.py` (Caffe's `parallel.cpp`). The processes
rendezvous through a file named by the uid, so they must run on one host. Arrays travel by NCCL between GPUs and by TCP
between CPUs. For several hosts use `caffepy train` under mpirun.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from caffepy.distributed.data_parallel import gradient_communicator
from caffepy.distributed.default import connect
from caffepy.distributed.reducer import Reducer
from caffepy.errors import UserError
from caffepy.formats.load import read_solver
from caffepy.formats.paths import PathResolver
from caffepy.formats.proto.caffe_pb2 import SolverParameter
from caffepy.logs.trace import NO_TRACE
from caffepy.net.parameters import bucket_count
from caffepy.pycaffe.device import Device, mode
from caffepy.pycaffe.errors import ArgumentError, as_users_raise, check_file, check_type, whole_number
from caffepy.pycaffe.net import Net
from caffepy.training.callback import Action, SingleDevice
from caffepy.training.rules import RULES
from caffepy.training.solver import create_solver
from caffepy.utils.options import ExecutionOptions

# -- solvers -------------------------------------------------------------------------------------------

Call = Callable[[], Any]


def _weakly(ask: Callable[[], Action]) -> Callable[[], Action]:
    """Return a method without a strong reference to its object, so that caffepy's nets do not keep it alive."""
    method = weakref.WeakMethod(ask)

    def asked() -> Action:
        bound = method()
        return Action.NONE if bound is None else bound()

    return asked


@dataclass(frozen=True)
class _Callback:
    """One callback of a solver; either function may be None."""

    before_iteration: Call | None
    before_step: Call | None
    on_gradients_ready: Call | None


class _Callbacks(SingleDevice):
    """The communicator of a single device that runs the program's callbacks."""

    def __init__(self, device: Device) -> None:
        self.is_root = mode.solver_rank == 0
        self.callbacks: list[_Callback] = []
        self._device = device

    def _call(self, name: str) -> None:
        for callback in self.callbacks:
            if (function := getattr(callback, name)) is not None:
                self._device.call(function)

    def before_iteration(self) -> None:
        """Run the `on_start` callbacks."""
        self._call("before_iteration")

    def on_start(self) -> None:
        self._call("before_step")

    def on_gradients_ready(self) -> None:
        self._call("on_gradients_ready")

    def capture_blocker(self) -> str | None:
        return "it calls the program's on_gradients_ready on the host" if self.callbacks else None


class Solver:
    """Trains a net on the device of `set_mode_gpu` and `set_device` at construction.

    As in pycaffe, the prototxt's `solver_mode` and `device_id` are ignored, and also `type` except by `get_solver`. A
    non-finite loss is logged and does not stop the training.

    Args:
        solver_file: the solver's prototxt.

    Raises:
        MissingFileError: it cannot be opened.
        ConfigError: the solver or a net is invalid.
        Exception: an exception of a Python layer, unchanged.
    """

    type_name: ClassVar[str] = ""
    """The solver type; empty: `type` of the prototxt."""

    def __init__(self, solver_file: str | os.PathLike[str]) -> None:
        path = check_file(solver_file)
        param = read_solver(path)
        if self.type_name:
            param.type = self.type_name
        self.device = mode.present_device()
        """Use `with solver.device.computing():` around code that computes with caffepy's own arrays."""
        self._callbacks = _Callbacks(self.device)
        self._started = -1
        with self.device.computing(), as_users_raise():
            self.solver = self._make(param, path)
            """caffepy's solver."""
        self.net = Net.of(self.solver.net, self.device)
        self.test_nets = [Net.of(net, self.device) for net in self.solver.test_nets]

    def _make(self, param: SolverParameter, path: Path) -> Any:
        if param.random_seed < 0 and mode.seed is not None:
            param.random_seed = mode.next_seed()
        if not self._callbacks.is_root:
            param.test_interval = param.test_and_snapshot_last_epochs = 0  # only the root tests
        solver = create_solver(
            param,
            self.device.backend,
            resolve=PathResolver(path),
            callback=self._callbacks,
            request=_weakly(self._before_iteration),
            keep_going=True,
            engine=ExecutionOptions(fuse=False, share=False),
        )
        solver.net.context.shard = mode.shard()
        return solver

    def _before_iteration(self) -> Action:
        """Return the action requested before an iteration or a test batch."""
        if self._started != self.iter:
            if self._started < 0 or self._callbacks.callbacks or self.net.has_callbacks:
                for blob in self.solver.net.unreached_parameters():
                    self.device.backend.fill(blob.diff, 0.0)  # the program may have written it
            self._started = self.iter
            self._callbacks.before_iteration()
        return Action.NONE

    @property
    def iter(self) -> int:
        """The number of completed iterations."""
        return self.solver.iteration if hasattr(self, "solver") else -1

    @property
    def param(self) -> SolverParameter:
        """The solver's settings; `base_lr` and `max_iter` may be changed."""
        param: SolverParameter = self.solver.param
        return param

    @property
    def lr(self) -> float:
        """The learning rate of the next iteration."""
        return float(self.solver.hyperparameters.learning_rate(self.solver.iteration))

    def step(self, iterations: int, progress: bool = False) -> None:
        """Run `iterations` iterations with the tests and snapshots that are due.

        Args:
            iterations: the number of iterations.
            progress: show a progress bar, on a terminal or in a notebook.

        Raises:
            ArgumentError: the number is negative or not an integer.
            Exception: an exception of a Python layer or callback, unchanged.
        """
        number = whole_number("step", iterations, 0)
        with self._training():
            self.solver.step(number, progress)

    def solve(self, resume_file: str | os.PathLike[str] | None = None) -> None:
        """Train to max_iter, with the final snapshot and test.

        Args:
            resume_file: a .solverstate to resume from.
        """
        resume_from = check_file(resume_file) if resume_file is not None else None
        with self._training():
            self.solver.solve(resume_from)

    @contextmanager
    def _training(self) -> Iterator[None]:
        self._started = -1
        with self.device.computing(), as_users_raise():
            if any(net.has_callbacks for net in (self.net, *self.test_nets)):
                self.solver.graph_executor.stop_capturing()
            yield

    def snapshot(self) -> None:
        """Write weights and solver state to files named by snapshot_prefix."""
        with self.device.computing():
            self.solver.snapshot()

    def restore(self, state_file: str | os.PathLike[str]) -> None:
        """Resume from a .solverstate.

        Raises:
            MissingFileError: it cannot be opened.
            SnapshotError: the file is invalid or belongs to another net.
        """
        path = check_file(state_file)
        with self.device.computing():
            self.solver.restore(path)

    def apply_update(self) -> None:
        """Update the parameters from their diffs and increment the iteration."""
        with self.device.computing():
            self.solver.apply_update()

    def share_weights(self, net: Net) -> None:
        """Make `net` use the parameters of this solver's net."""
        net.share_with(self.net)

    def add_callback(self, on_start: Any, on_gradients_ready: Call | None = None) -> None:
        """Add training callbacks, called in the order of addition.

        Args:
            on_start: called before each iteration. If it is the only argument: an object such as NCCL with
                `on_gradients_ready` and optionally `on_start`, called before each `step`.
            on_gradients_ready: called before the update, with complete parameter diffs, which it may change.

        Raises:
            ArgumentError: the only argument has no `on_gradients_ready`.
        """
        if on_gradients_ready is not None:
            callback = _Callback(on_start, None, on_gradients_ready)
        elif hasattr(on_start, "on_gradients_ready"):
            callback = _Callback(None, getattr(on_start, "on_start", None), on_start.on_gradients_ready)
        else:
            raise ArgumentError("add_callback needs on_start and on_gradients_ready, or one NCCL object")
        self._callbacks.callbacks.append(callback)
        with self.device.active():
            self.solver.graph_executor.drop()  # existing graphs do not call it

    def __repr__(self) -> str:
        return f"<caffe.{type(self).__name__} of {self.net.name!r}, iteration {self.iter}, {self.device.backend.name}>"

    def _repr_html_(self) -> str:
        html: str = self.solver._repr_html_()
        return html


class SGDSolver(Solver):
    """Stochastic gradient descent with momentum. The classes of the other rules, such as `AdamSolver`, inherit it."""

    type_name = "SGD"


@cache
def _class_of(rule: str) -> type[SGDSolver]:
    """Return the class of the solvers with an update rule: `AdamSolver` for Adam."""
    if rule == SGDSolver.type_name:
        return SGDSolver
    contents = {"__doc__": f"A solver with the rule {rule}.", "__module__": __name__, "type_name": rule}
    return type(f"{rule}Solver", (SGDSolver,), contents)


if not TYPE_CHECKING:  # hides `__getattr__` from type checkers, which would accept any name

    def __getattr__(name: str) -> type[SGDSolver]:
        rule = name.removesuffix("Solver")
        if rule == name or rule not in RULES:
            raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
        return _class_of(rule)


def get_solver(solver_file: str | os.PathLike[str]) -> Solver:
    """Return a solver of the type in its prototxt.

    Raises:
        MissingFileError: the file cannot be opened.
        ConfigError: the type is unknown, or the solver or a net is invalid.
    """
    wanted = read_solver(check_file(solver_file)).type
    return (_class_of(wanted) if wanted in RULES else Solver)(solver_file)


# -- one process per device ----------------------------------------------------------------------------

_PREFIX = "caffepy-nccl-"


def has_nccl() -> bool:
    """Return whether `NCCL` can be used. Always True: on CPUs it does not need the library."""
    return True


class NCCL:
    """One process's member of a group of solvers. All processes must construct theirs at about the same time.

    `set_solver_count` sets the group's size, `set_solver_rank` this process's rank.

    Args:
        solver: the solver whose parameters and gradients are exchanged.
        uid: the result of `new_uid`, called once by the program that starts the processes.

    Raises:
        ArgumentTypeError: `solver` is no solver.
        UserError: the uid is invalid, or the rank is too large.
        PeerError: another process did not join in time, or failed.
        MissingExtraError: `set_mode_gpu` was called, and NCCL or CuPy is not installed.
    """

    def __init__(self, solver: Solver, uid: bytes) -> None:
        check_type("NCCL", solver, Solver)
        net = solver.net.net
        self._parameters = net.parameters
        self._device = solver.device
        self._group = connect(
            "nccl" if mode.gpu else "tcp",
            _address(uid),
            rank=mode.solver_rank,
            world_size=mode.solver_count,
            device_id=mode.device if mode.gpu else None,
        )
        in_parts = solver.param.layer_wise_reduce and solver.param.iter_size == 1 and not net.backend.asynchronous
        buckets = bucket_count(net.param) if in_parts else 1
        self._communicator = gradient_communicator(self._group)
        self._called = False
        """Whether `run` is registered with the net, so that gradients may be exchanged during the backward pass."""
        waiting = self._group.bounded
        with self._device.active():
            self._reducer = Reducer(net, self._communicator, buckets, lambda: self._called, waiting, NO_TRACE)
        # Children of multiprocessing exit without running atexit handlers.
        Finalize(self, self._group.destroy, exitpriority=10)

    @staticmethod
    def new_uid() -> bytes:
        """Return a unique id for a group; the program that starts the processes passes it to all."""
        return os.fsencode(Path(tempfile.gettempdir()).absolute() / f"{_PREFIX}{secrets.token_hex(16)}")

    def bcast(self) -> None:
        """Broadcast rank 0's parameters.

        Raises:
            PeerError: another process failed, left or did not join.
        """
        with self._device.computing(), self._group.bounded("the root's weights"):
            self._communicator.broadcast(self._parameters.data, root=0)
            self._communicator.wait_on_device()
            self._parameters.written()

    def on_gradients_ready(self) -> None:
        """Average the gradients over all processes; called through `solver.add_callback(nccl)`.

        Raises:
            PeerError: another process failed, left or did not join.
        """
        with self._device.active():
            self._reducer.finish()
            with self._group.bounded(self._reducer.describe()):
                self._communicator.wait_on_device()

    def run(self, layer: int) -> None:
        """Exchange gradients as soon as they are complete; called through `solver.net.after_backward(nccl)`.

        Buckets (`reduce_buckets`) are exchanged during the backward pass. `on_gradients_ready` exchanges all gradients
        instead on GPUs, with `iter_size` above 1 and with `layer_wise_reduce: false`. On GPUs overlap could deadlock: a
        pass that compiles or allocates waits for a collective, and the peer does the same.
        """
        self._called = True


def _address(uid: bytes) -> str:
    """Return the rendezvous file."""
    path = Path(os.fsdecode(uid)) if isinstance(uid, bytes) else Path()
    if not path.is_absolute() or not path.name.startswith(_PREFIX):
        raise UserError("NCCL needs the uid that caffe.NCCL.new_uid() gave the program that started the processes")
    return path.as_uri()
