"""The CUDA backend: `Backend`'s primitives on one GPU, with CuPy's memory, own kernels, cuBLAS and cuDNN.

Owns one device's stream and library handles. All work is ordered on the stream; only `to_host`, `synchronize` and
`all_finite` wait for the device. Primitives that compute run on the thread's current stream, which `activate` sets to
the backend's. Primitives that allocate, fill, copy or move memory always run on the backend's stream, because nets are
also built outside `activate` (`CudaMemory`). Importing this module imports CuPy; import it only if a GPU is requested.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from caffepy.backend.cuda.convolution.algorithm import Resources
from caffepy.backend.cuda.convolution.autotune import Autotuner
from caffepy.backend.cuda.convolution.cache import PlanCache
from caffepy.backend.cuda.convolution.plan import CudaConvolution, TunedConvolution
from caffepy.backend.cuda.convolution.problem import Problem
from caffepy.backend.cuda.detection import CudaDetection
from caffepy.backend.cuda.device import (
    DeviceProperties,
    check_device,
    cupy,
    device_count,
    device_names,
    device_properties,
    import_cudnn,
)
from caffepy.backend.cuda.expression import CudaElementwise, CudaReduction
from caffepy.backend.cuda.flow import CudaFlow
from caffepy.backend.cuda.gemm import Blas, CudaDense
from caffepy.backend.cuda.graph import CudaAsyncCopy, CudaEvent, CudaGraph, CudaScalars, CudaTimedEvent, CudaTimer
from caffepy.backend.cuda.indexing import CudaIndexing
from caffepy.backend.cuda.memory import CudaCopy, CudaInput, Scratch, Staging
from caffepy.backend.cuda.normalisation import CudaNormalisation
from caffepy.backend.cuda.pooling import CudaPooling
from caffepy.backend.cuda.random import CudaRandom
from caffepy.backend.cuda.recurrent import CudaRecurrent
from caffepy.backend.cuda.softmax import CudaSoftmax
from caffepy.backend.interface import Backend
from caffepy.backend.types import (
    Array,
    AsyncCopy,
    DeviceScalars,
    DeviceTimer,
    Event,
    Graph,
    TimedEvent,
)
from caffepy.errors import ConfigError
from caffepy.utils.options import MATH, MATH_MODES

__all__ = ["CudaBackend", "DeviceProperties", "device_count", "device_names", "device_properties"]


class CudaBackend(
    CudaCopy,
    CudaElementwise,
    CudaReduction,
    CudaDense,
    CudaConvolution,
    CudaPooling,
    CudaNormalisation,
    CudaSoftmax,
    CudaRandom,
    CudaIndexing,
    CudaFlow,
    CudaRecurrent,
    CudaDetection,
    CudaInput,
    Backend,
):
    """One GPU for one solver thread.

    Args:
        device: CUDA device number.
        math: ``fp32`` for full float32 products, ``tf32`` to let tensor cores round factors to ten bits.
        autotune: whether to time convolution algorithms and keep the fastest.
        deterministic: whether every run must give the same bits.

    Raises:
        DeviceError: the GPU does not exist.
        MissingExtraError: cuDNN or its frontend is not installed.
    """

    asynchronous = True
    captures = captures_inference = True

    def __init__(self, device: int, math: str = MATH, autotune: bool = True, deterministic: bool = True) -> None:
        if math not in MATH_MODES:
            raise ConfigError(f"unknown math mode '{math}': use {' or '.join(MATH_MODES)}")
        check_device(device)
        cudnn = import_cudnn()
        self.name = f"cuda:{device}"
        self.math = math
        self.device = device
        self._cudnn = cudnn
        self._device = cupy.cuda.Device(device)
        with self._device:
            # Non-blocking: the legacy default stream, which other libraries use, would otherwise wait for it and be
            # waited for.
            self.stream = cupy.cuda.Stream(non_blocking=True)
        with self.activate():
            self._scratch = Scratch()
            self._blas = Blas(self.stream.ptr, math == "tf32", self._scratch)
            self._handle: Any = cudnn.create_handle()
            cudnn.set_stream(handle=self._handle, stream=self.stream.ptr)
        kind = f"{device_properties(device).name}; cuDNN {cudnn.backend_version()}"
        tuner, plans = Autotuner(autotune, kind), PlanCache(f"{kind}; frontend {cudnn.__version__}")
        self._resources = Resources(
            cudnn, self._handle, self._blas, self._scratch, math == "tf32", tuner, deterministic, plans
        )
        self._convolutions: dict[Problem, TunedConvolution] = {}
        self._staging = Staging(self.stream, self._scratch)
        self._closed = False

    def synchronize(self) -> None:
        self.stream.synchronize()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with self.activate():
            self.stream.synchronize()
            self._staging.close()
            # Plans of cuDNN go before the handle that they were made with.
            self._convolutions.clear()
            self._cudnn.destroy_handle(self._handle)
            self._blas.close()
            self._scratch.clear()
        # The pool keeps freed blocks for their stream, which nothing uses any more.
        cupy.get_default_memory_pool().free_all_blocks(stream=self.stream)

    def capture(self, *works: Callable[[], None]) -> Graph:
        self.capturing = True
        try:
            with self._on_stream():
                return CudaGraph(self.stream, works)
        finally:
            self.capturing = False

    def trim(self) -> None:
        self.stream.synchronize()
        cupy.get_default_memory_pool().free_all_blocks()

    def device_scalars(self, values: int, counters: int) -> DeviceScalars:
        with self._on_stream():
            return CudaScalars(self.stream, values, counters)

    def record_event(self) -> Event:
        return CudaEvent(self.stream)

    def record_timed_event(self) -> TimedEvent:
        return CudaTimedEvent(cupy.cuda.get_current_stream())

    def device_timer(self, count: int) -> DeviceTimer:
        with self._on_stream():
            return CudaTimer(count, self.stream)

    def copy_to_host_async(self, array: Array) -> AsyncCopy:
        return CudaAsyncCopy(self.stream, array)
