"""Which world this process belongs to. MPI is loaded only where its launcher started several processes."""

from __future__ import annotations

from typing import NoReturn

from caffepy.distributed.processes.launcher import find_launcher, find_mpi_launcher
from caffepy.distributed.processes.world import SingleProcess, World
from caffepy.errors import CaffepyError


def create_world() -> World:
    """The world that this process belongs to.

    Raises:
        MissingExtraError: MPI's launcher started several processes and there is no mpi4py or no MPI library.
        UserError: the launcher belongs to another MPI than mpi4py, or rank 0's address cannot be used.
        PeerError: without MPI, not all ranks came in time.
    """
    launcher = find_launcher()
    if launcher is not None and launcher.store is not None:
        from caffepy.distributed.processes.store_world import StoreWorld

        return StoreWorld(launcher.rank, launcher.store)
    return create_mpi_world()


def raise_together(error: CaffepyError) -> NoReturn:
    """Raise an error that this rank has met before it joined the others, so that one of them prints it.

    Ranks that have met none hear of it where they first agree, in `P2PManager`.

    Raises:
        CaffepyError: the error, on the root, with the rank that has met it; else SystemExit, as `World.raise_on_all`.
    """
    try:
        world = create_world()
    except CaffepyError:  # there is no MPI to agree by
        raise error from None
    with world:
        world.raise_on_all(error)
    raise error


def create_mpi_world() -> World:
    """The world of MPI's processes, alone where no launcher of MPI's started this one; errors as `create_world`."""
    launcher = find_mpi_launcher()
    if launcher is None or launcher.size == 1:
        return SingleProcess()
    from caffepy.distributed.processes.mpi_world import join_mpi

    return join_mpi(launcher)
