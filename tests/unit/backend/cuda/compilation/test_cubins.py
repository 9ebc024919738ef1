"""Machine code in the cache folder: made by NVRTC here and in another process, damaged, or not to be kept."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kernel_compiler
import pytest

from caffepy.errors import RunError

COMPILERS = kernel_compiler.installed()
pytestmark = pytest.mark.skipif(not COMPILERS, reason="no NVRTC: pip install nvidia-cuda-nvrtc-cu12 nvidia-cuda-nvrtc")
TEXT = 'extern "C" __global__ void f(float *x) { x[threadIdx.x] *= 2; }'


@pytest.fixture
def cubins(cupy_or_mock: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, with a folder of its own."""
    module = importlib.import_module("caffepy.backend.cuda.compilation.cubins")
    monkeypatch.setattr(module, "version_folder", lambda *_: tmp_path)
    monkeypatch.setattr(module, "most_processes", lambda: 1)
    yield module
    module.end_processes()


@pytest.fixture
def target(cubins: Any) -> Any:
    """An H200, by the newest NVRTC that is installed."""
    module = importlib.import_module("caffepy.backend.cuda.compilation.target")
    return module._target(str(COMPILERS[-1].path), 90)


def test_what_is_made_is_found(cubins: Any, target: Any, tmp_path: Path) -> None:
    assert cubins.find_cubin(TEXT, target) is None
    path = cubins.make_cubin(TEXT, target)
    assert path.read_bytes().startswith(b"\x7fELF")
    assert cubins.find_cubin(TEXT, target) == path
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert cubins.find_cubin(TEXT + "\n", target) is None


def test_a_process_makes_the_same(cubins: Any, target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    here = cubins.make_cubin(TEXT, target).read_bytes()
    cubins.find_cubin(TEXT, target).unlink()
    cubins.foresee(TEXT, target)
    job = next(iter(cubins._pools[target.library]._jobs.values()))
    assert job.done.wait(300.0)
    monkeypatch.setattr(cubins, "_compile", lambda *_: pytest.fail("it is there already"))
    assert cubins.make_cubin(TEXT, target).read_bytes() == here


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"x" * 5000])
def test_what_is_damaged_is_made_anew(cubins: Any, target: Any, content: bytes) -> None:
    path = cubins.make_cubin(TEXT, target)
    whole = path.read_bytes()
    path.write_bytes(content)
    assert cubins.find_cubin(TEXT, target) is None
    assert cubins.make_cubin(TEXT, target).read_bytes() == whole


def test_what_is_cached_starts_no_process(cubins: Any, target: Any) -> None:
    cubins.make_cubin(TEXT, target)
    cubins.foresee(TEXT, target)
    assert not cubins._pools


def test_where_nothing_can_be_kept(cubins: Any, target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep = cubins.worker.keep

    def refuse(folder: str, key: str, cubin: bytes) -> str:
        if folder == str(tmp_path):
            raise PermissionError(13, "Permission denied", folder)
        return str(keep(folder, key, cubin))

    monkeypatch.setattr(cubins.worker, "keep", refuse)
    path = cubins.make_cubin(TEXT, target)
    assert path.parent == cubins.temporary_folder()
    assert path.read_bytes().startswith(b"\x7fELF")


def test_a_file_is_written_whole_or_not_at_all(cubins: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cubins.worker.os, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        cubins.worker.keep(str(tmp_path), "key", b"code")
    assert not list(tmp_path.iterdir())


def test_a_text_that_does_not_compile(cubins: Any, target: Any) -> None:
    with pytest.raises(RunError, match=r"NVRTC 1\d\.\d+ .* refuses a CUDA kernel .*\"undefined\" is undefined"):
        cubins.make_cubin('extern "C" __global__ void g() { undefined(); }', target)
    cubins.foresee('extern "C" __global__ void g() { undefined(); }', target)
    job = next(iter(cubins._pools[target.library]._jobs.values()))
    assert job.done.wait(300.0)
    assert job.made == ""


def test_the_key_follows_text_options_and_compiler(cubins: Any, target: Any) -> None:
    replace = importlib.import_module("dataclasses").replace
    others = [
        replace(target, identity="another"), replace(target, options=target.options[:-1]),
        replace(target, options=(*target.options[:-1], "-arch=sm_80")),
    ]  # fmt: skip
    keys = {cubins.key_of(TEXT, one) for one in (target, *others)} | {cubins.key_of(TEXT + " ", target)}
    assert len(keys) == 5
    assert cubins.key_of(TEXT, replace(target, library="/elsewhere")) == cubins.key_of(TEXT, target)


def test_a_net_is_known_after_it_was_foreseen(cubins: Any, target: Any) -> None:
    assert not cubins.is_known("a net", target)
    cubins.remember("a net", target)
    assert cubins.is_known("a net", target)
    assert not cubins.is_known("another net", target)


def test_a_gpu_that_this_nvrtc_does_not_know_is_left_to_cupy(cubins: Any, target: Any) -> None:
    module = importlib.import_module("caffepy.backend.cuda.compilation.target")
    assert module._target(target.library, 999) is None


@pytest.mark.parametrize("option", ["--minimal"])
def test_options_of_ours_change_no_machine_code(cubins: Any, target: Any, option: str) -> None:
    kernels = Path(cubins.__file__).parents[1] / "kernels"
    text = "".join((kernels / f"{name}.cu").read_text() for name in ("common", "split_k"))
    plain = importlib.import_module("dataclasses").replace(
        target, options=tuple(one for one in target.options if one != option)
    )
    assert cubins._compile(text, target) == cubins._compile(text, plain)
    assert set(kernel_compiler.OPTIONS) <= set(target.options)
    assert os.path.isabs(target.library)
