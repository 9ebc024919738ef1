"""How ranks find each other at an address of rank 0, where its server listens: all join the store."""

from __future__ import annotations

import errno
import json
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from caffepy.distributed.store.client import Address
from caffepy.distributed.store.records import Member
from caffepy.distributed.store.server import ControlServer
from caffepy.distributed.store.store import MEMBERS, MISSING, ControlChannel, MemoryStore
from caffepy.distributed.store.wire import decode_list
from caffepy.errors import CaffepyError, PeerError, UserError

logger = logging.getLogger(__name__)

SECRET = "CAFFEPY_JOB_SECRET"
"""The environment's variable with the secret of a job whose ranks join at an address."""
_FAILURE_SECONDS = 0.2
"""How long a rank that could not join waits for another rank's failure."""


def find_secret(environment: Mapping[str, str], method: str, address: str, warns: bool) -> str:
    """The job's secret; empty where there is none, with a warning if `warns`."""
    secret = environment.get(SECRET, "")
    if not secret and warns:
        text = "%s without a secret: any process that reaches %s can join; set %s to the same random text on all ranks"
        logger.warning(text, method, address, SECRET)
    return secret


def listen(memory: MemoryStore, own: Member, address: Address, secret: str, near: bool = True) -> ControlServer:
    """Rank 0's server at the address that all ranks have.

    A host's own name often leads to a loopback address on the host itself, so other names mean all addresses.

    Args:
        memory: the store.
        own: this process.
        address: as the ranks have it.
        secret: the job's.
        near: ``localhost`` means the loopback address; else all addresses, because other ranks have another name.

    Raises:
        UserError: it is in use, or none of this machine's.
    """
    host, port = address
    alone = host.startswith("127.") or ":" in host or (near and host == "localhost")
    try:
        return ControlServer(memory, own, (host if alone else "", port), secret)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"{host}:{port} is in use: choose another port, the same on all ranks") from error
        raise UserError(f"rank 0 cannot listen at {host}:{port}: {error}") from error


def join_store(
    rank: int, own: Member, connect: Callable[[], ControlChannel], timeout: float, where: str
) -> tuple[list[Member], ControlChannel]:
    """Join the store by the channel that `connect` makes, and wait until all ranks have.

    Args:
        rank: this process's number.
        own: this process.
        connect: makes the channel.
        timeout: longest wait in seconds.
        where: what messages call the rendezvous.

    Raises:
        UserError: this rank is refused, or rank 0 cannot listen.
        PeerError: not all came in time.
    """
    deadline = time.monotonic() + timeout
    channel: ControlChannel | None = None
    try:
        channel = connect()
        found = channel.take(MEMBERS, max(0.0, deadline - time.monotonic()))
        if found is None:
            missing = json.loads(channel.take(MISSING, 0.0) or b"[]")
            ranks = f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing))}"
            raise PeerError(f"has waited {timeout:g} s for {ranks} to join")
        return decode_list(Member, found), channel
    except BaseException as error:
        reason = str(error) if channel is None else _withdraw(channel, error)
        if isinstance(error, (UserError, PeerError)):
            raise type(error)(f"{own.name(rank)}: {where}: {reason}") from error
        raise


def _withdraw(channel: ControlChannel, error: BaseException) -> str:
    """Leave a store that could not be joined; returns why: another rank's failure, else the broken connection."""
    reason = str(error)
    if isinstance(error, PeerError):
        with suppress(PeerError):
            failure = channel.watch([], _FAILURE_SECONDS)
            reason = reason if failure is None else failure.message
    if isinstance(error, CaffepyError):
        channel.fail(str(error))  # to close without a word would look like a crash
    channel.close()
    return reason
