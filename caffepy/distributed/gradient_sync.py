"""How a solver communicates with the other devices: the `SolverCallback` over a communicator.

`P2PSync`, which `caffepy train` makes for each device, and `caffepy.distributed`'s `DistributedDataParallel` have one.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from caffepy.backend import Array, Backend
from caffepy.data.sharding import Shard
from caffepy.distributed.communicators.communicator import Communicator
from caffepy.distributed.reducer import Reducer
from caffepy.errors import AbortedError, RunError
from caffepy.formats.proto.caffe_pb2 import SolverParameter
from caffepy.logs.trace import NO_TRACE, Tracer
from caffepy.net import Net
from caffepy.net.graph import capture_blockers
from caffepy.net.parameters import Parameter, bucket_count

logger = logging.getLogger(__name__)

Mark = Callable[["str | Callable[[], str]"], AbstractContextManager[None]]
"""Marks a `with` block that waits for all devices: what for, or what says how far it has come."""


class PendingGraphs(Protocol):
    """The captured iterations of a solver."""

    def drain(self) -> None:
        """Wait until the device has run all launched iterations."""

    def drop(self) -> None:
        """Free the graphs."""


class SynchronisedSolver(Protocol):
    """The parts of a solver that the synchronisation reads; `caffepy.training.solver.Solver` has them."""

    @property
    def net(self) -> Net: ...
    @property
    def param(self) -> SolverParameter: ...
    @property
    def backend(self) -> Backend: ...
    @property
    def iteration(self) -> int: ...
    @property
    def last_pass(self) -> bool: ...
    @property
    def history(self) -> Sequence[Array]: ...
    @property
    def replicated(self) -> Sequence[Array]: ...
    @property
    def graph_executor(self) -> PendingGraphs: ...
    @property
    def world_size(self) -> int: ...

    def join(self, callback: GradientSync, shard: Shard, random_seed: int) -> None:
        """Train with other devices from now on; called by all of them at the same point."""


@dataclass(frozen=True)
class _Connection:
    """What `GradientSync.connect` makes."""

    solver: SynchronisedSolver
    communicator: Communicator
    reducer: Reducer


class GradientSync:
    """A solver's `SolverCallback`; `connect` comes before the first call of one of its methods.

    Args:
        rank: this device's number among all.
        names: what messages call each device.
        mark: see `Mark`.
        check_interval: iterations after which the parameters are compared; 0: at snapshots alone.
        trace: shows the waits.
    """

    def __init__(
        self, rank: int, names: Sequence[str], mark: Mark, check_interval: int = 0, trace: Tracer = NO_TRACE
    ) -> None:
        self.is_root = rank == 0
        self.world_size = len(names)
        self._rank = rank
        self._names = names
        self._mark = mark
        self._check_interval = check_interval
        self._trace = trace
        self._compared = -1
        """The iteration after which the parameters were compared last."""
        self._cancelled = False
        self._connection: _Connection | None = None

    def connect(self, solver: SynchronisedSolver, communicator: Communicator, sync_bn: bool) -> None:
        """Let a solver's layers and gradients reach the other devices; called by all of them.

        Args:
            solver: calls this callback.
            communicator: connects the devices.
            sync_bn: BatchNorm's statistics are those of all devices' batches together.
        """
        parameters = solver.net.parameters
        memory = communicator.allocate_gradients(parameters.size)  # for example in memory that ranks share
        # Before layers use the gradients: they lie in the shared memory from the first pass on, and need no copy.
        if memory is not None:
            parameters.bind_gradients(memory)
        solver.net.connect_devices(self._total, self._average if sync_bn else None, communicator.capturable)
        self._connection = _Connection(solver, communicator, self._make_reducer(solver, communicator))

    def cancel(self) -> None:
        """Refuse further exchanges; callable from any thread."""
        self._cancelled = True

    def communication(self) -> tuple[float, float]:
        """Seconds from the start of each iteration's first all-reduce to the end of its last, and the exposed ones."""
        assert self._connection is not None
        return self._connection.reducer.timer.totals()

    def on_start(self) -> None:
        solver, communicator = self._connected.solver, self._connected.communicator
        with self._waiting("the root's weights"):
            for array in (solver.net.parameters.data, *solver.history, *solver.replicated):
                communicator.broadcast(array, root=0)
            communicator.wait_on_device(None)
            solver.net.parameters.written()

    def on_clock_start(self) -> None:
        self._connected.reducer.timer.reset()

    def on_iteration(self) -> None:
        interval = self._check_interval
        if interval and (solver := self._connected.solver).iteration % interval == 0:
            # The parameters are compared on the host: iterations that were launched must have run.
            solver.graph_executor.drain()
            self.on_snapshot()

    def on_snapshot(self) -> None:
        """Compare the parameters, so that a snapshot is that of all devices."""
        solver = self._connected.solver
        # An interval and a snapshot may fall on one iteration; all devices skip the second comparison together.
        if self._compared == solver.iteration:
            return
        gather = partial(self._gather, what="the comparison of the parameters")
        check_replicas(solver.net, self._names, gather)
        self._compared = solver.iteration

    def on_gradients_ready(self) -> None:
        self._connected.reducer.finish()

    def capture_blocker(self) -> str | None:
        captures = self._connected.communicator.capturable
        return None if captures else "the devices exchange gradients through the host"

    def wait_for_device(self, wait: Callable[[], None]) -> None:
        assert self._connection is not None  # it may have been cancelled: then the communicator ends the wait
        communicator, reducer = self._connection.communicator, self._connection.reducer
        with self._mark(reducer.describe), self._trace.span("waits", "the gradients' all-reduce"):
            communicator.wait_on_device(wait)

    def average_over_devices(self, arrays: Sequence[Array]) -> None:
        with self._waiting("the average of running statistics"):
            for array in arrays:
                self._connected.communicator.all_reduce(array, average=True)
            self._connected.communicator.wait_on_device(None)

    def sum_over_devices(self, values: Any, what: str = "the sum of scores") -> Any:
        with self._waiting(what):
            return self._connected.communicator.sum(np.asarray(values, np.float64))

    def min_over_devices(self, number: float, what: str) -> float:
        return float(self._gather([number], what).min())

    def barrier(self) -> None:
        with self._waiting("a barrier"):
            self._connected.communicator.barrier()

    def _gather(self, values: Sequence[float], what: str) -> Any:
        """Numbers of all devices, one row for each."""
        rows = np.zeros((self.world_size, len(values)))
        # A gather by a sum: each device fills its row, and adding zeros changes no bit.
        rows[self._rank] = values
        return self.sum_over_devices(rows, what)

    def _average(self, array: Any) -> None:
        """All-reduce for sync-BN layers."""
        with self._waiting("BatchNorm's statistics"):
            self._connected.communicator.all_reduce(array, average=True)

    def _total(self, array: Any) -> None:
        """Sum of a loss layer's label count, by which the loss is divided, over all devices."""
        with self._waiting("the number of labels that are not ignored"):
            solver, communicator = self._connected.solver, self._connected.communicator
            communicator.all_reduce(array, average=False)
            if communicator.capturable and not solver.backend.capturing:
                # What follows may compile and allocate, which waits for the device, and so for the other devices.
                communicator.wait_on_device(None)

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        """Mark a collective, for the watchdog and in the trace."""
        with self._mark(what), self._trace.span("waits", what):
            yield

    @property
    def _connected(self) -> _Connection:
        if self._connection is None or self._cancelled:
            raise AbortedError("training was stopped")
        return self._connection

    def _make_reducer(self, solver: SynchronisedSolver, communicator: Communicator) -> Reducer:
        """As the prototxts want it: `layer_wise_reduce` (BVLC) and `reduce_buckets` (NVIDIA)."""
        # Without an option the overlap depends on its estimated gain.
        overlap = communicator.overlaps
        if solver.param.HasField("layer_wise_reduce"):
            overlap = solver.param.layer_wise_reduce
        buckets = bucket_count(solver.net.param) if overlap else 1
        schedule = solver.net.schedule
        cut = any(n.need_backward and blocker for n, blocker in zip(schedule, capture_blockers(schedule), strict=True))
        if cut and solver.backend.captures:
            buckets = 1  # what is begun within a graph must end within it, and here there are several
        may_begin = partial(_may_begin, solver)
        reducer = Reducer(solver.net, communicator, buckets, may_begin, self._waiting, self._trace)
        if reducer.overlaps and self.is_root:
            logger.info("gradients are exchanged in %d parts during the backward pass", reducer.parts)
        return reducer


