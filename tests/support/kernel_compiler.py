"""Compiles the CUDA backend's kernels with NVRTC, which needs no GPU, and compares launches with what was compiled.

    python tests/support/kernel_compiler.py [--cuda 12] [--arch sm_80 sm_90] [--every 4]

compiles all kernels with every installed NVRTC, for each architecture in some minutes; `make test` compiles a few of
each kind (tests/unit/backend/test_cuda_compile.py).
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parents[1]
KERNELS = ROOT / "caffepy" / "backend" / "cuda" / "kernels"
OPTIONS = ("--std=c++17", "-ftz=true", "--device-as-default-execution-space")
"""What `cuda/compiler.py` gives to CuPy, and what CuPy 14 adds."""
_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\((.*?)\)", re.DOTALL)
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.([a-z]+)(\d+)[^,\[]*(?:\[(\d+)\])?")


@dataclass(frozen=True)
class RecordedKernel:
    """A kernel that the backend asked for.

    Args:
        text: the whole CUDA text.
        name: the kernel's.
        calls: the sizes of the arguments of its launches, in bytes.
    """

    text: str
    name: str
    calls: tuple[tuple[int, ...], ...]

    def runs_on(self, architecture: str) -> bool:
        """Whether the backend launches it there: kernels with products of TF32 are for 8.0 and later alone."""
        return "mma.sync" not in self.text or int(architecture.split("_")[1]) >= 80


class Nvrtc:
    """One version of NVIDIA's compiler.

    Args:
        path: libnvrtc.so.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        self.major = major.value
        self.version = f"{major.value}.{minor.value}"

    def compile(self, text: str, architecture: str, name: str = "kernel") -> bytes:
        """PTX for `compute_80` and the like, machine code for `sm_80`.

        Raises:
            ValueError: the text does not compile; with the compiler's words.
        """
        library, program = self._library, ctypes.c_void_p()
        options = [option.encode() for option in (*OPTIONS, f"-arch={architecture}")]
        assert library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None) == 0
        try:
            given = (ctypes.c_char_p * len(options))(*options)
            if library.nvrtcCompileProgram(program, len(options), given) != 0:
                log = self._get(program, "ProgramLog").decode(errors="replace").rstrip("\0\n")
                raise ValueError(f"{name} for {architecture} under NVRTC {self.version}:\n{log}")
            return self._get(program, "PTX" if architecture.startswith("compute") else "CUBIN")
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))

    def _get(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(self._library, f"nvrtcGet{what}")(program, buffer)
        return buffer.raw


def installed() -> list[Nvrtc]:
    """The compilers of NVIDIA's wheels for CUDA 12 and 13 that this Python finds."""
    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else [Path(path) for path in spec.submodule_search_locations or ()]
    paths = {path for folder in folders for path in folder.glob("*/lib/libnvrtc.so.1[23]")}
    return sorted(map(Nvrtc, sorted(paths)), key=lambda nvrtc: nvrtc.major)


def record(*net: Path) -> list[RecordedKernel]:
    """Every kernel that `cuda_runs.py` saw, or those of a net; in a process of its own, since it replaces CuPy."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "kernels.json"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": folder}
        command = [sys.executable, str(TESTS / "cuda_runs.py"), str(out), *map(str, net)]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        if result.returncode != 0:
            raise AssertionError(result.stdout + result.stderr)
        recorded = json.loads(out.read_text())
    return [RecordedKernel(k["text"], k["name"], tuple(map(tuple, k["calls"]))) for k in recorded]


def parameter_sizes(ptx: str, name: str) -> tuple[int, ...]:
    """Bytes of each parameter of a kernel."""
    entries = dict(_ENTRY.findall(ptx))
    assert name in entries, f"{name} is not among the kernels {sorted(entries)}"
    return tuple(int(bits) // 8 * int(count or 1) for _, bits, count in _PARAMETER.findall(entries[name]))


def check(nvrtc: Nvrtc, kernels: Sequence[RecordedKernel], architecture: str) -> None:
    """Compile kernels of one text to PTX; all their launches must have handed over as many bytes as they take.

    Raises:
        ValueError: the text does not compile.
        AssertionError: a launch differs.
    """
    text = kernels[0].text
    ptx = nvrtc.compile(text, architecture, kernels[0].name).decode()
    for kernel in kernels:
        wanted = parameter_sizes(ptx, kernel.name)
        for call in kernel.calls:
            assert call == wanted, f"{kernel.name} takes {wanted}, was launched with {call}:\n{text[-3000:]}"


@cache
def _file_texts() -> dict[str, str]:
    return {path.stem: path.read_text() for path in KERNELS.glob("*.cu")}


def file_kernels() -> set[tuple[str, str]]:
    """File and name of every kernel in the backend's .cu files."""
    names = set()
    for file, text in _file_texts().items():
        plain = re.sub(r"__launch_bounds__\([^)]*\)", "", text)
        names |= {(file, name) for name in re.findall(r'extern "C" __global__ void\s+(\w+)\(', plain)}
    return names


def files_of(kernel: RecordedKernel) -> list[str]:
    """The .cu files that a kernel's text consists of."""
    return [file for file, text in _file_texts().items() if text in kernel.text]


def architectures(nvrtc: Nvrtc) -> Iterator[str]:
    """Machine code that must be possible: CUDA 13 has none for Volta any more."""
    yield from (("sm_70",) if nvrtc.major == 12 else ())
    yield from ("sm_80", "sm_90")


def main() -> int:
    """Compile everything for everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda", type=int, help="12 or 13; all that are installed if left out")
    parser.add_argument("--arch", nargs="*", help="e.g. compute_80 (PTX, compared with launches), sm_90; default: all")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="every Nth kernel")
    args = parser.parse_args()
    compilers = [nvrtc for nvrtc in installed() if args.cuda in (None, nvrtc.major)]
    if not compilers:
        raise SystemExit("no NVRTC: pip install nvidia-cuda-nvrtc-cu12 nvidia-cuda-nvrtc")
    kernels = record()[:: args.every]
    failures = 0
    for nvrtc in compilers:
        for architecture in ("compute_80", *architectures(nvrtc)):
            if args.arch and architecture not in args.arch:
                continue
            begin = time.monotonic()
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                outcomes = list(pool.map(lambda kernel, n=nvrtc, a=architecture: _outcome(n, kernel, a), kernels))
            for text in sorted({text for text in outcomes if text}):
                print(text, flush=True)
            failures += sum(bool(text) for text in outcomes)
            took = time.monotonic() - begin
            print(f"NVRTC {nvrtc.version}, {architecture}: {len(kernels)} kernels, {took:.0f} s", flush=True)
    return int(failures > 0)


def _outcome(nvrtc: Nvrtc, kernel: RecordedKernel, architecture: str) -> str:
    if not kernel.runs_on(architecture):
        return ""
    try:
        if architecture.startswith("compute"):
            check(nvrtc, [kernel], architecture)
        else:
            nvrtc.compile(kernel.text, architecture, kernel.name)
    except (ValueError, AssertionError) as error:
        return str(error)
    return ""


if __name__ == "__main__":
    sys.exit(main())
