"""A GPU that computes nothing: enough of CuPy, on NumPy's arrays, to run the CUDA backend's choice of kernels.

`Recorder` keeps the text of every kernel that is asked for and the sizes of the arguments it is launched with;
`cuda_runs.py` runs everything on it.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
CAPABILITY = "90"
MULTIPROCESSORS = 132
SHARED_BYTES = 227 * 1024


class Pointer:
    """What `ndarray.data` is in CuPy: an address, and copies that here do nothing."""

    def __init__(self, address: int) -> None:
        self.ptr = address

    def copy_from_device_async(self, *_: Any) -> None:
        """Copies nothing."""

    copy_from_host_async = copy_from_device_async
    copy_to_host_async = copy_from_device_async
    memset_async = copy_from_device_async

    def __add__(self, offset: int) -> Pointer:
        return Pointer(self.ptr + offset)


class FakeArray(np.ndarray):
    """CuPy's array, in host memory."""

    @property
    def data(self) -> Pointer:  # type: ignore[override]
        """The address."""
        return Pointer(self.__array_interface__["data"][0])

    def get(self, stream: Any = None, order: str = "C", out: Any = None) -> Any:
        """A NumPy array."""
        return np.array(self, order="C")


def empty(shape: Any, dtype: Any = "float32") -> FakeArray:
    """Zeros, so that nothing depends on chance."""
    return np.zeros(shape, dtype).view(FakeArray)


class Recorder:
    """The kernels that were asked for: their texts and names, and the sizes of the arguments of their launches."""

    def __init__(self) -> None:
        self.kernels: dict[tuple[str, str], set[tuple[int, ...]]] = {}

    def module(self, code: str, options: Sequence[str]) -> Any:
        """CuPy's RawModule."""
        assert tuple(options) == ("--std=c++17",)
        kinds = {"fill": Fill}
        return types.SimpleNamespace(
            get_function=lambda name: kinds.get(name, Kernel)(self.kernels.setdefault((code, name), set()))
        )

    def as_list(self) -> list[dict[str, Any]]:
        """For a file."""
        return [{"text": text, "name": name, "calls": sorted(calls)} for (text, name), calls in self.kernels.items()]


class Kernel:
    """A kernel that notes what it is launched with."""

    max_dynamic_shared_size_bytes = 0

    def __init__(self, calls: set[tuple[int, ...]]) -> None:
        self._calls = calls

    def __call__(self, grid: Any, block: Any, arguments: tuple[Any, ...], shared_mem: int = 0) -> None:
        assert all(1 <= n < 2**31 for n in (*grid, *block)), (grid, block)
        assert np.prod(block) <= 1024, block
        assert shared_mem <= max(48 * 1024, self.max_dynamic_shared_size_bytes), shared_mem
        self._calls.add(tuple(map(_size, arguments)))


class Fill(Kernel):
    """kernels/fill.cu, which computes: what the host reads back must be a number that it knows."""

    def __call__(self, grid: Any, block: Any, arguments: tuple[Any, ...], shared_mem: int = 0) -> None:
        super().__call__(grid, block, arguments, shared_mem)
        array, bits, _ = arguments
        np.ndarray.fill(array, np.array(bits).view(array.dtype)[()])


def _size(argument: Any) -> int:
    """Bytes of a kernel argument as CuPy passes it on."""
    if isinstance(argument, FakeArray):
        return 8
    if isinstance(argument, np.generic):
        return argument.itemsize
    return {int: 8, float: 8, bool: 1}[type(argument)]


@cache
def _device(number: int = 0) -> Any:
    device = MagicMock()
    device.compute_capability = CAPABILITY
    device.attributes = {"MultiProcessorCount": MULTIPROCESSORS, "MaxSharedMemoryPerBlockOptin": SHARED_BYTES}
    return device


