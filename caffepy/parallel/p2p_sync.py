"""A device's solver thread, and the callback through which its solver communicates with the other devices."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from caffepy.awake import awake_seconds
from caffepy.backend import Array, Backend, create_backend
from caffepy.errors import AbortedError, PeerError
from caffepy.net.parameters import bucket_count
from caffepy.net.wiring import capture_blockers
from caffepy.parallel.communicators.communicator import Communicator
from caffepy.parallel.communicators.local import PATIENCE
from caffepy.parallel.connect_ahead import ConnectAhead
from caffepy.parallel.control.heartbeat import Heartbeat
from caffepy.parallel.device_spec import DeviceSpec
from caffepy.parallel.device_threads import DeviceThread
from caffepy.parallel.gradients.reducer import Reducer
from caffepy.parallel.options import TrainOptions
from caffepy.parallel.replicas import check_replicas
from caffepy.proto.caffe_pb2 import SolverState
from caffepy.report import Performance
from caffepy.snapshot.files import restore_first, snapshots
from caffepy.solvers import create_solver
from caffepy.solvers.base import Solver
from caffepy.solvers.callbacks import Action, SingleDevice
from caffepy.solvers.execution_options import Keep
from caffepy.trace import NO_TRACE, Trace, Tracer

logger = logging.getLogger(__name__)

_DATA_SECONDS = 90.0
"""How much longer than the watchdog a thread waits for its data: the watchdog's message names process and device."""
_CHECK_SECONDS = 1.0
"""How often a thread that is ready checks for how long it has waited."""


