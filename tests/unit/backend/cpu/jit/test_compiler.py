"""Compiled kernels are kept in the user's cache folder alone, and a cache that fails is no reason to stop."""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numba
import pytest
from numba import types
from numba.core.untyped_passes import InlineClosureLikes

import caffepy
from caffepy.backend.cpu.jit import compiler as cpu_cache
from caffepy.backend.cpu.jit import compiler as pipeline
from caffepy.errors import ConfigError

SIGNATURE = types.int64(types.int64)
RUN_A_KERNEL = """
import numpy as np
from caffepy.backend.cpu.backend import CpuBackend
from caffepy.layers.activation import relu
backend = CpuBackend(2)
x, y = np.full(100_000, -1, np.float32), np.ones(100_000, np.float32)
with backend.activate():
    backend.apply(relu, (x, 0.0), (y,))
print(y.sum())
"""


SAY_WHAT_IS_KNOWN = """
import llvmlite.binding
from numba.core.runtime import rtsys
print(llvmlite.binding.address_of_symbol("NRT_Free") is not None, rtsys._init)
"""

TRAIN_ONE_ITERATION = """
import sys
from pathlib import Path
from google.protobuf import text_format
import caffepy.pycaffe as caffe
from caffepy.formats.load import read_net
model, *shape = sys.argv[1:]
net = read_net(model)
layers = [layer for layer in net.layer if layer.type != "Data"]
del net.layer[:]
data = net.layer.add(name="data", type="DummyData", top=["data", "label"])
data.dummy_data_param.shape.add(dim=map(int, shape))
data.dummy_data_param.shape.add(dim=[int(shape[0])])
net.layer.extend(layers)
Path("net.prototxt").write_text(text_format.MessageToString(net))
Path("solver.prototxt").write_text('net: "net.prototxt" base_lr: 0.01 lr_policy: "fixed" momentum: 0.9 max_iter: 1')
caffe.set_mode_cpu()
caffe.get_solver("solver.prototxt").step(1)
"""


def thrice(x: int) -> int:
    return 3 * x


def run(compiled: object, x: int) -> int:
    return int(ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(compiled.address)(x))  # type: ignore[attr-defined]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that kernels are kept in."""
    path = tmp_path / "kernels"
    path.mkdir()
    monkeypatch.setattr(cpu_cache, "kernels_folder", lambda: path)
    return path


def compile_thrice() -> object:
    return cpu_cache.compile_c_function(thrice, SIGNATURE, {})


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_is_kept_is_read_without_numbas_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch):
    compile_thrice()
    context = type(cpu_cache.KERNELS.target_context)
    monkeypatch.setattr(context, "refresh", lambda self: pytest.fail("numba imports what its compiler needs"))
    assert run(compile_thrice(), 5) == 15


def with_closure(x: int) -> int:
    def more(y: int) -> int:
        return y + 1

    return more(3 * x)


@pytest.mark.parametrize(("function", "passes"), [(thrice, False), (with_closure, True)])
def test_numbas_pass_for_closures_runs_where_there_are_some(
    folder: Path, monkeypatch: pytest.MonkeyPatch, function: Callable[[int], int], passes: bool
):
    ran: list[str] = []
    real = InlineClosureLikes.run_pass
    monkeypatch.setattr(
        InlineClosureLikes, "run_pass", lambda self, state: bool(ran.append("ran")) or real(self, state)
    )
    compiled = cpu_cache.compile_c_function(function, SIGNATURE, {})
    assert run(compiled, 5) == function(5)
    assert bool(ran) is passes


def test_the_second_time_is_read_from_the_folder(folder: Path):
    first, second = compile_thrice(), compile_thrice()
    assert (first.cache_hits, second.cache_hits) == (0, 1)  # type: ignore[attr-defined]
    assert run(first, 4) == run(second, 4) == 12
    assert [name.split("-")[0] for name in sorted(names(folder))] == ["test_compiler.thrice"] * 2


def test_numbas_own_settings_change_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path / "numba"))
    monkeypatch.setattr("numba.config.CACHE_LOCATOR_CLASSES", "InTreeCacheLocator", raising=False)
    compile_thrice()
    assert len(names(folder)) == 2
    assert not (tmp_path / "numba").exists()


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
@pytest.mark.parametrize("content", [b"", b"\x80\x05no pickle"], ids=["empty", "damaged"])
def test_a_damaged_file_is_replaced(folder: Path, suffix: str, content: bytes):
    compile_thrice()
    (path,) = (folder / name for name in names(folder) if name.endswith(suffix))
    path.write_bytes(content)
    assert run(compile_thrice(), 5) == 15
    assert compile_thrice().cache_hits == 1  # type: ignore[attr-defined]


