"""NVML as ctypes would show it, for GPUs that are not there."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

NOT_FOUND = 6
INVALID = 2


def pci(number: int) -> str:
    """The PCI address of the GPU with this number."""
    return f"0000:{number + 1:02X}:00.0"


class FakeNvml:
    """The library's functions.

    Args:
        cores: numbers of the cores near each GPU.
        links: where each GPU's NVLinks end; None for one that is not active.
        levels: of the path between two GPUs.
        status: what the initialisation returns.
        readable: pairs of GPUs that read each other's memory over PCIe.
    """

    def __init__(
        self,
        cores: dict[str, list[int]] | None = None,
        links: dict[str, list[str | None]] | None = None,
        levels: dict[tuple[str, str], int] | None = None,
        status: int = 0,
        readable: Sequence[tuple[str, str]] = (),
    ) -> None:
        self._readable = [set(pair) for pair in readable]
        self._cores, self._links, self._levels, self._status = cores or {}, links or {}, levels or {}, status
        self._known = sorted({*self._cores, *self._links, *(gpu for pair in self._levels for gpu in pair)})
        self.open = 0

    def nvmlInit_v2(self) -> int:
        self.open += self._status == 0
        return self._status

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, address: Any, device: Any) -> int:
        name = address.value.decode()
        if name not in self._known:
            return NOT_FOUND
        ctypes.cast(device, ctypes.POINTER(ctypes.c_void_p))[0] = self._known.index(name) + 1
        return 0

    def nvmlDeviceGetCpuAffinity(self, device: Any, count: Any, words: Any) -> int:
        for core in self._cores.get(self._name(device), []):
            if core // 64 < count.value:
                words[core // 64] |= 1 << core % 64
        return 0

    def nvmlDeviceGetNvLinkState(self, device: Any, link: Any, active: Any) -> int:
        ends = self._links.get(self._name(device), [])
        if link.value >= len(ends):
            return INVALID
        ctypes.cast(active, ctypes.POINTER(ctypes.c_uint))[0] = ends[link.value] is not None
        return 0

    def nvmlDeviceGetNvLinkRemotePciInfo_v2(self, device: Any, link: Any, info: Any) -> int:
        end = self._links[self._name(device)][link.value]
        assert end is not None
        info._obj.bus_id = f"0000{end.lower()}".encode()
        return 0

    def nvmlDeviceGetTopologyCommonAncestor(self, first: Any, second: Any, level: Any) -> int:
        found = self._levels.get((self._name(first), self._name(second)))
        if found is None:
            return INVALID
        ctypes.cast(level, ctypes.POINTER(ctypes.c_int))[0] = found
        return 0

    def nvmlDeviceGetP2PStatus(self, first: Any, second: Any, capability: Any, status: Any) -> int:
        readable = {self._name(first), self._name(second)} in self._readable
        ctypes.cast(status, ctypes.POINTER(ctypes.c_int))[0] = 0 if readable else 3
        return 0

    def _name(self, device: Any) -> str:
        return self._known[device.value - 1]
