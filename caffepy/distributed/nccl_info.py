"""What NCCL and CUDA say of themselves and of the GPUs' ways to each other; imports CuPy."""

from __future__ import annotations

from caffepy.utils.installation import MissingExtraError, cuda_extra

try:
    import cupy
    from cupy.cuda import nccl
except ImportError as error:
    raise MissingExtraError("CuPy", cuda_extra(), "to look at GPUs") from error


def nccl_version() -> str | None:
    """NCCL's version, e.g. ``2.28.3``; None where CuPy cannot load it."""
    if not nccl.available:
        return None
    number = int(nccl.get_version())
    thousands = 10000 if number >= 10000 else 1000  # 2.8.4 is 2804, 2.9.6 is 20906
    return f"{number // thousands}.{number % thousands // 100}.{number % 100}"


def peer_access(first: int, second: int) -> bool:
    """Whether one GPU can read another's memory, as CUDA sees it."""
    return bool(cupy.cuda.runtime.deviceCanAccessPeer(first, second))