def _may_begin(solver: SynchronisedSolver) -> bool:
    """Whether exchanges may begin in the present backward pass."""
    # On a device that works behind the host only while that is captured: an eager pass may compile, tune and allocate,
    # which waits for the whole device, and so for an exchange whose other end may be waiting just so.
    return solver.last_pass and (solver.backend.capturing or not solver.backend.asynchronous)


_HASH_BYTES = 6
"""Hashes travel as float64 numbers, which hold whole numbers of 53 bits."""
_MAX_NAMES = 4

Gather = Callable[[Sequence[int]], NDArray[np.float64]]
"""Makes a row for each device of the numbers that it is called with by all of them."""


def check_replicas(net: Net, names: Sequence[str], gather: Gather) -> None:
    """Compare the parameters of all devices; called by all of them, with no work pending on the device.

    BatchNorm's running statistics are not compared: they differ from device to device until they are averaged.

    Args:
        net: this device's.
        names: what messages call each device.
        gather: collects the devices' hashes.

    Raises:
        RunError: on all devices, if a device's parameters differ from the root's; names the first layer that differs.
    """
    parameters = _replicated(net)
    flat = net.backend.to_host(net.parameters.data)
    own = [_hash(flat[parameter.start : parameter.stop]) for parameter in parameters]
    # One number a device in the usual case; the numbers of all parameters travel only if these differ.
    whole = gather([_hash(np.array(own, np.uint64))])
    if (whole == whole[0]).all():
        return
    raise RunError(_describe(parameters, gather(own), names))


