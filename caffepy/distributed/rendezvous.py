"""Rendezvous of processes through MPI, an address, the environment or a file, and the control channel of MPI's ranks.

Rank 0 hosts the store. The result is a `Membership`: the group's members and their control channel.

The control channel tells what MPI and NCCL cannot: that a process has ended, whatever ended it (its kernel closes the
connection), what each device does, and the news of a failure.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from caffepy.distributed.processes.launcher import LOOPBACK, find_mpi_launcher, is_near, is_number, port_offset
from caffepy.distributed.processes.world import MpiWorld, World, create_mpi_world, machine_identity, own_addresses
from caffepy.distributed.store.client import Address, ControlClient
from caffepy.distributed.store.server import ControlServer, find_secret, join_store, listen
from caffepy.distributed.store.store import ControlChannel, LocalControlChannel, MemoryStore, lost_from_training
from caffepy.distributed.store.wire import DeviceStatus, Member, Value
from caffepy.errors import PeerError, UserError
from caffepy.utils.files import read_private

# -- the control channel of ranks of MPI ---------------------------------------------------------------

logger = logging.getLogger(__name__)

_CONNECT_SECONDS = 10.0


def connect_ranks(world: World, memory: MemoryStore, timeout: float) -> ControlChannel:
    """Rank 0 listens, where all ranks can reach it and no wider; MPI hands out addresses and secret.

    That is the loopback address where all ranks are on one machine, else the one that leads to other machines; where
    the machine has several of them all of its addresses, because the network of the other ranks is unknown. Called by
    all ranks.

    Raises:
        PeerError: rank 0 cannot be reached.
    """
    rank = world.rank
    member = Member(world.host, world.machines[rank], os.getpid())
    if rank == 0:
        # No wider than needed: on one machine nothing outside of it can reach the port.
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
        # Through MPI, which connects the ranks also where TCP to this port does not.
        cut_off = [rank for rank, connected in enumerate(world.all_gather(channel is not None)) if not connected]
        if cut_off and world.rank == 0:
            names = ", ".join(map(world.name, cut_off))
            logger.warning("no TCP connection from %s to %s: its sudden end would not be noticed", names, world.name(0))
    return channel or LocalControlChannel(MemoryStore(world.size), world.rank)


# -- rendezvous ----------------------------------------------------------------------------------------

_SILENT_SECONDS = 5.0
"""Seconds without a heartbeat after which a rank counts as stopped or disconnected."""


@dataclass
class Membership:
    """This process's part in a group.

    Args:
        rank: this process's rank.
        members: all processes, in the order of ranks.
        channel: the control channel.
        world: MPI's world, if MPI started the processes.
        world_ranks: the members' ranks in MPI's world; empty: all, in their order.
    """

    rank: int
    members: list[Member]
    channel: ControlChannel
    world: MpiWorld | None = None
    world_ranks: Sequence[int] = ()

    @property
    def size(self) -> int:
        """The number of processes."""
        return len(self.members)

    @property
    def local_rank(self) -> int:
        """This process's rank on its host."""
        return self._neighbours(self.rank)

    @property
    def local_size(self) -> int:
        """The number of processes on this host."""
        return self._neighbours(self.size)

    def name(self, rank: int) -> str:
        """Return a rank's name for messages."""
        return self.members[rank].name(rank)

    def find_departed(self, begun: int, waits_for: Sequence[int]) -> str:
        """Return the ranks that left before an operation; empty if none or unknown.

        Args:
            begun: the number of collectives that this rank has started.
            waits_for: the ranks that the operation waits for; empty: all.
        """
        try:
            statuses = self.channel.statuses()
        except PeerError:  # the monitor reports this
            return ""
        departed = [
            each.rank
            for each in statuses
            if each.left and (each.rank in waits_for or (not waits_for and each.collectives < begun))
        ]
        return ", ".join(f"{self.name(rank)}, which has left the group" for rank in departed)

    def find_stragglers(self, begun: int, what: str, waits_for: Sequence[int]) -> str:
        """Return the missing ranks of an operation with their state; empty if no rank is behind.

        Args:
            begun: the number of collectives that this rank has started.
            what: the operation, as in the heartbeat.
            waits_for: the ranks known to be missing.

        Raises:
            PeerError: rank 0, which stores the heartbeats, is gone.
        """
        known = {each.rank: each for each in self.channel.statuses()}
        others = [known.get(rank, DeviceStatus(rank)) for rank in range(self.size) if rank != self.rank]
        behind = [each for each in others if each.collectives < begun]
        missing = [each for each in others if each.rank in waits_for]
        # If one rank is behind, the others' pieces are delayed only because its piece comes before them.
        late = [each for each in missing if each in behind] or missing or behind
        late = late or [each for each in others if each.waiting not in ("", what)]
        return ", ".join(f"{self.name(each.rank)}, {_doing(each, begun)}" for each in late)

    def _neighbours(self, stop: int) -> int:
        """Return the number of ranks before `stop` on this host."""
        return [member.machine for member in self.members[:stop]].count(self.members[self.rank].machine)


