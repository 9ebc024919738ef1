"""This machine: its identity, and the addresses under which others reach it."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

logger = logging.getLogger(__name__)


def machine_identity(system: Path = Path("/proc")) -> str:
    """The boot of the kernel and its network namespace, which tell machines apart whatever their host names.

    Containers of one machine have a network each unless they share the host's: their loopback addresses are not the
    same. The host name where the system tells neither.

    Args:
        system: where Linux keeps what it says of itself.
    """
    try:
        boot = (system / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
    try:
        network = (system / "self/ns/net").stat()
    except OSError:
        return f"{boot}/{socket.gethostname()}"
    return f"{boot}/{network.st_dev}:{network.st_ino}"


def kernel_of(machine: str) -> str:
    """The part of a `machine_identity` that the containers of one machine have in common: they share its GPUs."""
    return machine.partition("/")[0]


def own_addresses() -> list[str]:
    """Addresses under which other machines may reach this one, the likeliest first."""
    addresses = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; the kernel picks the interface that leads outward
            addresses.append(probe.getsockname()[0])
        except OSError as error:
            logger.debug("no route outward: %s", error)
    try:
        addresses += socket.gethostbyname_ex(socket.gethostname())[2]
    except OSError as error:
        logger.debug("this host's name has no address: %s", error)
    return [address for address in dict.fromkeys(addresses) if not address.startswith("127.")]
