"""How the ranks of MPI connect their control channel, which tells what MPI and NCCL cannot: that a process has ended,
whatever ended it (its kernel closes the connection), what each device does, and the news of a failure.
"""

from __future__ import annotations

import logging
import os
import secrets

from caffepy.distributed.processes.world import World, own_addresses
from caffepy.distributed.store.client import Address, ControlClient
from caffepy.distributed.store.records import Member
from caffepy.distributed.store.server import ControlServer
from caffepy.distributed.store.store import ControlChannel, MemoryStore, RankStore, lost_from_training
from caffepy.errors import PeerError

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
_CONNECT_SECONDS = 10.0


def connect_ranks(world: World, memory: MemoryStore, timeout: float) -> ControlChannel:
    """Rank 0 listens, where all ranks can reach it and no wider; MPI hands out addresses and secret.

    That is the loopback address where all ranks are on one machine, else the one that leads to other machines; where
    the machine has several of them all of its addresses, because the network of the other ranks is unknown. Called by
    all ranks.

    Args:
        world: the processes.
        memory: on rank 0, the store.
        timeout: longest wait for rank 0.

    Raises:
        PeerError: rank 0 cannot be reached.
    """
    rank = world.rank
    member = Member(world.host, world.machines[rank], os.getpid())
    if rank == 0:
        hosts = (own_addresses() if world.several_hosts else []) or [LOOPBACK]
        secret = secrets.token_hex()
        server = ControlServer(memory, member, (hosts[0] if len(hosts) == 1 else "", 0), secret)
        world.broadcast(([(host, server.port) for host in hosts], secret))
        return server
    found: tuple[list[Address], str] = world.broadcast(([], ""))
    return ControlClient(lambda: found, rank, world.size, member, timeout)


def connect_training(world: World) -> ControlChannel:
    """The control channel of training; called by all ranks.

    A firewall between the hosts may forbid it: then training goes on without, and the log says so.
    """
    channel: ControlChannel | None = None
    if world.size > 1:
        try:
            channel = connect_ranks(world, MemoryStore(world.size, lost_from_training), _CONNECT_SECONDS)
        except PeerError as error:
            logger.debug("no control channel to %s: %s", world.name(0), error)
        cut_off = [rank for rank, connected in enumerate(world.all_gather(channel is not None)) if not connected]
        if cut_off and world.rank == 0:
            names = ", ".join(map(world.name, cut_off))
            logger.warning("no TCP connection from %s to %s: its sudden end would not be noticed", names, world.name(0))
    return channel or RankStore(MemoryStore(world.size), world.rank)