def _replicated(net: Net) -> list[Parameter]:
    """Parameters that are equal on all devices."""
    return [p for p in net.parameters.parameters if p.index not in p.layer.running_statistics()]


def _hash(values: NDArray[Any]) -> int:
    if values.dtype.kind == "f" and np.isnan(values).any():  # NaNs have many bit patterns
        values = np.where(np.isnan(values), np.float32(np.nan), values)
    content = np.ascontiguousarray(values).data.cast("B")
    return int.from_bytes(hashlib.blake2b(content, digest_size=_HASH_BYTES).digest(), "little")


def _describe(parameters: Sequence[Parameter], hashes: NDArray[np.float64], names: Sequence[str]) -> str:
    """The sentence about hashes that differ."""
    differs = hashes != hashes[0]
    others = [names[int(device)] for device in np.flatnonzero(differs.any(axis=1))]
    first = parameters[int(np.flatnonzero(differs.any(axis=0))[0])]
    listed = ", ".join(others[:_MAX_NAMES]) + (f" and {len(others) - _MAX_NAMES} more" * (len(others) > _MAX_NAMES))
    return (
        f"{listed} no longer {'has' if len(others) == 1 else 'have'} the parameters of {names[0]}: parameter "
        f"{first.index} of layer '{first.layer.name}' is the first of {int(differs.any(axis=0).sum())} that differ; go "
        "on from a snapshot before this iteration, and look at the memory of these machines if it happens again"
    )
