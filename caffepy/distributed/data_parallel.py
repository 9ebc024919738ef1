"""Data-parallel training of a script's solver, with the collectives of `caffepy train`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np

from caffepy.data.sharding import Shard
from caffepy.distributed.communicators.communicator import Communicator
from caffepy.distributed.connect import connect_alone
from caffepy.distributed.default import get_group
from caffepy.distributed.gradient_sync import GradientSync, SynchronisedSolver
from caffepy.distributed.group import ProcessGroup
from caffepy.errors import UserError


class DistributedDataParallel:
    """Connects a solver with the solvers of the group's other processes, one device each.

    Each process reads its own shard of the data; `batch_size` is per process. Gradients are averaged in buckets
    (`reduce_buckets`) during the backward pass. Rank 0's parameters, seed and history are broadcast; only rank 0 writes
    snapshots and the log. All processes must construct it and call the solver's methods at the same points.

    Example:
        >>> import caffepy
        >>> from caffepy import distributed
        >>> def work(rank, path):
        ...     distributed.init_process_group()
        ...     solver = caffepy.create_solver(caffepy.read_solver(path), caffepy.create_backend())
        ...     distributed.DistributedDataParallel(solver)
        ...     solver.solve()

    Args:
        module: a new or restored solver, on the CPU for a group over MPI or TCP, on a GPU for NCCL.
        device_ids: the solver's GPU, in a list; None: not checked. None on the CPU.
        output_device: likewise, as a number.
        process_group: the group; None: the default group.
        sync_bn: compute BatchNorm's statistics over the batches of all processes.

    Raises:
        UserError: `module` is no solver, its device is not that of `device_ids` or does not fit the group's backend,
            or nets or iterations of the solvers differ.
        PeerError: another process failed, left or did not join in time.
    """

    def __init__(
        self,
        module: SynchronisedSolver,
        device_ids: Sequence[int] | None = None,
        output_device: int | None = None,
        *,
        process_group: ProcessGroup | None = None,
        sync_bn: bool = False,
    ) -> None:
        if not callable(getattr(module, "step", None)):
            raise UserError(
                f"module is a {type(module).__name__}; give DistributedDataParallel a solver, which has the net"
            )
        solver = self.solver = module
        _check_devices(solver, device_ids, output_device)
        self.group = process_group or get_group()
        self.rank, self.world_size = self.group.rank, self.group.size
        names = [self.group.name_of(rank) for rank in range(self.world_size)]
        self._exchange = GradientSync(self.rank, names, self._mark)
        if self.world_size == 1:
            return
        if solver.world_size > 1:
            raise UserError("this solver already trains with other devices; give a single-device solver")
        communicator = self._choose(solver)
        with solver.backend.activate():
            seed = self._compare(solver, communicator, names)
            solver.join(self._exchange, Shard(self.rank, self.world_size), seed)
            self._exchange.connect(solver, communicator, sync_bn)
        self.group.releases.append(self.release)

    def release(self) -> None:
        """Free the graphs that contain the group's collectives. Called before the group is destroyed."""
        # Graphs that were captured hold NCCL's calls, and NCCL waits for them when the communicator is destroyed.
        self._exchange.cancel()
        with self.solver.backend.activate():
            self.solver.graph_executor.drop()

    def _mark(self, what: str | Callable[[], str]) -> AbstractContextManager[None]:
        return self.group.bounded(what if isinstance(what, str) else what())

    def _choose(self, solver: SynchronisedSolver) -> Communicator:
        """Return the group's communicator, after checking that it supports the solver's device."""
        on_gpu = solver.backend.asynchronous
        if on_gpu != (self.group.communicator.memory == "gpu"):
            wanted = "nccl" if on_gpu else "mpi' or 'tcp"
            device = "a GPU" if on_gpu else "the CPU"
            raise UserError(
                f"the solver is on {device} and the group's backend is '{self.group.backend}': use '{wanted}'"
            )
        return gradient_communicator(self.group)

    def _compare(self, solver: SynchronisedSolver, communicator: Communicator, names: list[str]) -> int:
        """Reject solvers whose nets or iterations differ; return rank 0's seed."""
        # A gather by a sum, which every backend has.
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


def _check_devices(solver: SynchronisedSolver, device_ids: Sequence[int] | None, output_device: int | None) -> None:
    """Reject devices that are not the solver's."""
    number = getattr(solver.backend, "device", None)
    output = None if output_device is None else [output_device]
    for name, given in (("device_ids", device_ids), ("output_device", output)):
        if given and (number is None or list(given) != [number]):
            own = "the CPU: leave it out" if number is None else f"GPU {number}: give that one"
            raise UserError(f"{name} is {given}, but the solver is on {own}")


def gradient_communicator(group: ProcessGroup) -> Communicator:
    """Return the group's communicator; over host memory, one whose all-reduces start during the backward pass."""
    communicator = group.communicator
    return communicator if communicator.asynchronous else connect_alone(communicator, group.timeout)
