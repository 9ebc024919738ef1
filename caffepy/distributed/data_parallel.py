"""A solver that trains together with those of other processes, over the collectives that `caffepy train` uses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np

from caffepy.data.schedule import Shard
from caffepy.distributed.default import get_group
from caffepy.distributed.group import ProcessGroup
from caffepy.errors import UserError
from caffepy.parallel.communicators.communicator import Communicator
from caffepy.parallel.exchange import SolverExchange
from caffepy.parallel.factory import connect_alone
from caffepy.solvers import Solver


class DataParallel:
    """Lets a solver train with those of the group's other processes, one device each.

    Each takes its own part of the data; `batch_size` is a process's. Gradients are averaged in buckets
    (`reduce_buckets`) while the backward pass goes on. Rank 0's parameters, seed and history become those of all; it
    alone writes snapshots and the log. All processes make it, and call the solver's methods, at the same points.

    Example:
        >>> import caffepy
        >>> from caffepy import distributed
        >>> def work(path):
        ...     solver = caffepy.create_solver(caffepy.read_solver(path), caffepy.create_backend())
        ...     distributed.DataParallel(solver)
        ...     solver.solve()

    Args:
        solver: new or restored, on the CPU for a group over MPI or TCP, on a GPU for one over NCCL.
        group: None: the default group.
        sync_bn: BatchNorm's statistics are those of all batches together.

    Raises:
        UserError: the group's backend cannot carry the solver's gradients, or the solvers are not of one net and
            iteration.
        PeerError: another process failed, left or did not come in time.
    """

    def __init__(self, solver: Solver, group: ProcessGroup | None = None, *, sync_bn: bool = False) -> None:
        self.solver = solver
        self.group = group or get_group()
        self.rank, self.world_size = self.group.rank, self.group.size
        names = [self.group.name_of(rank) for rank in range(self.world_size)]
        self._exchange = SolverExchange(self.rank, names, self._mark)
        if self.world_size == 1:
            return
        if solver.callback.world_size > 1:
            raise UserError("this solver trains with other devices already; give DataParallel one that is alone")
        communicator = self._choose(solver)
        with solver.backend.activate():
            seed = self._compare(solver, communicator, names)
            solver.join(self._exchange, Shard(self.rank, self.world_size), seed)
            self._exchange.connect(solver, communicator, sync_bn)
        self.group.releases.append(self.release)

    def release(self) -> None:
        """Free the graphs that hold the group's collectives; called before the group is destroyed."""
        self._exchange.cancel()
        with self.solver.backend.activate():
            self.solver.graph_runner.drop()

    def _mark(self, what: str | Callable[[], str]) -> AbstractContextManager[None]:
        return self.group.bounded(what if isinstance(what, str) else what())

    def _choose(self, solver: Solver) -> Communicator:
        """The group's communicator, which must carry the solver's arrays."""
        on_gpu = solver.backend.asynchronous
        if on_gpu != (self.group.communicator.memory == "gpu"):
            wanted = "nccl" if on_gpu else "mpi' or 'tcp"
            device = "a GPU" if on_gpu else "the CPU"
            raise UserError(
                f"the solver is on {device} and the group's backend is '{self.group.backend}': take '{wanted}'"
            )
        return gradient_communicator(self.group)

    def _compare(self, solver: Solver, communicator: Communicator, names: list[str]) -> int:
        """Refuse solvers that cannot train together; rank 0's random seed."""
        rows = np.zeros((self.world_size, 4))
        rows[self.rank] = solver.net.parameters.size, solver.param.max_iter, solver.iteration, solver.param.random_seed
        with self.group.bounded("the comparison of the solvers"):
            rows = communicator.sum(rows)
        for number, field in enumerate(("number of parameters", "max_iter", "iteration")):
            differing = np.flatnonzero(rows[:, number] != rows[0, number])
            if len(differing):
                other = int(differing[0])
                raise UserError(
                    f"{field} is {rows[0, number]:.0f} on {names[0]} and {rows[other, number]:.0f} on {names[other]}; "
                    "give all processes the same solver, net and snapshot"
                )
        return int(rows[0, 3])


def gradient_communicator(group: ProcessGroup) -> Communicator:
    """The group's communicator; one over host memory with all-reduces that begin during the backward pass."""
    communicator = group.communicator
    return communicator if communicator.asynchronous else connect_alone(communicator, group.timeout)