def _doing(status: DeviceStatus, begun: int) -> str:
    if status.left:
        return "which has left the group"
    if status.silent > _SILENT_SECONDS:
        return f"which has sent no heartbeat for {status.silent:.0f} s"
    doing = f"waits in '{status.waiting}'" if status.waiting else "is not waiting"
    return f"which has started {status.collectives} of {begun} collectives and {doing}"


_MAX_BYTES = 1 << 16
"""The mode of the file of `file://`."""
ENVIRONMENT = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
"""The variables of ``env://``: rank 0's address and port, this process's rank and the number of processes."""


@dataclass(frozen=True)
class Call:
    """The arguments of `join`."""

    method: str
    rank: int | None
    size: int | None
    timeout: float
    environment: Mapping[str, str]

    def rank_and_size(self) -> tuple[int, int]:
        """Return rank and size: as given, else from RANK and WORLD_SIZE, else from the launcher.

        Raises:
            UserError: they are missing or invalid.
        """
        launcher = find_mpi_launcher(self.environment)
        rank = self._number("rank", self.rank, "RANK", None if launcher is None else launcher.rank)
        size = self._number("world_size", self.size, "WORLD_SIZE", None if launcher is None else launcher.size)
        if not 0 <= rank < size:
            raise UserError(f"rank {rank} of a world of {size}: ranks count from 0 to world_size - 1")
        return rank, size

    def _number(self, name: str, given: int | None, variable: str, launched: int | None) -> int:
        written = self.environment.get(variable)
        if given is not None or written is None:
            found = launched if given is None else given
            if found is None:
                raise UserError(f"{self.method} needs {name}: give init_process_group {name}=, or set {variable}")
            return found
        if not is_number(written):
            raise UserError(f"{variable} is '{written}'; it must be a number")
        return int(written)


def join(
    method: str | None,
    rank: int | None = None,
    size: int | None = None,
    timeout: float = 300.0,
    environment: Mapping[str, str] = os.environ,
) -> Membership:
    """Join the group's other processes.

    Args:
        method: ``mpi://``, ``env://``, ``tcp://host:port`` or ``file:///path``. None: ``env://`` if MASTER_ADDR and
            MASTER_PORT are set and rank and size are known, else ``mpi://``, a group of one without a launcher.
            ``env://`` without these two variables is ``mpi://`` if MPI's launcher started several processes.
        rank: this process's rank; None: from the environment or the launcher.
        size: the number of processes; None: likewise.
        timeout: longest wait in seconds.
        environment: environment variables.

    Raises:
        UserError: rank or size is unknown, or the address is not rank 0's.
        PeerError: not all processes joined in time.
    """
    launcher = find_mpi_launcher(environment)
    addressed = all(name in environment for name in ENVIRONMENT[:2])
    if method is None:
        known = (rank is not None or "RANK" in environment) and (size is not None or "WORLD_SIZE" in environment)
        method = "env://" if addressed and known else "mpi://"
    if method == "env://" and not addressed and launcher is not None and launcher.size != 1:
        method = "mpi://"
    ways = {"mpi": _join_mpi, "env": _join_address, "tcp": _join_address, "file": _join_file}
    scheme, separator, _ = method.partition("://")
    if not separator or scheme not in ways:
        raise UserError(f"init_method '{method}' is none of mpi://, env://, tcp://host:port and file:///path")
    return ways[scheme](Call(method, rank, size, timeout, environment))


