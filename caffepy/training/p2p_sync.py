"""A device's solver thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from caffepy.backend import Backend, create_backend
from caffepy.distributed.communicators.local import PATIENCE
from caffepy.distributed.connect import Connector
from caffepy.distributed.device_threads import DeviceSpec, DeviceThread
from caffepy.distributed.gradient_sync import GradientSync
from caffepy.distributed.liveness import Heartbeat
from caffepy.errors import AbortedError, NonFiniteError, PeerError
from caffepy.formats.proto.caffe_pb2 import SolverState
from caffepy.formats.snapshot_files import restore_first, snapshots
from caffepy.layers.python import acting_as
from caffepy.logs.performance_report import Performance
from caffepy.logs.trace import NO_TRACE, Trace, Tracer
from caffepy.training.callback import Action
from caffepy.training.callbacks.check_run import check_training, shortened
from caffepy.training.callbacks.early_stop import EarlyStop
from caffepy.training.callbacks.logger_callback import LoggerCallback
from caffepy.training.callbacks.loggers import make_loggers
from caffepy.training.callbacks.lr_find import LearningRateFinder
from caffepy.training.callbacks.weight_average import WeightAverage
from caffepy.training.options import TrainOptions
from caffepy.training.run_summary import save_solver
from caffepy.training.snapshot import SavedSolver
from caffepy.training.solver import Solver, create_solver
from caffepy.utils.clocks import suspend_aware_seconds

logger = logging.getLogger(__name__)

_DATA_SECONDS = 90.0
"""How much longer than the watchdog a thread waits for its data: the watchdog's message names process and device."""
_CHECK_SECONDS = 1.0
"""How often a thread that is ready checks for how long it has waited."""


