"""One device's part in training together: a solver thread, and the callback by which its solver meets the others."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from caffepy.awake import awake_seconds
from caffepy.backend import Array, Backend, create_backend
from caffepy.data.schedule import Shard
from caffepy.errors import AbortedError, PeerError
from caffepy.net.parameters import bucket_count
from caffepy.parallel.communicators.communicator import Communicator
from caffepy.parallel.communicators.local import PATIENCE
from caffepy.parallel.control.heartbeat import Heartbeat
from caffepy.parallel.gradients.comm_timer import CommTimer
from caffepy.parallel.gradients.reducer import Reducer
from caffepy.parallel.hardware.affinity import bind_near_gpu
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
"""How much longer than the watchdog's timeout a thread waits for its data: the watchdog names process and device."""
_LOOK_SECONDS = 1.0
"""How long a thread that is ready waits before it looks how long it has waited."""


@dataclass(frozen=True)
class Place:
    """Where a solver thread stands.

    Args:
        index: its number in this process.
        device: its GPU, or None for the CPU.
        label: what messages and the report call the device.
        threads: its CPU threads; None leaves it to the backend.
        shard: its part of the data; holds its number among all devices.
    """

    index: int
    device: int | None
    label: str
    threads: int | None
    shard: Shard

    @property
    def full_name(self) -> str:
        """The device as the trace calls it: ``rank 1 on host7: GPU 0``."""
        device = self.label if self.device is None else f"GPU {self.label}"
        return f"rank {self.shard.rank // self.shard.devices_per_rank} on {socket.gethostname()}: {device}"


