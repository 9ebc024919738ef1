"""A device's solver thread, and the callback through which its solver communicates with the other devices."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from caffepy.awake import awake_seconds
from caffepy.backend import Array, Backend, create_backend
from caffepy.errors import AbortedError, PeerError
from caffepy.net.parameters import bucket_count
from caffepy.net.wiring import capture_blockers
from caffepy.parallel.communicators.communicator import Communicator
from caffepy.parallel.communicators.local import PATIENCE
from caffepy.parallel.control.heartbeat import Heartbeat
from caffepy.parallel.device_spec import DeviceSpec
from caffepy.parallel.device_threads import DeviceThread
from caffepy.parallel.gradients.comm_timer import CommTimer
from caffepy.parallel.gradients.reducer import Reducer
from caffepy.parallel.options import TrainOptions
from caffepy.parallel.replicas import check_replicas
from caffepy.proto.caffe_pb2 import SolverState
from caffepy.report import Performance
from caffepy.solvers import create_solver
from caffepy.solvers.base import Solver
from caffepy.solvers.callbacks import Action
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
        super().__init__(f"solver {spec.shard.rank}", spec.device, spec.label, lambda: on_change(self))
        self.spec = spec
        self.is_root = spec.shard.rank == 0
        self.world_size = spec.shard.world_size
        self.heartbeat = Heartbeat(spec.label, self._iteration, begun=False)
        self.solver: Solver | None = None
        self.trace: Tracer = NO_TRACE if options.trace is None else Trace(options.trace_iterations)
        self.events: list[dict[str, Any]] = []
        """The trace's events, once training is over."""
        self.communication: CommTimer | None = None
        """Where the exchange of gradients is timed."""
        self.ready = threading.Event()
        self._options = options
        self._connect = connect
        self._request = request
        self._names = names or [f"device {number}" for number in range(self.world_size)]
        self._compared = -1
        """The iteration after which the parameters were compared last."""
        self._state: SolverState | None = None
        self._go = threading.Event()
        self._cancelled = False
        self._exchange: Reducer | None = None

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
        if self.world_size == 1:
            return
        assert self.solver is not None
        with self._waiting("the root's weights"):
            for array in (self.solver.net.parameters.data, *self.solver.history):
                self._connected.broadcast(array, root=0)
            self._drain()

    def on_iteration(self) -> None:
        assert self.solver is not None
        interval = self._options.check_replicas
        if interval and self.solver.iteration % interval == 0:
            self.solver.graph_runner.drain()
            self.on_snapshot()

    def on_snapshot(self) -> None:
        """Compare the parameters, so that a snapshot is that of all devices."""
        assert self.solver is not None
        if self.world_size == 1 or self._compared == self.solver.iteration:
            return
        check_replicas(self.solver.net, self.spec.shard.rank, self._names, self._sum_hashes)
        self._compared = self.solver.iteration

    def _sum_hashes(self, values: Any) -> Any:
        with self._waiting("the comparison of the parameters"):
            return self._connected.sum(values)

    def on_gradients_ready(self) -> None:
        if self.world_size == 1:
            return
        assert self.communication is not None
        assert self._exchange is not None
        with self.communication.exposed():
            _ = self._connected  # refuses once training was stopped
            self._exchange.finish()

    def capture_blocker(self) -> str | None:
        if self.world_size == 1 or self._captures:
            return None
        return "the devices exchange gradients through the host"

    @property
    def _captures(self) -> bool:
        """Whether what the devices exchange may be captured into a graph."""
        return self._communicator is not None and self._communicator.capturable

    def wait_for_device(self, wait: Callable[[], None]) -> None:
        if self.world_size == 1:
            wait()
            return
        assert self._exchange is not None
        with self.heartbeat.collective(self._exchange.describe), self.trace.span("waits", "the gradients' all-reduce"):
            self._drain(wait)

    def average_over_devices(self, arrays: Sequence[Array]) -> None:
        if self.world_size == 1:
            return
        with self._waiting("the average of running statistics"):
            for array in arrays:
                self._connected.all_reduce(array, average=True)
            self._drain()

    def sum_over_devices(self, values: Any) -> Any:
        if self.world_size == 1:
            return np.array(values, np.float64)
        with self._waiting("the sum of scores"):
            return self._connected.sum(np.asarray(values, np.float64))

    def min_over_devices(self, number: float, what: str) -> float:
        if self.world_size == 1:
            return number
        numbers = np.zeros(self.world_size)
        numbers[self.spec.shard.rank] = number
        with self._waiting(what):
            return float(self._connected.sum(numbers).min())

    def barrier(self) -> None:
        if self.world_size == 1:
            return
        with self._waiting("a barrier"):
            self._connected.barrier()

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
        self.solver = self._build(backend)
        with self.heartbeat.collective("the start of training"):
            self.ready.set()
            self._on_change()
            self._wait_for_go()
        if self._state is not None and not self.is_root:
            self.solver.adopt(self._state)
        with self.heartbeat.collective("the connection of the devices"):
            self._communicator = self._connect()
            self._place_gradients(self.solver)
        if self.world_size > 1:
            self.solver.net.context.all_reduce_sum = self._total
            self.solver.net.context.all_reduce_capturable = self._captures
            self._exchange = self._make_exchange(self.solver)
        if self._options.sync_bn and self.world_size > 1:
            self.solver.net.context.all_reduce_mean = self._average
        self.heartbeat.begin()
        self.solver.solve()
        # Nobody may leave while others still test or write the last snapshot.
        self.barrier()
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
        if self.world_size > 1 and self.communication is not None:
            solver.performance.communication, solver.performance.exposed = self.communication.totals()
        self.events = self.trace.events(self.spec.shard.rank, self.spec.full_name)

    def _place_gradients(self, solver: Solver) -> None:
        """Let the communicator allocate the gradients, for example in memory that ranks share."""
        parameters = solver.net.parameters
        memory = self._connected.allocate_gradients(parameters.size)
        if memory is not None:
            parameters.bind_gradients(memory)

    def _make_exchange(self, solver: Solver) -> Reducer:
        """As the prototxts want it: `layer_wise_reduce` (BVLC) and `reduce_buckets` (NVIDIA).

        Where nobody says whether to overlap, that depends on whether it is worth it.
        """
        assert self.communication is not None
        overlap = self._connected.overlaps
        if solver.param.HasField("layer_wise_reduce"):
            overlap = solver.param.layer_wise_reduce
        buckets = bucket_count(solver.net.param) if overlap else 1
        schedule = solver.net.schedule
        cut = any(n.need_backward and blocker for n, blocker in zip(schedule, capture_blockers(schedule), strict=True))
        if cut and solver.backend.captures:
            buckets = 1  # what is begun within a graph must end within it, and here there are several
        exchange = Reducer(
            solver.net,
            self._connected,
            buckets,
            self._may_begin,
            self.communication,
            self._waiting,
            self.trace,
        )
        if exchange.overlaps and self.is_root:
            logger.info("gradients are exchanged in %d parts during the backward pass", exchange.parts)
        return exchange

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
            callback=self,
            request=self._request,
            keep_going=options.keep_going,
            engine=options.engine,
            trace=self.trace,
            guard=options.compression != "none" and self.world_size > 1,
            max_skipped=options.max_skipped,
            timeout=options.timeout + _DATA_SECONDS,
        )
        self.solver = solver
        self.communication = CommTimer(backend)
        solver.clock.on_start = self.communication.reset
        if backend.asynchronous:
            self.trace.watch_device(backend.record_timed_event, backend.synchronize)
        if self.is_root:
            self._read_start(solver)
        return solver

    def _read_start(self, solver: Solver) -> None:
        """Restore or load weights; only on the root, since the others may have no such files."""
        if self._options.snapshot is not None:
            solver.restore(self._options.snapshot)
        else:
            solver.load_weights(self._options.weights)

    def _release(self) -> None:
        """Close the solver: its graphs have captured the communicator's calls."""
        if self.solver is not None:
            self.solver.close()

    def _iteration(self) -> int:
        return self.solver.iteration if self.solver is not None else 0