class P2PSync(DeviceThread):
    """A solver thread.

    The thread builds backend and solver, sets `ready`, and trains after `go`.

    Args:
        spec: the device.
        options: the run; `solver.random_seed` is set.
        connect: makes the thread's communicator; called in the thread, with the device current, after all devices are
            ready.
        request: takes the oldest request made by signals.
        on_change: called in the thread when it is ready, has failed or has finished.
        names: what messages call each of all devices; by default their numbers.
    """

    def __init__(
        self,
        spec: DeviceSpec,
        options: TrainOptions,
        connect: Connector,
        request: Callable[[], Action],
        on_change: Callable[[P2PSync], None],
        names: Sequence[str] = (),
    ) -> None:
        super().__init__(f"solver {spec.shard.rank}", spec.device, spec.label, connect, lambda: on_change(self))
        self.spec = spec
        self.heartbeat = Heartbeat(spec.label, self._iteration, begun=False)
        self.trace: Tracer = NO_TRACE if options.trace is None else Trace(options.trace_iterations)
        self.events: list[dict[str, Any]] = []
        """The trace's events, once training is over."""
        self.trained: SavedSolver | None = None
        """The solver's state, once training is over, if the options ask for it."""
        self.solver: Solver | None = None
        self.ready = threading.Event()
        self._logger_callback: LoggerCallback | None = None
        self._options = options
        self._request = request
        names = names or [f"device {number}" for number in range(spec.shard.world_size)]
        self._exchange = GradientSync(
            spec.shard.rank, names, self.heartbeat.collective, options.check_replicas, self.trace
        )
        self._state: SolverState | None = None
        self._go = threading.Event()
        self._cancelled = False

    # -- for the manager ----------------------------------------------------------------------------

    def go(self, state: SolverState | None = None) -> None:
        """Begin to train; called when all devices are ready.

        Args:
            state: what the root has restored; None: nothing.
        """
        self._state = state
        self._go.set()

    def abort(self) -> None:
        self._cancelled = True
        self._exchange.cancel()
        self._go.set()
        if self.solver is not None:
            self.solver.requests.cancel()
        super().abort()

    @property
    def performance(self) -> Performance:
        """The solver's statistics, labelled with its device."""
        assert self.solver is not None
        return replace(self.solver.performance, device=self.spec.label)

    @property
    def completed(self) -> bool:
        """Whether training has come to max_iter, or was stopped on request."""
        solver = self.solver
        return solver is not None and (solver.iteration >= solver.param.max_iter or solver.stopped_early)

    @property
    def location(self) -> str:
        """``device CPU 0, iteration 2``, for messages; empty where there is one device."""
        if not self._several:
            return ""
        error = self.error
        iteration = error.iteration if isinstance(error, NonFiniteError) else self.heartbeat.iteration()
        return f"device {self.spec.label}, iteration {iteration}"

    @property
    def _several(self) -> bool:
        """Whether other devices train with this one."""
        return self.spec.shard.world_size > 1

    # -- the thread ---------------------------------------------------------------------------------

    def _create_backend(self) -> Backend:
        math, engine = self._options.math, self._options.engine
        return create_backend(self.spec.device, self.spec.threads, math, engine.autotune, engine.deterministic)

    def _work(self, backend: Backend) -> None:
        # Numbers that are not finite are counted or reported by training itself.
        shard = self.spec.shard
        place = shard.rank, shard.world_size
        solver = acting_as(place, shard.devices_per_rank == 1) if self._several else nullcontext()
        with np.errstate(all="ignore"), solver:
            self._train(backend)

    def _fail(self, error: BaseException) -> None:
        self.error = self.error or error
        self.ready.set()
        self._on_change()

    def _train(self, backend: Backend) -> None:
        self._connect.begin()
        self.solver = self._build(backend)
        with self.heartbeat.collective("the start of training"):
            self.ready.set()
            self._on_change()
            self._wait_for_go()
        if self._state is not None and self.spec.shard.rank != 0:
            self.solver.snapshots.adopt(self._state)
        with self.heartbeat.collective("the connection of the devices"):
            communicator = self._communicator = self._connect()
            if self._several:
                self._exchange.connect(self.solver, communicator, self._options.sync_bn)
        self.heartbeat.begin()
        if self._options.check_only:
            check_training(self.solver)
        else:
            self.solver.solve()
        # No device may leave while others still test or write the last snapshot.
        self.solver.callback.barrier()
        if self._options.keeps_trained:
            self.solver.average_statistics()
            self.trained = self.solver.snapshots.save_in_memory()
        self._take_times(self.solver)

    def _wait_for_go(self) -> None:
        """Wait until all devices are ready; the watchdog knows the late device and gives up first."""
        seconds = self._options.timeout + PATIENCE
        end = suspend_aware_seconds() + seconds
        while not self._go.wait(_CHECK_SECONDS):
            if suspend_aware_seconds() > end:
                raise PeerError(f"training has not begun for {seconds:.0f} s: other devices are not ready")
        if self._cancelled:
            raise AbortedError("training was stopped before it began")

    def _take_times(self, solver: Solver) -> None:
        """Read the device's timers, which `_close` releases."""
        if self._several:
            solver.performance.communication, solver.performance.exposed = self._exchange.communication()
        self.events = self.trace.events(self.spec.shard.rank, self.spec.full_name)

    def _build(self, backend: Backend) -> Solver:
        options = self._options
        param = shortened(options.solver, self.spec.shard.world_size) if options.check_only else options.solver
        solver = create_solver(
            param,
            backend,
            shard=self.spec.shard,
            resolve=options.resolve,
            callback=self._exchange if self._several else None,
            request=self._request,
            keep_going=options.keep_going,
            engine=options.engine,
            trace=self.trace,
            guard=options.compression != "none" and self._several,
            max_skipped=options.max_skipped,
            timeout=options.timeout + _DATA_SECONDS,
            keep=options.retention,
        )
        self.solver = solver
        if backend.asynchronous:
            self.trace.watch_device(backend.record_timed_event, backend.synchronize)
        root = self.spec.shard.rank == 0
        if root:
            self._read_start(solver)
        if options.ema:  # before other callbacks, which see the parameters themselves after a test
            solver.add_callback(WeightAverage(solver, options.ema))
        if root:
            for observer in options.callbacks:
                solver.add_callback(observer)
            if options.early_stop:
                solver.add_callback(EarlyStop(options.early_stop, solver))
            if options.lr_find is not None:
                solver.add_callback(LearningRateFinder(options.lr_find))
            if options.check_only:
                return solver
            if options.assignments and solver.snapshots.wanted:
                save_solver(options)
            if loggers := make_loggers(options.loggers):
                self._logger_callback = LoggerCallback(solver, loggers, options.log_histograms)
                solver.add_callback(self._logger_callback)
        return solver

    def _read_start(self, solver: Solver) -> None:
        """Restore or load weights, and look at older snapshots; on the root, since the others may have no such files.

        Raises:
            SnapshotError: a snapshot or weights file does not fit.
            ConfigError: snapshots of another net would be replaced.
        """
        newest = self._options.snapshot
        if newest is None:
            solver.load_weights(self._options.weights)
        elif not self._options.resume_newest:
            solver.restore(newest)
        else:
            known = snapshots(solver.resolve.output(solver.param.snapshot_prefix))
            older = known[known.index(newest) + 1 :] if newest in known else []
            restore_first([newest, *older], partial(solver.restore, strict=True))
        if not self._options.overwrite:
            solver.snapshots.check_earlier()

    def _release(self) -> None:
        """Close loggers and the solver: its graphs have captured the communicator's calls."""
        if self._logger_callback is not None:
            self._logger_callback.close(failed=self.error is not None)
        if self.solver is not None:
            self.solver.close()

    def _iteration(self) -> int:
        return self.solver.iteration if self.solver is not None else 0
