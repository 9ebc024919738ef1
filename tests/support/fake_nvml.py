"""The module pynvml (nvidia-ml-py), for GPUs that are not there."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any


def pci(number: int) -> str:
    """The PCI address of the GPU with this number."""
    return f"0000:{number + 1:02X}:00.0"


class FakeNvml:
    """The module's functions; a device's handle is its address.

    Args:
        links: where each GPU's NVLinks end; None for one that is not active.
        levels: of the path between two GPUs.
        driver: whether there is one.
        readable: pairs of GPUs that read each other's memory over PCIe.
    """

    class NVMLError(Exception):
        """The module's error."""

    def __init__(
        self,
        links: dict[str, list[str | None]] | None = None,
        levels: dict[tuple[str, str], int] | None = None,
        driver: bool = True,
        readable: Sequence[tuple[str, str]] = (),
    ) -> None:
        self._links, self._levels, self._driver = links or {}, levels or {}, driver
        self._readable = [set(pair) for pair in readable]
        self._known = {gpu for pairs in (self._levels, self._readable) for pair in pairs for gpu in pair}
        self._known |= set(self._links)
        self.open = 0

    def nvmlInit(self) -> None:
        if not self._driver:
            raise self.NVMLError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByPciBusId(self, address: str) -> str:
        if address not in self._known:
            raise self.NVMLError("Not Found")
        return address

    def nvmlDeviceGetNvLinkState(self, device: str, link: int) -> int:
        ends = self._links.get(device, [])
        if link >= len(ends):
            raise self.NVMLError("Invalid Argument")
        return int(ends[link] is not None)

    def nvmlDeviceGetNvLinkRemotePciInfo(self, device: str, link: int) -> Any:
        end = self._links[device][link]
        assert end is not None
        return SimpleNamespace(busId=f"0000{end.lower()}")

    def nvmlDeviceGetTopologyCommonAncestor(self, first: str, second: str) -> int:
        if (first, second) not in self._levels:
            raise self.NVMLError("Invalid Argument")
        return self._levels[first, second]

    def nvmlDeviceGetP2PStatus(self, first: str, second: str, capability: int) -> int:
        return 0 if {first, second} in self._readable else 3