def test_machine_code_of_which_a_bit_is_wrong_does_not_run(folder: Path):
    compile_thrice()
    (path,) = (folder / name for name in names(folder) if name.endswith(".nbc"))
    content = bytearray(path.read_bytes())
    content[content.rindex(b"thrice")] ^= 1
    path.write_bytes(content)
    again = compile_thrice()
    assert again.cache_hits == 0  # type: ignore[attr-defined]
    assert run(again, 5) == 15
    assert compile_thrice().cache_hits == 1  # type: ignore[attr-defined]


def lose(folder: Path) -> None:
    shutil.rmtree(folder)


def become_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("in the way")


@pytest.mark.parametrize("change", [lose, become_a_file])
def test_a_folder_that_changes_meanwhile_is_no_reason_to_stop(folder: Path, change: Callable[[Path], None]):
    compile_thrice()
    change(folder)
    assert run(compile_thrice(), 6) == 18


def test_without_a_folder_nothing_is_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpu_cache, "kernels_folder", lambda: None)
    assert run(compile_thrice(), 7) == 21
    assert compile_thrice().cache_hits == 0  # type: ignore[attr-defined]


def test_compiling_is_announced_once_in_a_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    pipeline._keeps_kernels.cache_clear()
    with caplog.at_level(logging.INFO):
        compile_thrice()
        assert [record.getMessage() for record in caplog.records] == [
            f"Compiling CPU kernels for the first time; they are cached in {folder} for later starts"
        ]
        cpu_cache.compile_c_function(with_closure, SIGNATURE, {})
        assert len(caplog.records) == 1
    caplog.clear()
    pipeline._keeps_kernels.cache_clear()
    with caplog.at_level(logging.INFO):
        compile_thrice()
    assert not caplog.records, "it is read from the cache"


