"""How this caffepy was installed, and the commands that add an extra to it. Messages contain these commands.

Reads packages' metadata (direct_url.json, PEP 610) and the CUDA driver's version; imports neither CuPy nor caffepy.
"""

from __future__ import annotations

import ctypes
import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from caffepy.errors import UserError

if TYPE_CHECKING:
    from importlib.metadata import Distribution

NAME = "caffepy"
_CUDA_13 = 13000
"""CUDA 13.0 in the driver's count: 1000 times the major version and 10 times the minor version."""


def install_command(extra: str) -> str:
    """Return the command that adds an extra to this caffepy, e.g. ``pip install '.[onnx]'``.

    Args:
        extra: an extra of pyproject.toml.
    """
    found = _installed()
    url = None if found is None else _direct_url(found)
    if url is None:
        checkout = Path(__file__).resolve().parents[2]
        is_checkout = (checkout / "proto" / "caffe.proto").is_file()
        requirement = _of_path(checkout, extra) if is_checkout else f"{NAME}[{extra}]"
        return f"{_pip(found)} install {shlex.quote(requirement)}"
    origin = _of_url(url, extra)
    if origin is not None:
        options = "--editable " if url.get("dir_info", {}).get("editable") else ""
        return f"{_pip(found)} install {options}{shlex.quote(origin)}"
    # The folder or file is gone: the packages that the extra adds.
    return f"{_pip(found)} install {' '.join(map(shlex.quote, _requirements(found, extra)))}"


def cuda_extra() -> str:
    """Return the extra for GPUs: ``cuda12`` or ``cuda13``, as CuPy is installed, else as the driver supports.

    ``cuda13`` if neither is there.
    """
    for extra in ("cuda12", "cuda13"):
        if _is_installed(f"cupy-{extra}x"):
            return extra
    version = _driver_version()
    return "cuda12" if version is not None and version < _CUDA_13 else "cuda13"


def _driver_version() -> int | None:
    """Return the newest CUDA that the NVIDIA driver supports, e.g. 12040 for 12.4; None without a driver."""
    version = ctypes.c_int()
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return version.value if status == 0 else None


def _is_installed(package: str) -> bool:
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


def _installed() -> Distribution | None:
    """Return caffepy's metadata; of several (a checkout has an egg-info too), the metadata with an origin."""
    from importlib.metadata import distributions  # takes as long as all else that --help imports

    found = list(distributions(name=NAME))
    return next((each for each in found if _direct_url(each) is not None), found[0] if found else None)


def _direct_url(found: Distribution) -> dict[str, Any] | None:
    """Return the origin that pip or uv wrote down; None if that was an index."""
    try:
        url = json.loads(found.read_text("direct_url.json") or "null")
    except ValueError:
        return None
    return url if isinstance(url, dict) and isinstance(url.get("url"), str) else None


def _of_url(origin: dict[str, Any], extra: str) -> str | None:
    """Return the requirement for pip; None if a local folder or file is no longer there."""
    url = origin["url"]
    parts = urlsplit(url)
    if parts.scheme == "file" and "vcs_info" not in origin:
        path = Path(unquote(parts.path))
        return _of_path(path, extra) if path.exists() else None
    if "vcs_info" in origin:
        vcs = origin["vcs_info"]
        url = f"{vcs.get('vcs', 'git')}+{url}@{vcs.get('commit_id', '')}".rstrip("@")
    if subfolder := origin.get("subdirectory"):
        url += f"#subdirectory={subfolder}"
    return f"{NAME}[{extra}] @ {url}"


def _of_path(path: Path, extra: str) -> str:
    """Return a folder, or an archive in it, as pip takes it with an extra."""
    try:
        is_here = path.samefile(Path.cwd())
    except OSError:
        is_here = False
    return f"{'.' if is_here else path}[{extra}]"


def _requirements(found: Distribution | None, extra: str) -> list[str]:
    """Return what an extra requires, from metadata such as ``onnx>=1.17; extra == "onnx"``."""
    marked = [line.partition(";") for line in (found.requires if found is not None else None) or []]
    return [name.strip() for name, _, marker in marked if f'extra == "{extra}"' in marker]


def _pip(found: Distribution | None) -> str:
    """Return ``pip`` if that is the one of this Python, else a call of this Python's; ``uv pip`` if uv installed it."""
    if found is not None and (found.read_text("INSTALLER") or "").strip() == "uv":
        return "uv pip"
    pip = shutil.which("pip")
    if pip is not None and Path(pip).parent == Path(sys.executable).parent:
        return "pip"
    return f"{shlex.quote(sys.executable)} -m pip"


class MissingExtraError(UserError):
    """An optional package is needed.

    Args:
        package: the package that could not be imported, e.g. ``cupy``.
        extra: the extra of caffepy that installs it, e.g. ``cuda13``.
        purpose: a clause: ``to train on a GPU``.
    """

    def __init__(self, package: str, extra: str, purpose: str) -> None:

        super().__init__(f"{package} is not installed and is needed {purpose}: {install_command(extra)}")
