"""The command that adds an extra names the folder, repository, archive or package that caffepy was installed from."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from caffepy.utils import installation
from caffepy.utils.installation import cuda_extra, install_command

METADATA = """\
Metadata-Version: 2.1
Name: caffepy
Version: 1.0
Requires-Dist: numpy>=1.26
Requires-Dist: onnx>=1.17; extra == "onnx"
Requires-Dist: onnxruntime>=1.22; extra == "onnx"
Requires-Dist: plyvel>=1.5.1; python_version < "3.13" and extra == "test"
"""

Install = Callable[..., None]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Write the metadata of an installation, and let Python see no other packages."""

    def write(origin: dict[str, Any] | None, installer: str = "pip") -> None:
        folder = tmp_path / "site" / "caffepy-1.0.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(METADATA)
        (folder / "INSTALLER").write_text(f"{installer}\n")
        if origin is not None:
            (folder / "direct_url.json").write_text(json.dumps(origin))
        monkeypatch.setattr(sys, "path", [str(folder.parent)])

    return write


def words(command: str) -> list[str]:
    """What follows ``pip install``."""
    parts = shlex.split(command)
    return parts[parts.index("install") + 1 :]


def test_a_folder(installed: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    clone = tmp_path / "my clone"
    clone.mkdir()
    installed({"url": clone.as_uri(), "dir_info": {}})
    assert words(install_command("onnx")) == [f"{clone}[onnx]"]
    monkeypatch.chdir(clone)
    assert install_command("onnx").endswith("install '.[onnx]'")


def test_an_editable_folder(installed: Install, tmp_path: Path):
    installed({"url": tmp_path.as_uri(), "dir_info": {"editable": True}})
    assert words(install_command("plot")) == ["--editable", f"{tmp_path}[plot]"]


def test_a_folder_that_is_gone(installed: Install, tmp_path: Path):
    installed({"url": (tmp_path / "gone").as_uri(), "dir_info": {}})
    assert words(install_command("onnx")) == ["onnx>=1.17", "onnxruntime>=1.22"]
    assert words(install_command("test")) == ["plyvel>=1.5.1"]


def test_a_wheel(installed: Install, tmp_path: Path):
    wheel = tmp_path / "caffepy-1.0-py3-none-any.whl"
    wheel.touch()
    installed({"url": wheel.as_uri(), "archive_info": {}})
    assert words(install_command("onnx")) == [f"{wheel}[onnx]"]


@pytest.mark.parametrize(
    ("origin", "requirement"),
    [
        (
            {"url": "https://example.org/caffepy.git", "vcs_info": {"vcs": "git", "commit_id": "0123"}},
            "caffepy[onnx] @ git+https://example.org/caffepy.git@0123",
        ),
        (
            {"url": "file:///srv/all.git", "vcs_info": {"vcs": "git", "commit_id": "0123"}, "subdirectory": "python"},
            "caffepy[onnx] @ git+file:///srv/all.git@0123#subdirectory=python",
        ),
        (
            {"url": "https://example.org/caffepy-1.0.tar.gz", "archive_info": {}},
            "caffepy[onnx] @ https://example.org/caffepy-1.0.tar.gz",
        ),
    ],
    ids=["repository", "subfolder", "archive"],
)
def test_an_address(installed: Install, origin: dict[str, Any], requirement: str):
    installed(origin)
    assert words(install_command("onnx")) == [requirement]


def test_an_index(installed: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    installed(None)
    monkeypatch.setattr(installation, "__file__", str(tmp_path / "site" / "caffepy" / "installation.py"))
    assert words(install_command("onnx")) == ["caffepy[onnx]"]


def test_a_checkout_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "proto").mkdir()
    (tmp_path / "proto" / "caffe.proto").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(installation, "__file__", str(tmp_path / "caffepy" / "utils" / "installation.py"))
    assert words(install_command("onnx")) == [f"{tmp_path}[onnx]"]


def test_uv(installed: Install):
    installed({"url": "https://example.org/caffepy-1.0.tar.gz", "archive_info": {}}, installer="uv")
    assert install_command("onnx").startswith("uv pip install ")


def test_pip_is_that_of_this_python(installed: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    installed({"url": tmp_path.as_uri(), "dir_info": {}})
    for name in ("own", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pip").touch(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "own" / "python3"))
    monkeypatch.setenv("PATH", str(tmp_path / "own"))
    assert shlex.split(install_command("onnx"))[:2] == ["pip", "install"]
    monkeypatch.setenv("PATH", str(tmp_path / "other"))
    assert shlex.split(install_command("onnx"))[:4] == [str(tmp_path / "own" / "python3"), "-m", "pip", "install"]


class Driver:
    """A libcuda for a version of CUDA."""

    def __init__(self, version: int) -> None:
        self.version = version

    def cuDriverGetVersion(self, pointer: Any) -> int:  # noqa: N802 - CUDA's name
        pointer._obj.value = self.version
        return 0


@pytest.mark.parametrize(
    ("version", "extra"),
    [(11080, "cuda12"), (12040, "cuda12"), (12090, "cuda12"), (13000, "cuda13"), (14010, "cuda13")],
)
def test_the_extra_for_gpus_is_the_drivers(
    installed: Install, monkeypatch: pytest.MonkeyPatch, version: int, extra: str
):
    installed(None)
    monkeypatch.setattr(installation.ctypes, "CDLL", lambda name: Driver(version))
    assert cuda_extra() == extra


def test_the_extra_for_gpus_without_a_driver(installed: Install, monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> None:
        raise OSError(name)

    installed(None)
    monkeypatch.setattr(installation.ctypes, "CDLL", missing)
    assert cuda_extra() == "cuda13"


def test_the_extra_for_gpus_is_that_of_an_installed_cupy(
    installed: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """CuPy for CUDA 12 works with a driver for CUDA 13; both CuPys together do not work."""
    installed(None)
    monkeypatch.setattr(installation.ctypes, "CDLL", lambda name: Driver(13000))
    folder = tmp_path / "site" / "cupy_cuda12x-14.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: cupy-cuda12x\nVersion: 14.0\n")
    assert cuda_extra() == "cuda12"
