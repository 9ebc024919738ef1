"""What kernels are compiled with and for: which NVRTC, which options."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from functools import cache

from caffepy.backend.cuda.compilation.worker import Nvrtc
from caffepy.backend.cuda.device import cupy

logger = logging.getLogger(__name__)

OPTIONS = ("--std=c++17", "-ftz=true", "--device-as-default-execution-space")
"""Those of CuPy's raw modules: a kernel computes the same whoever compiled it."""

_MINIMAL = (12, 9)
"""The first NVRTC that was tried with `--minimal`, which leaves out textures and what else no kernel of ours uses."""


@dataclass(frozen=True)
class Target:
    """What machine code depends on beside the text.

    Args:
        library: path or name of libnvrtc.so.
        identity: tells it apart from other versions.
        options: NVRTC's, with the architecture.
    """

    library: str
    identity: str
    options: tuple[str, ...]


@cache
def nvrtc(library: str) -> Nvrtc:
    """The compiler in a library, which is loaded once."""
    return Nvrtc(library)


@cache
def _library() -> str | None:
    """The NVRTC that CuPy itself uses; None where it is not found."""
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib  # type: ignore[import-not-found,unused-ignore]

        path = load_nvidia_dynamic_lib("nvrtc").abs_path
        if path:
            return str(path)
    except (ImportError, RuntimeError) as error:
        logger.debug("NVRTC is not found by its wheel: %s", error)
    name = f"libnvrtc.so.{cupy.cuda.runtime.runtimeGetVersion() // 1000}"
    try:
        nvrtc(name)
    except OSError as error:
        logger.debug("NVRTC is left to CuPy: %s", error)
        return None
    return name


@cache
def _target(library: str, capability: int) -> Target | None:
    compiler = nvrtc(library)
    version = compiler.version()
    if capability not in compiler.architectures():
        return None
    size = os.path.getsize(library) if os.path.isabs(library) else 0
    options = (*OPTIONS, *(("--minimal",) if version >= _MINIMAL else ()), f"-arch=sm_{capability}")
    return Target(library, f"{version[0]}.{version[1]} of {size} bytes", options)


def find_target() -> Target | None:
    """For the present device; None where CuPy is to compile by itself, as on a GPU that is newer than its NVRTC."""
    library = _library()
    try:
        return _target(library, int(cupy.cuda.Device().compute_capability)) if library else None
    except (OSError, AttributeError) as error:
        logger.debug("%s cannot be used: %s", library, error)
        return None
