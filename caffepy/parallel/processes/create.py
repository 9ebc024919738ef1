"""Which world this process belongs to. MPI is loaded only where a launcher started several processes."""

from __future__ import annotations

from caffepy.parallel.processes.launcher import find_launcher
from caffepy.parallel.processes.world import SingleProcess, World


def create_world() -> World:
    """The world that this process belongs to.

    Raises:
        MissingExtraError: a launcher started several processes and there is no mpi4py or no MPI library.
        UserError: the launcher belongs to another MPI than mpi4py.
    """
    launcher = find_launcher()
    if launcher is None or launcher.size == 1:
        return SingleProcess()
    from caffepy.parallel.processes.mpi_world import MpiWorld

    return MpiWorld(launcher)