class P2PSync(DeviceThread):
    """A solver thread; its solver's `SolverCallback`.

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
        connect: Callable[[], Communicator],
        request: Callable[[], Action],
        on_change: Callable[[P2PSync], None],
        names: Sequence[str] = (),
    ) -> None:
        super().__init__(f"solver {spec.shard.rank}", spec.device, spec.label, connect, lambda: on_change(self))
        self.spec = spec
        self.is_root = spec.shard.rank == 0
        self.world_size = spec.shard.world_size
        self.heartbeat = Heartbeat(spec.label, self._iteration, begun=False)
        self.solver: Solver | None = None
        self.trace: Tracer = NO_TRACE if options.trace is None else Trace(options.trace_iterations)
        self.events: list[dict[str, Any]] = []
        """The trace's events, once training is over."""
        self.ready = threading.Event()
        self.stop_wanted: Callable[[], Collection[Action]] = tuple
        """Asked while the solver waits for data: what a signal that stops training asks for, in any process."""
        self._options = options
        self._request = request
        self._names = names or [f"device {number}" for number in range(self.world_size)]
        self._compared = -1
        """The iteration after which the parameters were compared last."""
        self._state: SolverState | None = None
        self._go = threading.Event()
        self._cancelled = False
        self._reducer: Reducer | None = None

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
        self._go.set()
        if isinstance(self._connect, ConnectAhead):
            self._connect.give_up()
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
        if self.world_size == 1:
            return ""
        return f"device {self.spec.label}, iteration {self.heartbeat.iteration()}"

    # -- for the solver: SolverCallback -------------------------------------------------------------

    def on_start(self) -> None:
        assert self.solver is not None
        with self._waiting("the root's weights"):
            for array in (self.solver.net.parameters.data, *self.solver.history):
                self._connected.broadcast(array, root=0)
            self._drain()

    def on_clock_start(self) -> None:
        assert self._reducer is not None
        self._reducer.timer.reset()

    def on_iteration(self) -> None:
        assert self.solver is not None
        interval = self._options.check_replicas
        if interval and self.solver.iteration % interval == 0:
            self.solver.graph_runner.drain()
            self.on_snapshot()

    def on_snapshot(self) -> None:
        """Compare the parameters, so that a snapshot is that of all devices."""
        assert self.solver is not None
        if self._compared == self.solver.iteration:
            return
        gather = partial(self._gather, what="the comparison of the parameters")
        check_replicas(self.solver.net, self._names, gather)
        self._compared = self.solver.iteration

    def on_gradients_ready(self) -> None:
        assert self._reducer is not None
        _ = self._connected  # refuses once training was stopped
        self._reducer.finish()

    def capture_blocker(self) -> str | None:
        return None if self._captures else "the devices exchange gradients through the host"

    @property
    def _captures(self) -> bool:
        """Whether what the devices exchange may be captured into a graph."""
        return self._communicator is not None and self._communicator.capturable

    def wait_for_device(self, wait: Callable[[], None]) -> None:
        assert self._reducer is not None
        with self.heartbeat.collective(self._reducer.describe), self.trace.span("waits", "the gradients' all-reduce"):
            self._drain(wait)

    def average_over_devices(self, arrays: Sequence[Array]) -> None:
        with self._waiting("the average of running statistics"):
            for array in arrays:
                self._connected.all_reduce(array, average=True)
            self._drain()

    def sum_over_devices(self, values: Any, what: str = "the sum of scores") -> Any:
        with self._waiting(what):
            return self._connected.sum(np.asarray(values, np.float64))

    def min_over_devices(self, number: float, what: str) -> float:
        return float(self._gather([number], what).min())

    def barrier(self) -> None:
        with self._waiting("a barrier"):
            self._connected.barrier()

    def _gather(self, values: Sequence[float], what: str) -> Any:
        """Numbers of all devices, one row for each."""
        rows = np.zeros((self.world_size, len(values)))
        rows[self.spec.shard.rank] = values
        return self.sum_over_devices(rows, what)

    def _average(self, array: Any) -> None:
        """All-reduce for sync-BN layers."""
        with self._waiting("BatchNorm's statistics"):
            self._connected.all_reduce(array, average=True)

    def _total(self, array: Any) -> None:
        """Sum of a loss layer's label count, by which the loss is divided, over all devices."""
        with self._waiting("the number of labels that are not ignored"):
            self._connected.all_reduce(array, average=False)
            if self._captures and self._backend is not None and not self._backend.capturing:
                # What follows may compile and allocate, which waits for the device, and so for the other devices.
                self._drain()

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        """Mark a collective, for the watchdog and in the trace."""
        with self.heartbeat.collective(what), self.trace.span("waits", what):
            yield

    @property
    def _connected(self) -> Communicator:
        if self._communicator is None or self._cancelled:
            raise AbortedError("training was stopped")
        return self._communicator

    def _drain(self, wait: Callable[[], None] | None = None) -> None:
        """Wait for the device: a thread that launches eagerly must not run ahead of its peers, or they deadlock."""
        assert self._communicator is not None
        self._communicator.wait_on_device(wait)

    # -- the thread ---------------------------------------------------------------------------------

    def _create_backend(self) -> Backend:
        math, engine = self._options.math, self._options.engine
        return create_backend(self.spec.device, self.spec.threads, math, engine.autotune, engine.deterministic)

    def _work(self, backend: Backend) -> None:
        # Numbers that are not finite are counted or reported by training itself.
        with np.errstate(all="ignore"):
            self._train(backend)

    def _fail(self, error: BaseException) -> None:
        self.error = self.error or error
        self.ready.set()
        self._on_change()

    def _train(self, backend: Backend) -> None:
        if isinstance(self._connect, ConnectAhead):
            self._connect.begin()
        self.solver = self._build(backend)
        with self.heartbeat.collective("the start of training"):
            self.ready.set()
            self._on_change()
            self._wait_for_go()
        if self._state is not None and not self.is_root:
            self.solver.adopt(self._state)
        with self.heartbeat.collective("the connection of the devices"):
            self._communicator = self._connect()
            self._allocate_gradients(self.solver)
        if self.world_size > 1:
            mean = self._average if self._options.sync_bn else None
            self.solver.net.connect_devices(self._total, mean, self._captures)
            self._reducer = self._make_reducer(self.solver)
        self.heartbeat.begin()
        self.solver.solve()
        # Nobody may leave while others still test or write the last snapshot.
        self.solver.callback.barrier()
        self._take_times(self.solver)

    def _wait_for_go(self) -> None:
        """Wait until all devices are ready; the watchdog, which knows who is not, gives up first."""
        seconds = self._options.timeout + PATIENCE
        end = awake_seconds() + seconds
        while not self._go.wait(_CHECK_SECONDS):
            if awake_seconds() > end:
                raise PeerError(f"training has not begun for {seconds:.0f} s: other devices are not ready")
        if self._cancelled:
            raise AbortedError("training was stopped before it began")

    def _take_times(self, solver: Solver) -> None:
        """Read the device's timers, which `_close` releases."""
        if self._reducer is not None:
            solver.performance.communication, solver.performance.exposed = self._reducer.timer.totals()
        self.events = self.trace.events(self.spec.shard.rank, self.spec.full_name)

    def _allocate_gradients(self, solver: Solver) -> None:
        """Let the communicator allocate the gradients, for example in memory that ranks share."""
        parameters = solver.net.parameters
        memory = self._connected.allocate_gradients(parameters.size)
        if memory is not None:
            parameters.bind_gradients(memory)

    def _make_reducer(self, solver: Solver) -> Reducer:
        """As the prototxts want it: `layer_wise_reduce` (BVLC) and `reduce_buckets` (NVIDIA).

        Where nobody says whether to overlap, that depends on whether it is worth it.
        """
        overlap = self._connected.overlaps
        if solver.param.HasField("layer_wise_reduce"):
            overlap = solver.param.layer_wise_reduce
        buckets = bucket_count(solver.net.param) if overlap else 1
        schedule = solver.net.schedule
        cut = any(n.need_backward and blocker for n, blocker in zip(schedule, capture_blockers(schedule), strict=True))
        if cut and solver.backend.captures:
            buckets = 1  # what is begun within a graph must end within it, and here there are several
        reducer = Reducer(solver.net, self._connected, buckets, self._may_begin, self._waiting, self.trace)
        if reducer.overlaps and self.is_root:
            logger.info("gradients are exchanged in %d parts during the backward pass", reducer.parts)
        return reducer

    def _may_begin(self) -> bool:
        """Whether exchanges may begin in the present backward pass.

        On a device that works behind the host only while that is captured: an eager pass may compile, tune and
        allocate, which waits for the whole device, and so for an exchange whose other end may be waiting just so.
        """
        assert self.solver is not None
        backend = self.solver.backend
        return self.solver.last_pass and (backend.capturing or not backend.asynchronous)

    def _build(self, backend: Backend) -> Solver:
        options = self._options
        solver = create_solver(
            options.solver,
            backend,
            shard=self.spec.shard,
            resolve=options.resolve,
            callback=self if self.world_size > 1 else SingleDevice(),
            request=self._request,
            keep_going=options.keep_going,
            engine=options.engine,
            trace=self.trace,
            guard=options.compression != "none" and self.world_size > 1,
            max_skipped=options.max_skipped,
            timeout=options.timeout + _DATA_SECONDS,
            keep=Keep(options.keep_last, options.keep_best),
        )
        self.solver = solver
        solver.requests.heard = self.stop_wanted
        if backend.asynchronous:
            self.trace.watch_device(backend.record_timed_event, backend.synchronize)
        if self.is_root:
            self._read_start(solver)
        return solver

    def _read_start(self, solver: Solver) -> None:
        """Restore or load weights; only on the root, since the others may have no such files."""
        newest = self._options.snapshot
        if newest is None:
            solver.load_weights(self._options.weights)
        elif not self._options.resume_newest:
            solver.restore(newest)
        else:
            known = snapshots(solver.resolve.output(solver.param.snapshot_prefix))
            older = known[known.index(newest) + 1 :] if newest in known else []
            restore_first([newest, *older], solver.restore)

    def _release(self) -> None:
        """Close the solver: its graphs have captured the communicator's calls."""
        if self.solver is not None:
            self.solver.close()

    def _iteration(self) -> int:
        return self.solver.iteration if self.solver is not None else 0