def install(recorder: Recorder) -> None:
    """Put this where CuPy and cuDNN would be imported from."""
    runtime = MagicMock()
    runtime.CUDARuntimeError = type("CUDARuntimeError", (RuntimeError,), {})
    runtime.getDeviceCount.return_value = 1
    # Called for nearly every launch: a mock would take most of the time.
    runtime.getDevice = lambda: 0
    runtime.streamIsCapturing = lambda stream: False
    runtime.memGetInfo.return_value = (2**37, 2**37)
    runtime.getDeviceProperties.return_value = {
        "name": b"fake",
        "totalGlobalMem": 2**37,
        "major": 9,
        "minor": 0,
        "multiProcessorCount": MULTIPROCESSORS,
    }
    cuda = MagicMock()
    cuda.runtime, cuda.Device = runtime, _device
    cuda.driver.CUDADriverError = type("CUDADriverError", (RuntimeError,), {})
    cuda.memory.OutOfMemoryError = type("OutOfMemoryError", (MemoryError,), {})
    cuda.alloc_pinned_memory = lambda size: bytearray(size)
    cuda.get_elapsed_time.return_value = 1.0
    stream = MagicMock(ptr=0)
    cuda.Stream.return_value = stream
    cuda.get_current_stream = lambda: stream
    cupy = types.ModuleType("cupy")
    names = {
        "ndarray": FakeArray,
        "RawModule": recorder.module,
        "empty": empty,
        "zeros": empty,
        "dtype": np.dtype,
        "cuda": cuda,
        "copyto": np.copyto,
        "asarray": lambda array: np.asarray(array).view(FakeArray),
        "asnumpy": lambda array, stream=None: np.array(array),
        "ascontiguousarray": lambda array: np.ascontiguousarray(array).view(FakeArray),
        "flip": np.flip,
        "broadcast_to": lambda array, shape: np.broadcast_to(array, shape, subok=True),
        "get_default_memory_pool": MagicMock(),
    }
    for name, value in names.items():
        setattr(cupy, name, value)
    cudnn = MagicMock()
    cudnn.backend_version.return_value = 91900
    cudnn.__version__ = "1.18.0"
    # Without NVRTC's place kernels are left to CuPy, which is the recorder here.
    sys.modules.update({"cupy": cupy, "cudnn": cudnn, "cuda.pathfinder": None})  # type: ignore[dict-item]


class Nothing:
    """A candidate for convolutions that is always able and does nothing."""

    name = "nothing"

    def prepare(self) -> bool:
        """Always."""
        return True

    def keep(self) -> None:
        """Nothing."""

    def run(self, operands: Any) -> None:
        """Nothing."""


class EveryCandidate:
    """A tuner that runs all candidates there are."""

    enabled = True

    def will_time(self, task: Any, resources: Any) -> bool:
        """Whether kernels are compiled ahead: none, as each runs."""
        return False

    def choose(self, task: Any, families: Sequence[Any], operands: Any, resources: Any) -> Any:
        """The last one."""
        from caffepy.backend.cuda.convolution.autotune import Stopwatch, difference, largest, operands_for

        made = operands_for(task, None)
        difference(made.out, made.out)
        largest(made.out)
        candidates = [candidate for family in families for candidate in family.candidates() if candidate.prepare()]
        for candidate in candidates:
            Stopwatch(partial(candidate.run, operands or made)).elapsed(1)
        return candidates[-1]


@contextmanager
def fake_backend(math_mode: str) -> Iterator[Any]:
    """A CUDA backend without cuDNN's and cuBLAS's work."""
    from caffepy.backend import create_backend
    from caffepy.backend.cuda import gemm as dense
    from caffepy.backend.cuda.convolution import cudnn
    from caffepy.backend.cuda.convolution import plan as registry
    from caffepy.backend.cuda.convolution import rewritten as space_to_depth

    library = MagicMock()
    library.configure_mock(
        **{
            f"{name}.return_value": 0
            for name in (
                "cublasCreate_v2",
                "cublasSetStream_v2",
                "cublasSetWorkspace_v2",
                "cublasSetMathMode",
                "cublasSgemm_v2",
                "cublasGemmEx",
                "cublasGemmStridedBatchedEx",
                "cublasDestroy_v2",
            )
        }
    )
    dense._library = lambda: library  # type: ignore[assignment]
    for module in (registry, space_to_depth, cudnn):
        module.cudnn_candidates = lambda *_, **__: [Nothing()]  # type: ignore[attr-defined]
    registry.split_candidates = registry._copied = lambda *_: []  # type: ignore[assignment]
    backend: Any = create_backend(0, math=math_mode, autotune=False)
    backend._resources.tuner = EveryCandidate()
    with backend.activate():
        yield backend
