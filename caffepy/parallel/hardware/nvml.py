"""What NVIDIA's management library knows of GPUs: the CPU cores near them and the links between them.

The library comes with the driver and is called through ctypes; without it nothing is known, which is no error.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger(__name__)

_LIBRARY = "libnvidia-ml.so.1"
_SUCCESS = 0
_ENABLED = 1
_READ = 0
"""NVML's NVML_P2P_CAPS_INDEX_READ."""
_P2P_OK = 0
_LINKS = 36
"""More than a GPU has; NVML refuses the first that is not there."""
_WORD = 8 * ctypes.sizeof(ctypes.c_ulong)
_WORDS = 1024 // _WORD
"""Room for the numbers of this many cores."""
_ANCESTORS = {0: "SELF", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""NVML's levels of the path over PCI, by the names that nvidia-smi gives them."""


class _PciInfo(ctypes.Structure):
    """NVML's nvmlPciInfo_t."""

    _fields_ = (
        ("bus_id_legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("pci_device_id", ctypes.c_uint),
        ("pci_subsystem_id", ctypes.c_uint),
        ("bus_id", ctypes.c_char * 32),
    )


class Nvml:
    """The library, initialised.

    Args:
        library: as ctypes loaded it.
    """

    def __init__(self, library: Any) -> None:
        self._library = library

    def cores_near(self, bus_id: str) -> tuple[int, ...]:
        """The numbers of the CPU cores near a GPU, ascending; empty where NVML does not say.

        Args:
            bus_id: the GPU's PCI address, e.g. ``0000:1B:00.0``.
        """
        words = (ctypes.c_ulong * _WORDS)()
        device = self._device(bus_id)
        if device is None or not self._call("nvmlDeviceGetCpuAffinity", device, ctypes.c_uint(_WORDS), words):
            return ()
        return tuple(
            place * _WORD + bit for place, word in enumerate(words) for bit in range(_WORD) if int(word) >> bit & 1
        )

    def link_ends(self, bus_id: str) -> list[str]:
        """Where each of a GPU's active NVLinks ends: the PCI address of a GPU or a switch."""
        device = self._device(bus_id)
        ends = []
        for number in range(_LINKS if device is not None else 0):
            link, active, info = ctypes.c_uint(number), ctypes.c_uint(), _PciInfo()
            if not self._call("nvmlDeviceGetNvLinkState", device, link, ctypes.byref(active)):
                break
            if active.value != _ENABLED:
                continue
            if self._call("nvmlDeviceGetNvLinkRemotePciInfo_v2", device, link, ctypes.byref(info)):
                ends.append(short_address(info.bus_id.decode()))
        return ends

    def common_ancestor(self, first: str, second: str) -> str:
        """What the path between two GPUs over PCI crosses, as nvidia-smi names it (``PIX`` to ``SYS``); else empty."""
        devices = self._device(first), self._device(second)
        level = ctypes.c_int(-1)
        if None in devices or not self._call("nvmlDeviceGetTopologyCommonAncestor", *devices, ctypes.byref(level)):
            return ""
        return _ANCESTORS.get(level.value, "")

    def reads(self, first: str, second: str) -> bool:
        """Whether one GPU can read another's memory directly."""
        devices, status = (self._device(first), self._device(second)), ctypes.c_int(-1)
        if None in devices:
            return False
        found = self._call("nvmlDeviceGetP2PStatus", *devices, ctypes.c_int(_READ), ctypes.byref(status))
        return found and status.value == _P2P_OK

    def _device(self, bus_id: str) -> ctypes.c_void_p | None:
        device = ctypes.c_void_p()
        found = self._call("nvmlDeviceGetHandleByPciBusId_v2", ctypes.c_char_p(bus_id.encode()), ctypes.byref(device))
        return device if found else None

    def _call(self, name: str, *arguments: Any) -> bool:
        """Whether a function of the library is there and succeeded."""
        function: Callable[..., int] | None = getattr(self._library, name, None)
        status = function(*arguments) if function is not None else "it is not there"
        if status != _SUCCESS:
            logger.debug("NVML: %s: %s", name, status)
        return status == _SUCCESS


@contextmanager
def open_nvml(load: Callable[[str], Any] = ctypes.CDLL) -> Iterator[Nvml | None]:
    """The library within a `with` block; None where there is none, or it has no driver.

    Args:
        load: loads a library by its name.
    """
    try:
        library = load(_LIBRARY)
    except OSError as error:
        logger.debug("NVML is not there: %s", error)
        yield None
        return
    status = library.nvmlInit_v2()
    if status != _SUCCESS:
        logger.debug("NVML cannot be initialised: %s", status)
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