def test_compiling_at_each_start_is_announced(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(cpu_cache, "kernels_folder", lambda: None)
    pipeline._keeps_kernels.cache_clear()
    with caplog.at_level(logging.INFO):
        compile_thrice()
    assert [record.getMessage() for record in caplog.records] == [
        "Compiling CPU kernels; they cannot be cached on disk, so each start compiles them"
    ]


def test_a_numba_that_is_told_to_compile_nothing_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    with pytest.raises(ConfigError, match="NUMBA_DISABLE_JIT is set.*unset it"):
        compile_thrice()


def start(packages: Path, cache: Path, more: str = "", **keywords: object) -> subprocess.Popen[str]:
    """A process that imports caffepy from a folder, runs a kernel over several threads, and then does more."""
    environment = {**os.environ, "PYTHONPATH": str(packages), "XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, "-c", RUN_A_KERNEL + more]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=packages, **keywords)  # type: ignore[call-overload,no-any-return]


def test_nothing_is_written_beside_the_package(tmp_path: Path):
    """Two processes begin with an empty cache at the same time; a third one finds everything there."""
    packages, cache = tmp_path / "site-packages", tmp_path / "cache"
    source = Path(caffepy.__file__).parent
    shutil.copytree(source, packages / "caffepy", ignore=shutil.ignore_patterns("__pycache__"))
    before = {path for path in packages.rglob("*") if path.is_file()}
    both = [start(packages, cache) for _ in range(2)]
    assert [process.communicate(timeout=300)[0] for process in both] == ["0.0\n"] * 2

    compiled = {path for path in packages.rglob("*") if path.is_file()} - before
    assert {path.suffix for path in compiled} <= {".pyc"}, "Python's own, which pip knows and removes"
    (kernels,) = (cache / "caffepy").iterdir()
    assert kernels.name.startswith(f"kernels-{caffepy.__version__}-")
    kept = {path: path.stat().st_mtime_ns for path in kernels.iterdir()}
    assert any("_parallel_loop" in path.name for path in kept)
    assert not any(".tmp." in path.name for path in kept)
    assert start(packages, cache).communicate(timeout=300)[0] == "0.0\n"
    assert {path: path.stat().st_mtime_ns for path in kernels.iterdir()} == kept


@pytest.mark.parametrize(
    ("model", "shape", "most"), [("lenet/train_test", (8, 1, 28, 28), 26), ("mobilenet/train_val", (2, 3, 64, 64), 52)]
)
def test_a_first_iteration_compiles_few_kernels_and_a_second_process_none(
    tmp_path: Path, model: str, shape: tuple[int, ...], most: int
):
    """MobileNet's grouped convolutions have kernels with closures."""
    package = Path(caffepy.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(package), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    path = package / "models" / f"{model}.prototxt"
    command = [sys.executable, "-c", TRAIN_ONE_ITERATION, str(path), *map(str, shape)]
    kept = []
    for _ in range(2):
        subprocess.run(command, env=environment, cwd=tmp_path, check=True, timeout=300)
        kept.append({path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.nb?")})
    assert 0 < len({path for path in kept[0] if path.suffix == ".nbi"}) <= most
    assert kept[1] == kept[0]


def test_machine_code_may_name_numbas_runtime_which_is_not_compiled(tmp_path: Path):
    """As that of numba 0.60 does, at which LLVM ended processes."""
    package = Path(caffepy.__file__).parents[1]
    said = [start(package, tmp_path, SAY_WHAT_IS_KNOWN).communicate(timeout=300)[0] for _ in range(2)]
    assert said == ["0.0\nTrue False\n"] * 2


def test_a_full_disk_is_no_reason_to_stop(tmp_path: Path):
    process = start(
        Path(caffepy.__file__).parents[1],
        tmp_path,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)),
    )
    assert process.communicate(timeout=300)[0] == "0.0\n"
    assert all(path.stat().st_size <= 100 for path in tmp_path.rglob("*.nb?"))


# -- files in memory that lose pages ---------------------------------------------------------------------


BEGIN = """
import mmap, os, sys, threading
from caffepy.backend.cpu.jit.compiler import MappedFile
file = open(sys.argv[1], "w+b")
file.write(bytes([7]) * 5 * mmap.PAGESIZE)
file.flush()
mapped = MappedFile(file.fileno(), 5 * mmap.PAGESIZE)
"""


def run_mapped(path: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *options, "-c", BEGIN + text, str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("options", [(), ("-X", "faulthandler")])
def test_pages_that_a_file_has_lost_read_as_zeros(tmp_path: Path, options: tuple[str, ...]) -> None:
    done = run_mapped(
        tmp_path / "file",
        """
os.truncate(sys.argv[1], 2 * mmap.PAGESIZE)
other = threading.Thread(target=lambda: print(int(mapped.memory[: 3 * mmap.PAGESIZE].sum()) // mmap.PAGESIZE))
other.start()
other.join()
print(int(mapped.memory.sum()) // mmap.PAGESIZE, mapped.pages_lost)
os.truncate(sys.argv[1], 5 * mmap.PAGESIZE)
print(int(mapped.memory.sum()) // mmap.PAGESIZE, mapped.pages_lost)
again = MappedFile(file.fileno(), 5 * mmap.PAGESIZE)
print(int(again.memory.sum()) // mmap.PAGESIZE, again.pages_lost)
""",
        *options,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["14", "14", "3", "14", "3", "14", "0"]


@pytest.mark.parametrize("forgotten", [False, True])
def test_other_memory_raises_sigbus_as_ever(tmp_path: Path, forgotten: bool) -> None:
    """Also where a file was that is not mapped any more: the handler's table has forgotten it."""
    done = run_mapped(
        tmp_path / "file",
        f"""
memory, forgotten = mapped.memory, {forgotten}
other = mmap.mmap(file.fileno(), mmap.PAGESIZE)
os.truncate(sys.argv[1], 0)
if forgotten:
    del mapped
print("reading", flush=True)
memory[0] if forgotten else other[0]
""",
    )
    assert done.stdout == "reading\n"
    assert done.returncode == -signal.SIGBUS


def test_a_handler_that_came_later_is_not_lost(tmp_path: Path) -> None:
    """The next file that is mapped puts ours before it; what is not ours goes to it."""
    done = run_mapped(
        tmp_path / "file",
        """
import faulthandler
faulthandler.enable()
again = MappedFile(file.fileno(), 5 * mmap.PAGESIZE)
other = mmap.mmap(file.fileno(), mmap.PAGESIZE)
os.truncate(sys.argv[1], 0)
print(mapped.memory.sum(), again.memory.sum(), flush=True)
other[0]
""",
    )
    assert done.stdout == "0 0\n"
    assert done.returncode == -signal.SIGBUS and "Fatal Python error: Bus error" in done.stderr


def test_rows_of_the_table_are_used_again(tmp_path: Path) -> None:
    done = run_mapped(
        tmp_path / "file",
        """
for _ in range(3000):
    MappedFile(file.fileno(), 5)
kept = []
try:
    while len(kept) < 2000:
        kept.append(MappedFile(file.fileno(), 5))
except OSError as error:
    print(len(kept), error)
""",
    )
    assert (done.returncode, done.stdout) == (0, "1023 1024 files are mapped already\n"), done.stderr