class P2PSync:
    """A solver thread; its solver's `SolverCallback`.

    The thread builds backend and solver, says that it is `ready`, and trains once it was told to `go`.

    Args:
        place: which device this is.
        options: the run; `solver.random_seed` is set.
        connect: makes the thread's communicator; called in the thread, with the device current, after all devices are
            ready.
        request: what signals ask for.
        on_change: called in the thread when it is ready, has failed or has finished.
        names: what messages call each of all devices; by default their numbers.
    """

    def __init__(
        self,
        place: Place,
        options: TrainOptions,
        connect: Callable[[], Communicator],
        request: Callable[[], Action],
        on_change: Callable[[P2PSync], None],
        names: Sequence[str] = (),
    ) -> None:
        self.place = place
        self.is_root = place.shard.rank == 0
        self.world_size = place.shard.world_size
        self.heartbeat = Heartbeat(place.label, self._iteration, begun=False)
        self.solver: Solver | None = None
        self.error: BaseException | None = None
        self.trace: Tracer = NO_TRACE if options.trace is None else Trace(options.trace_iterations)
        self.events: list[dict[str, Any]] = []
        """The trace's events, once training is over."""
        self.communication: CommTimer | None = None
        """Where the exchange of gradients is timed."""
        self.ready = threading.Event()
        self.finished = threading.Event()
        self._options = options
        self._connect = connect
        self._request = request
        self._on_change = on_change
        self._names = names or [f"device {number}" for number in range(self.world_size)]
        self._compared = -1
        """The iteration after which the parameters were compared last."""
        self._state: SolverState | None = None
        self._go = threading.Event()
        self._cancelled = False
        self._communicator: Communicator | None = None
        self._exchange: Reducer | None = None
        self._backend: Backend | None = None
        self._thread = threading.Thread(target=self._run, name=f"solver {place.shard.rank}", daemon=True)

    # -- for the manager ----------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread (the seed documents' StartInternalThread)."""
        self._thread.start()

    def go(self, state: SolverState | None = None) -> None:
        """All devices are ready: train.

        Args:
            state: what the root has restored; None: nothing.
        """
        self._state = state
        self._go.set()

    def abort(self) -> None:
        """End all waits of the thread; callable from any thread."""
        self._cancelled = True
        self._go.set()
        if self._communicator is not None:
            self._communicator.abort()

    def join(self, seconds: float) -> bool:
        """Wait for the thread's end (WaitAll); whether it came."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def performance(self) -> Performance:
        """What the solver did, under the device's name."""
        assert self.solver is not None
        return replace(self.solver.performance, device=self.place.label)

    # -- for the solver: SolverCallback -------------------------------------------------------------

    def on_start(self) -> None:
        if self.world_size == 1:
            return
        assert self.solver is not None
        with self._waiting("the root's weights"):
            for array in (self.solver.net.parameters.data, *self.solver.history):
                self._connected.broadcast(array, root=0)
            self._settle()

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
        check_replicas(self.solver.net, self.place.shard.rank, self._names, self._sum_hashes)
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
            self._settle(wait)

    def average_over_devices(self, arrays: Sequence[Array]) -> None:
        if self.world_size == 1:
            return
        with self._waiting("the average of running statistics"):
            for array in arrays:
                self._connected.all_reduce(array, average=True)
            self._settle()

    def sum_over_devices(self, values: Any) -> Any:
        if self.world_size == 1:
            return np.array(values, np.float64)
        with self._waiting("the sum of scores"):
            return self._connected.sum(np.asarray(values, np.float64))

    def min_over_devices(self, number: float, what: str) -> float:
        if self.world_size == 1:
            return number
        numbers = np.zeros(self.world_size)
        numbers[self.place.shard.rank] = number
        with self._waiting(what):
            return float(self._connected.sum(numbers).min())

    def barrier(self) -> None:
        if self.world_size == 1:
            return
        with self._waiting("a barrier"):
            self._connected.barrier()

    def _average(self, array: Any) -> None:
        """What layers call whose statistics are those of all devices."""
        with self._waiting("BatchNorm's statistics"):
            self._connected.all_reduce(array, average=True)

    def _total(self, array: Any) -> None:
        """What losses call that are divided by a number of labels."""
        with self._waiting("the number of labels that are not ignored"):
            self._connected.all_reduce(array, average=False)
            if self._captures and self._backend is not None and not self._backend.capturing:
                # What follows may compile and allocate, which waits for the device, and so for the other devices.
                self._settle()

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        """Event an operation that waits for all devices, for the watchdog and in the trace."""
        with self.heartbeat.collective(what), self.trace.span("waits", what):
            yield

    @property
    def _connected(self) -> Communicator:
        if self._communicator is None or self._cancelled:
            raise AbortedError("training was stopped")
        return self._communicator

    def _settle(self, wait: Callable[[], None] | None = None) -> None:
        """Let the device finish: a thread that launches eagerly must not run ahead of its peers, or they deadlock."""
        assert self._communicator is not None
        self._communicator.wait_on_device(wait)

    # -- the thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._bind()
            math, engine = self._options.math, self._options.engine
            self._backend = create_backend(
                self.place.device, self.place.threads, math, engine.autotune, engine.deterministic
            )
            # Numbers that are not finite are counted or reported by training itself.
            with self._backend.activate(), np.errstate(all="ignore"):
                self._train(self._backend)
        except BaseException as error:
            self._fail(error)
        try:
            self._close()
        except BaseException as error:
            self._fail(error)
        self.finished.set()
        self._on_change(self)

    def _bind(self) -> None:
        """Stay near the GPU, before memory is allocated and further threads are started."""
        if self.place.device is not None:
            from caffepy.backend.cuda.device import device_properties

            bind_near_gpu(device_properties(self.place.device).pci_bus_id, self.place.label)

    def _fail(self, error: BaseException) -> None:
        """Tell the manager at once: what follows may have to be waited for."""
        self.error = self.error or error
        self.ready.set()
        self._on_change(self)

    def _train(self, backend: Backend) -> None:
        self.solver = self._build(backend)
        with self.heartbeat.collective("the start of training"):
            self.ready.set()
            self._on_change(self)
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
        while not self._go.wait(_LOOK_SECONDS):
            if awake_seconds() > end:
                raise PeerError(f"training has not begun for {seconds:.0f} s: other devices are not ready")
        if self._cancelled:
            raise AbortedError("training was stopped before it began")

    def _take_times(self, solver: Solver) -> None:
        """Look at the device's clock, which is gone with the backend."""
        if self.world_size > 1 and self.communication is not None:
            solver.performance.communication, solver.performance.exposed = self.communication.totals()
        self.events = self.trace.events(self.place.shard.rank, self.place.full_name)

    def _place_gradients(self, solver: Solver) -> None:
        """Where the communicator has them best, if it cares."""
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
        cut = any(node.need_backward and node.layer.capture_blocker() for node in solver.net.schedule)
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
            shard=self.place.shard,
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
        """What training starts from is read by the root alone: the others may have no such files."""
        if self._options.snapshot is not None:
            solver.restore(self._options.snapshot)
        else:
            solver.load_weights(self._options.weights)

    def _close(self) -> None:
        """Solver first: graphs that captured the communicator's calls must go before it."""
        if self.error is not None and self._communicator is not None:
            self._communicator.abort()
        if self.solver is not None:
            self.solver.close()
        if self._communicator is not None:
            self._communicator.close()
        if self._backend is not None:
            self._backend.close()

    def _iteration(self) -> int:
        return self.solver.iteration if self.solver is not None else 0
