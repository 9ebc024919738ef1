"""How a solver communicates with the other devices: the `SolverCallback` over a communicator.

`P2PSync`, which `caffepy train` makes for each device, and `caffepy.distributed.DataParallel` inherit it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from caffepy.backend import Array
from caffepy.errors import AbortedError
from caffepy.net.parameters import bucket_count
from caffepy.net.wiring import capture_blockers
from caffepy.parallel.agreement import check_replicas
from caffepy.parallel.communicators.communicator import Communicator
from caffepy.parallel.control.heartbeat import Heartbeat
from caffepy.parallel.reducer import Reducer
from caffepy.solvers.base import Solver
from caffepy.trace import NO_TRACE, Tracer

logger = logging.getLogger(__name__)


class SolverExchange:
    """A solver's `SolverCallback`; whoever inherits it says who is there and connects it."""

    rank: int
    """This device's number among all."""
    world_size: int
    is_root: bool
    heartbeat: Heartbeat
    solver: Solver | None = None
    trace: Tracer = NO_TRACE
    _names: Sequence[str]
    """What messages call each device."""
    _check_interval = 0
    """Iterations after which the parameters are compared; 0: at snapshots alone."""
    _compared = -1
    """The iteration after which they were compared last."""
    _cancelled = False
    _communicator: Communicator | None = None
    _reducer: Reducer | None = None

    def on_start(self) -> None:
        assert self.solver is not None
        with self._waiting("the root's weights"):
            for array in (self.solver.net.parameters.data, *self.solver.history):
                self._connected.broadcast(array, root=0)
            self._drain()
            self.solver.net.parameters.written()

    def on_clock_start(self) -> None:
        assert self._reducer is not None
        self._reducer.timer.reset()

    def on_iteration(self) -> None:
        assert self.solver is not None
        interval = self._check_interval
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
        rows[self.rank] = values
        return self.sum_over_devices(rows, what)

    def _average(self, array: Any) -> None:
        """All-reduce for sync-BN layers."""
        with self._waiting("BatchNorm's statistics"):
            self._connected.all_reduce(array, average=True)

    def _total(self, array: Any) -> None:
        """Sum of a loss layer's label count, by which the loss is divided, over all devices."""
        with self._waiting("the number of labels that are not ignored"):
            self._connected.all_reduce(array, average=False)
            if self._captures and self.solver is not None and not self.solver.backend.capturing:
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

    def _exchange_with_others(self, solver: Solver, sync_bn: bool) -> None:
        """Let layers and gradients reach the other devices, which are connected."""
        solver.net.connect_devices(self._total, self._average if sync_bn else None, self._captures)
        self._reducer = self._make_reducer(solver)

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