def _join_mpi(call: Call) -> Membership:
    world = create_mpi_world()
    for name, given, found in (("rank", call.rank, world.rank), ("world_size", call.size, world.size)):
        if given not in (None, found):
            raise UserError(
                f"{name} is {given}, but MPI says {found}: leave it out, set {' and '.join(ENVIRONMENT[:2])}, or name "
                "another init_method"
            )
    deadline = time.monotonic() + call.timeout

    def check_deadline() -> None:
        if time.monotonic() > deadline:
            raise PeerError(f"init_process_group at {call.method}: has waited {call.timeout:g} s for MPI's other ranks")

    # MPI's collectives have no timeout: the world asks this function while it waits.
    world.watch(check_deadline)
    membership = _join(
        call, world.rank, world.size, lambda own: connect_ranks(world, MemoryStore(world.size), call.timeout)
    )
    world.watch(lambda: None)
    membership.world = world if isinstance(world, MpiWorld) and world.size > 1 else None
    return membership


def _join_address(call: Call) -> Membership:
    host, port = _address(call)
    if not _is_host(host) or not is_number(port) or not 0 < int(port) < 65536:
        raise UserError(f"'{host}:{port}' is not an address: {call.method} needs rank 0's host and a free port there")
    rank, size = call.rank_and_size()
    secret = find_secret(call.environment, call.method, f"{host}:{port}", warns=rank == 0 and size > 1)

    def connect(own: Member) -> ControlChannel:
        if rank == 0:
            near = call.method.startswith("tcp://") or is_near(call.environment)
            return listen(MemoryStore(size), own, (host, int(port)), secret, near)
        return ControlClient(lambda: ([(host, int(port))], secret), rank, size, own, call.timeout)

    return _join(call, rank, size, connect)


def _address(call: Call) -> tuple[str, str]:
    """Return rank 0's host and port, from the environment or the method's URL."""
    if call.method.startswith("env://"):
        absent = [name for name in ENVIRONMENT[:2] if name not in call.environment]
        if absent:
            names = " and ".join(absent)
            raise UserError(f"env:// needs {names} in the environment: rank 0's address, a free port there")
        port = call.environment["MASTER_PORT"]
        own = str(int(port) + port_offset(call.environment)) if port.isdecimal() and len(port) < 6 else port
        return call.environment["MASTER_ADDR"], own
    host, _, port = call.method.removeprefix("tcp://").partition("/")[0].rpartition(":")
    return host.strip("[]"), port


def _is_host(text: str) -> bool:
    """Return whether a name has valid host name syntax."""
    try:
        return bool(text) and "\0" not in text and bool(text.encode("idna"))
    except UnicodeError:
        return False


