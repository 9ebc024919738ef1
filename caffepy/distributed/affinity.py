"""CPU cores of this process: launchers bind a rank to one core, which starves solver threads and NCCL's own threads."""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass
from pathlib import Path

from caffepy.utils.whole_numbers import whole

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cores:
    """The cores that this process may use.

    Args:
        numbers: their numbers, ascending.
        count: how many of them may be busy at a time; less than there are where a container has a quota.
    """

    numbers: tuple[int, ...]
    count: int


def current_cores() -> Cores:
    """The cores that this process may use now."""
    numbers = _affinity()
    return Cores(numbers, _within_quota(len(numbers)))


def take_cores(local_rank: int, local_size: int, divide: bool) -> Cores:
    """Widen this process's CPU mask to all cores that machine and container allow, and log it.

    Args:
        local_rank: this process's number among the ranks of its host.
        local_size: the number of ranks on this host.
        divide: give each rank its own share of the cores (training on the CPU). Ranks with GPUs share all cores: their
            solver threads mostly wait.
    """
    narrow = _affinity()
    _set_affinity(_online())
    wide = _affinity()
    quota = _within_quota(len(wide))
    numbers, count = wide, quota
    if divide and local_size > 1:
        count = max(1, quota // local_size)
        if quota == len(wide) >= local_size:
            numbers = share(wide, local_rank, local_size)
            count = len(numbers)
            _set_affinity(numbers)
    logger.info(
        "CPU cores of this process: %s (%d busy at a time), started with %s",
        format_cores(numbers),
        count,
        format_cores(narrow),
    )
    return Cores(numbers, count)


def cores_near(bus_id: str, system: Path = Path("/sys")) -> tuple[int, ...]:
    """The numbers of the CPU cores near a PCI device, e.g. ``0000:1B:00.0``; empty where Linux does not say."""
    try:
        return parse_cores((pci_folder(bus_id, system) / "local_cpulist").read_text())
    except (OSError, ValueError):
        return ()


def pci_folder(bus_id: str, system: Path) -> Path:
    """What Linux shows of a PCI device."""
    return system / "bus/pci/devices" / bus_id.lower()


def bind_near_gpu(bus_id: str, label: str, system: Path = Path("/sys")) -> tuple[int, ...]:
    """Keep the calling thread, and threads that it starts, on its cores near its GPU; logged.

    Returns the cores; none where nothing is known of the GPU or none of them may be used, and nothing is bound then.

    Args:
        bus_id: the GPU's PCI address, with a domain of four digits.
        label: what the log calls the GPU.
        system: where Linux shows its devices.
    """
    near = cores_near(bus_id, system)
    allowed = _affinity()
    cores = tuple(core for core in near if core in allowed)
    try:
        if not cores or not hasattr(os, "sched_setaffinity"):
            raise OSError(f"cores near it: {format_cores(near) or '?'}")
        os.sched_setaffinity(0, cores)
    except OSError as error:  # a container may forbid it
        logger.debug("GPU %s (%s): its thread is not bound; %s", label, bus_id, error)
        return ()
    logger.info("GPU %s (%s): its thread runs on the CPU cores near it, %s", label, bus_id, format_cores(cores))
    return cores


def share(cores: tuple[int, ...], index: int, parts: int) -> tuple[int, ...]:
    """Part `index` of `parts` nearly equal, contiguous parts."""
    return cores[len(cores) * index // parts : len(cores) * (index + 1) // parts]


def format_cores(cores: tuple[int, ...]) -> str:
    """Core numbers as Linux writes them: ``0-3,8``."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)


def parse_cores(text: str) -> tuple[int, ...]:
    """The inverse of `format_cores`."""
    cores: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.extend(range(int(first), int(last or first) + 1))
    return tuple(cores)


def _affinity() -> tuple[int, ...]:
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def _set_affinity(cores: tuple[int, ...]) -> None:
    """Move every thread of this process: Linux keeps a mask a thread, and BLAS has started its own by now."""
    if not hasattr(os, "sched_setaffinity"):
        return
    try:
        threads = [int(entry.name) for entry in Path("/proc/self/task").iterdir()]
    except OSError:
        threads = [0]
    for thread in threads:
        try:
            os.sched_setaffinity(thread, cores)
        except OSError as error:  # a thread that has ended, or a container that forbids it
            logger.debug("CPU mask of thread %d stays unchanged: %s", thread, error)


def _online() -> tuple[int, ...]:
    try:
        return parse_cores(Path("/sys/devices/system/cpu/online").read_text())
    except (OSError, ValueError):
        return tuple(range(os.cpu_count() or 1))


def _within_quota(cores: int) -> int:
    """Cores that the control group lets be busy: `cpu.max` (version 2) or `cpu.cfs_quota_us` (version 1)."""
    group = Path("/sys/fs/cgroup")
    try:
        quota, period = (group / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (group / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (group / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return cores
    allowed, in_time = whole(quota, most=1 << 62), whole(period, 1)
    if allowed is None or in_time is None:  # "max", or -1
        return cores
    return max(1, min(cores, math.ceil(allowed / in_time)))
