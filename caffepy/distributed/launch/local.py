"""Ranks without MPI: the processes of this machine, with the variables that torchrun and Kubernetes' operators set."""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from caffepy.distributed.launch.mpirun import Job
from caffepy.errors import ConfigError

RANK = "RANK"
SECRET = "CAFFEPY_JOB_SECRET"
_PORT = 29500
"""torchrun's."""
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks join rank 0.

    Args:
        nodes: how many machines call `caffepy launch`.
        node_rank: the number of this one among them.
        address: rank 0's machine; None: this one, where there is no other.
        port: of rank 0; None: a free one, or 29500 where there are several machines.
    """

    nodes: int = 1
    node_rank: int = 0
    address: str | None = None
    port: int | None = None

    def complete(self) -> Rendezvous:
        """The same with address and port.

        Raises:
            ConfigError: no such node, several nodes without an address, a port that is none.
        """
        if not 0 <= self.node_rank < self.nodes:
            raise ConfigError(f"--node-rank {self.node_rank}: with --nnodes {self.nodes} it is 0 to {self.nodes - 1}")
        if self.nodes > 1 and self.address is None:
            raise ConfigError(f"--nnodes {self.nodes}: where is rank 0? Say it with --master-addr, alike on all nodes")
        if self.port is not None and not 0 < self.port < 1 << 16:
            raise ConfigError(f"--master-port {self.port} is no port: take one from 1 to 65535")
        port = self.port or (_PORT if self.nodes > 1 else _free_port())
        return replace(self, address=self.address or _LOOPBACK, port=port)


def local_rank_name(program: Sequence[str]) -> str | None:
    """How a Python script asks for its local rank, if it is written for torch.distributed's launchers.

    Returns:
        ``LOCAL_RANK``, torchrun's variable; ``--local_rank`` or ``--local-rank``, which torch.distributed.launch
        passes to a script; None: the program is no script, or asks for neither.
    """
    script = next((word for word in program[1:2] if word.endswith(".py")), None)
    try:
        text = "" if script is None else Path(script).read_text(errors="replace")
    except OSError:  # the ranks report it
        return None
    found = re.findall(r"""["'](--local[_-]rank|LOCAL_RANK)["']""", text)
    return max(found, key=lambda name: name.startswith("-"), default=None)


def local_commands(
    job: Job, rendezvous: Rendezvous, option: str | None = None
) -> list[tuple[Sequence[str], dict[str, str]]]:
    """The command line of each process of this machine, and its variables.

    Args:
        job: the program; Python and a script, if there is an option.
        rendezvous: complete.
        option: passes the local rank to the script.
    """
    shared = {
        "WORLD_SIZE": str(rendezvous.nodes * job.per_node),
        "LOCAL_WORLD_SIZE": str(job.per_node),
        "MASTER_ADDR": str(rendezvous.address),
        "MASTER_PORT": str(rendezvous.port),
    }
    first = rendezvous.node_rank * job.per_node
    commands: list[tuple[Sequence[str], dict[str, str]]] = []
    for local in range(job.per_node):
        told = [] if option is None else [f"{option}={local}"]
        variables = {RANK: str(first + local), "LOCAL_RANK": str(local), **shared}
        commands.append(([*job.program[:2], *told, *job.program[2:]], variables))
    return commands


def secret_for(rendezvous: Rendezvous, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variable with a new secret, where this machine is the only one and the environment has none; else nothing."""
    made = rendezvous.nodes == 1 and SECRET not in environment
    return {SECRET: secrets.token_hex()} if made else {}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        return int(probe.getsockname()[1])