def _join_file(call: Call) -> Membership:
    try:
        path = Path(unquote(urlsplit(call.method).path))
    except ValueError as error:
        raise UserError(f"init_method '{call.method}' is not a URL ({error}); give file:///path") from error
    if not path.is_absolute() or "\0" in str(path):
        raise UserError(f"init_method '{call.method}' needs an absolute path: file:///path")
    rank, size = call.rank_and_size()

    def connect(own: Member) -> ControlChannel:
        if rank != 0:
            return ControlClient(lambda: _read(path), rank, size, own, call.timeout)
        secret = secrets.token_hex()
        server = ControlServer(MemoryStore(size), own, ("", 0), secret)
        try:
            _write(path, [(host, server.port) for host in (*own_addresses(), LOOPBACK)], secret)
        except UserError:
            server.close()
            raise
        return server

    try:
        return _join(call, rank, size, connect)
    finally:
        if rank == 0 and size > 1:
            with suppress(OSError):
                # The file holds the secret, and a later run must not find this run's address.
                path.unlink()


def _join(call: Call, rank: int, size: int, connect: Callable[[Member], ControlChannel]) -> Membership:
    """Join the store through the channel of `connect` and wait for all ranks. A single rank needs no store."""
    own = Member(socket.gethostname(), machine_identity(), os.getpid())
    if size == 1:
        return Membership(0, [own], LocalControlChannel(MemoryStore(1), 0))
    where = f"init_process_group at {call.method}"
    members, channel = join_store(rank, own, lambda: connect(own), call.timeout, where)
    return Membership(rank, members, channel)


def join_subgroup(parent: Membership, ranks: Sequence[int], number: int, timeout: float) -> Membership:
    """Join some ranks of a group, of which this rank is one, through the group's store.

    Args:
        parent: the group's membership.
        ranks: the members of the new group, in the order of their new ranks.
        number: distinguishes the groups made of `parent`, the same on all ranks.
        timeout: longest wait in seconds.

    Raises:
        PeerError: not all members joined in time.
    """
    rank, own = ranks.index(parent.rank), parent.members[parent.rank]
    if len(ranks) == 1:
        return Membership(0, [own], LocalControlChannel(MemoryStore(1), 0), parent.world, ranks)
    on_one_machine = len({parent.members[member].machine for member in ranks}) == 1

    def connect() -> ControlChannel:
        key = f"group/{number}/{ranks[0]}"
        if rank == 0:
            secret = secrets.token_hex()
            server = ControlServer(MemoryStore(len(ranks)), own, (LOOPBACK if on_one_machine else "", 0), secret)
            hosts = [LOOPBACK] if on_one_machine else [*own_addresses(), LOOPBACK]
            # Read once by each other member, and gone then.
            parent.channel.put(key, _pack_address([(host, server.port) for host in hosts], secret), len(ranks) - 1)
            return server
        packed = parent.channel.take(key, timeout, ranks[0])
        if packed is None:
            raise PeerError(f"has waited {timeout:g} s for {parent.name(ranks[0])} to call new_group")
        return ControlClient(lambda: _unpack_address(packed), rank, len(ranks), own, timeout)

    members, channel = join_store(rank, own, connect, timeout, "new_group")
    return Membership(rank, members, channel, parent.world, ranks)


def _write(path: Path, addresses: Sequence[Address], secret: str) -> None:
    """Write the store's address to the rendezvous file, atomically and readable only by this user."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        # Created for this user alone: permissions that are set afterwards would leave a moment in which others can read
        # the secret. O_EXCL follows no link that somebody has put there.
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(_pack_address(addresses, secret))
        # A reader sees the whole file or none: the name appears only when it is complete.
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        raise UserError(f"rank 0 cannot write {path}: {error}") from error


def _read(path: Path) -> tuple[list[Address], str]:
    """Return the address and secret that `_write` wrote."""
    try:
        # Another user could otherwise put a file there, with an address of their own.
        return _unpack_address(read_private(path, _MAX_BYTES))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise OSError(f"{path} does not hold an address: {error}") from error


def _pack_address(addresses: Sequence[Address], secret: str) -> bytes:
    return json.dumps({"addresses": addresses, "secret": secret}).encode()


def _unpack_address(packed: Value) -> tuple[list[Address], str]:
    found = json.loads(packed)
    return [(str(host), int(port)) for host, port in found["addresses"]], str(found["secret"])
