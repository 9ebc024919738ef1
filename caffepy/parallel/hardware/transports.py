"""What lies between each pair of devices: NVLink, PCIe, shared memory or the network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from caffepy.parallel.hardware.affinity import format_cores
from caffepy.parallel.hardware.nvml import Nvml

Links = Mapping[tuple[str, str], str]
"""What connects two GPUs of a machine, by their PCI addresses."""


@dataclass(frozen=True)
class Device:
    """A device, and where it is.

    Args:
        rank: its process.
        host: as people call its machine.
        machine: its `machine_identity`.
        bus_id: a GPU's PCI address; None: a CPU solver.
        name: what it is, e.g. ``GPU 0``.
    """

    rank: int
    host: str
    machine: str
    bus_id: str | None
    name: str


def gpu_links(bus_ids: Sequence[str], nvml: Nvml | None) -> dict[tuple[str, str], str]:
    """What connects each two GPUs of this machine: ``NVLink``, ``PCIe``, or ``shared memory`` of the host where
    neither reads the other's. Empty where the driver's library cannot be asked."""
    if nvml is None:
        return {}
    links = {}
    for first, counts in zip(bus_ids, nvml.link_counts(bus_ids), strict=True):
        for second, count in zip(bus_ids, counts, strict=True):
            links[first, second] = "NVLink" if count else "PCIe" if nvml.reads(first, second) else "shared memory"
    return links


def transport(first: Device, second: Device, links: Mapping[str, Links]) -> str:
    """What lies between two devices.

    Args:
        first: one.
        second: the other.
        links: between the GPUs of each machine.
    """
    if first.machine != second.machine:
        return "network"
    if first.bus_id is not None and second.bus_id is not None:
        return links.get(first.machine, {}).get((first.bus_id, second.bus_id), "PCIe or NVLink")
    return "memory of one process" if first.rank == second.rank else "shared memory"


def describe_devices(devices: Sequence[Device], links: Mapping[str, Links]) -> Iterator[str]:
    """Lines: each device, then for each kind of transport the pairs of devices that have it."""
    for number, device in enumerate(devices):
        where = f", PCI {device.bus_id}" if device.bus_id is not None else ""
        yield f"Device {number}: rank {device.rank} on {device.host}, {device.name}{where}"
    found: dict[str, dict[int, list[int]]] = {}
    for i, first in enumerate(devices):
        for j in range(i + 1, len(devices)):
            found.setdefault(transport(first, devices[j], links), {}).setdefault(i, []).append(j)
    for kind, pairs in found.items():
        text = "; ".join(f"{i} and {format_cores(tuple(others))}" for i, others in pairs.items())
        yield f"Transport {kind} between devices {'of all pairs' if len(found) == 1 else text}"
