"""The links between GPUs, as NVIDIA's management library knows them.

The library comes with the driver, and nvidia-ml-py calls it; without either nothing is known, which is no error.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger(__name__)

_READ, _P2P_OK = 0, 0
"""NVML's NVML_P2P_CAPS_INDEX_READ and NVML_P2P_STATUS_OK."""
_LINKS = 36
"""More than a GPU has; NVML refuses the first that is not there."""
_ANCESTORS = {0: "SELF", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""NVML's levels of the path over PCI, by the names that nvidia-smi gives them."""


class Nvml:
    """The library, initialised.

    Args:
        library: the module pynvml.
    """

    def __init__(self, library: Any) -> None:
        self._library = library

    def link_ends(self, bus_id: str) -> list[str]:
        """Where each of the active NVLinks of the GPU at a PCI address ends: the address of a GPU or a switch."""
        device = self._device(bus_id)
        ends = []
        for link in range(_LINKS):
            active = self._call("nvmlDeviceGetNvLinkState", device, link)
            if active is None:
                break
            end = self._call("nvmlDeviceGetNvLinkRemotePciInfo", device, link) if active else None
            if end is not None:
                ends.append(short_address(end.busId))
        return ends

    def link_counts(self, bus_ids: Sequence[str]) -> list[list[int]]:
        """How many NVLinks connect each two GPUs, directly or through switches."""
        addresses = [short_address(bus_id) for bus_id in bus_ids]
        ends = [self.link_ends(bus_id) for bus_id in bus_ids]
        switched = [sum(end not in addresses for end in own) for own in ends]
        return [
            [own.count(address) or min(switched[i], switched[j]) for j, address in enumerate(addresses)]
            for i, own in enumerate(ends)
        ]

    def common_ancestor(self, first: str, second: str) -> str:
        """What the path between two GPUs over PCI crosses, as nvidia-smi names it (``PIX`` to ``SYS``); else empty."""
        level = self._call("nvmlDeviceGetTopologyCommonAncestor", self._device(first), self._device(second))
        return _ANCESTORS.get(level, "")

    def reads(self, first: str, second: str) -> bool:
        """Whether one GPU can read another's memory directly."""
        status = self._call("nvmlDeviceGetP2PStatus", self._device(first), self._device(second), _READ)
        return bool(status == _P2P_OK)

    def _device(self, bus_id: str) -> Any:
        return self._call("nvmlDeviceGetHandleByPciBusId", bus_id)

    def _call(self, name: str, *arguments: Any) -> Any:
        """The result of a function of the library; None where it fails, or has no such function or GPU."""
        if None in arguments:
            return None
        try:
            return getattr(self._library, name)(*arguments)
        except self._library.NVMLError as error:
            logger.debug("NVML: %s: %s", name, error)
            return None


@contextmanager
def open_nvml(load: Callable[[str], Any] = importlib.import_module) -> Iterator[Nvml | None]:
    """The library within a `with` block; None where there is none, or it has no driver.

    Args:
        load: loads a module by its name.
    """
    try:
        library = load("pynvml")
    except ImportError as error:
        logger.debug("NVML is not there: %s", error)
        yield None
        return
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        logger.debug("NVML cannot be initialised: %s", error)
        yield None
        return
    try:
        yield Nvml(library)
    finally:
        library.nvmlShutdown()


def short_address(bus_id: str) -> str:
    """A PCI address with a domain of four digits and capitals, as CUDA writes it: ``0000:1B:00.0``."""
    domain, _, rest = bus_id.partition(":")
    return f"{domain[-4:]}:{rest}".upper()
