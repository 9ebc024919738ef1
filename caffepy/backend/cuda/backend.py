"""The CUDA backend: `Backend`'s primitives on one GPU, with CuPy's memory, own kernels, cuBLAS and cuDNN.

Owns one device's stream and library handles. Everything is ordered on the stream; nothing waits for the device but
`to_host`, `synchronize` and `all_finite`. Primitives that compute run on the thread's current stream, which `activate`
makes the backend's. Those that allocate, fill, copy or move memory always run on the backend's stream: nets are also
built outside of `activate`. Import this module only when a GPU is asked for: it imports CuPy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from caffepy.backend import layout
from caffepy.backend.composite import Composite
from caffepy.backend.cuda import copy as cuda_copy
from caffepy.backend.cuda import lrn as cuda_lrn
from caffepy.backend.cuda import memory as cuda_memory
from caffepy.backend.cuda import pooling as cuda_pooling
from caffepy.backend.cuda import random as cuda_random
from caffepy.backend.cuda.batch_norm import BatchNormKernels
from caffepy.backend.cuda.box_loss import CudaBoxLoss
from caffepy.backend.cuda.convolution.algorithm import Resources
from caffepy.backend.cuda.convolution.autotune import Autotuner
from caffepy.backend.cuda.convolution.plan import CudaConvolution
from caffepy.backend.cuda.convolution.plan_cache import PlanCache
from caffepy.backend.cuda.convolution.problem import Problem
from caffepy.backend.cuda.device import (
    GIBIBYTE,
    DeviceProperties,
    check_device,
    cupy,
    device_count,
    device_names,
    device_properties,
    import_cudnn,
)
from caffepy.backend.cuda.elementwise import launch as cuda_elementwise
from caffepy.backend.cuda.elementwise import reduce as cuda_reduce
from caffepy.backend.cuda.elementwise.codegen import formula_of
from caffepy.backend.cuda.elementwise.recurrent import CudaRecurrent
from caffepy.backend.cuda.gemm.cublas import Blas
from caffepy.backend.cuda.gemm.small_product import Epilogue
from caffepy.backend.cuda.graph import CudaAsyncCopy, CudaEvent, CudaGraph, CudaScalars, CudaTimedEvent
from caffepy.backend.cuda.input import CudaInput
from caffepy.backend.cuda.rows.primitives import CudaRows
from caffepy.backend.cuda.softmax import SoftmaxKernels
from caffepy.backend.cuda.timer import CudaTimer
from caffepy.backend.detection_primitives import BoxLoss, BoxLossSettings
from caffepy.backend.elementwise import Expression, Kind
from caffepy.backend.handles import AsyncCopy, Convolution, DeviceScalars, DeviceTimer, Event, Graph, TimedEvent
from caffepy.backend.types import (
    DTYPES,
    Array,
    BatchNormState,
    Counter,
    Geometry,
    LrnWindow,
    RandomStream,
    gpu_workspace,
)
from caffepy.errors import ConfigError
from caffepy.options.solver import MATH_MODES

__all__ = ["CudaBackend", "DeviceProperties", "device_count", "device_names", "device_properties"]


class CudaBackend(CudaInput, CudaRecurrent, CudaRows, Composite):
    """One GPU for one solver thread.

    Args:
        device: CUDA's number of the GPU.
        math: ``fp32`` for products of full float32, ``tf32`` to let tensor cores round factors to ten bits.
        autotune: whether ways of computing a convolution are tried and the fastest kept.
        deterministic: whether every run must give the same bits.

    Raises:
        DeviceError: there is no such GPU.
        MissingExtraError: cuDNN or its frontend is not installed.
    """

    asynchronous = True
    captures = True
    dtypes = DTYPES
    mask_dtype = "uint8"
    keeps_lrn_scale = False
    computes_box_loss = True

    def __init__(self, device: int, math: str = "fp32", autotune: bool = True, deterministic: bool = True) -> None:
        if math not in MATH_MODES:
            raise ConfigError(f"unknown math mode '{math}': use {' or '.join(MATH_MODES)}")
        super().__init__()
        check_device(device)
        cudnn = import_cudnn()
        self.name = f"cuda:{device}"
        self.math = math
        self.device = device
        self._cudnn = cudnn
        self._device = cupy.cuda.Device(device)
        with self._device:
            self.stream = cupy.cuda.Stream(non_blocking=True)
        with self.activate():
            self._scratch = cuda_memory.Scratch()
            self._batch_norm = BatchNormKernels(self._scratch)
            self._softmax = SoftmaxKernels(self._scratch)
            self._blas = Blas(self.stream.ptr, math == "tf32", self._scratch)
            self._handle: Any = cudnn.create_handle()
            cudnn.set_stream(handle=self._handle, stream=self.stream.ptr)
        kind = f"{device_properties(device).name}; cuDNN {cudnn.backend_version()}"
        tuner, plans = Autotuner(autotune, kind), PlanCache(f"{kind}; frontend {cudnn.__version__}")
        self._resources = Resources(
            cudnn, self._handle, self._blas, self._scratch, math == "tf32", tuner, deterministic, plans
        )
        self._convolutions: dict[Problem, CudaConvolution] = {}
        self._staging = cuda_copy.Staging(self.stream, self._scratch)
        self._closed = False

    # -- the device ---------------------------------------------------------------------------------

    @contextmanager
    def activate(self) -> Iterator[None]:
        with self._device, self.stream:
            yield

    def _on_stream(self) -> AbstractContextManager[None]:
        """Make the backend's stream current within a `with` block; nothing where it is current already.

        Work on two streams has no order: a fill on the caller's stream could run before the zeros of the same array on
        the backend's. CuPy also keeps freed memory by stream: memory taken on the caller's could still be written to by
        work that another stream has not finished.
        """
        return nullcontext() if cupy.cuda.get_current_stream() is self.stream else self.activate()

    def synchronize(self) -> None:
        self.stream.synchronize()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with self.activate():
            self.stream.synchronize()
            self._staging.close()
            self._convolutions.clear()
            self._cudnn.destroy_handle(self._handle)
            self._blas.close()
            self._scratch.clear()
        cupy.get_default_memory_pool().free_all_blocks(stream=self.stream)

    def capture(self, work: Callable[[], None]) -> Graph:
        self.capturing = True
        try:
            with self._on_stream():
                return CudaGraph(self.stream, work)
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

    def device_description(self) -> str:
        properties = device_properties(self.device)
        return f"{properties.name} (device {self.device}, {properties.memory / GIBIBYTE:.1f} GiB)"

    # -- memory -------------------------------------------------------------------------------------

    def workspace(self, own: int) -> int:
        return gpu_workspace(own)

    def arena(self, size: int) -> Array:
        # Blocks that were freed stay in the pool, where they are too small to be part of an arena.
        cupy.get_default_memory_pool().free_all_blocks(stream=self.stream)
        return super().arena(size)

    @contextmanager
    def workspace_lease(self, buffer: Array | None) -> Iterator[None]:
        self._scratch.lease(buffer)
        try:
            yield
        finally:
            self._scratch.lease(None)

    def zeros(self, shape: tuple[int, ...], dtype: str = "float32") -> Array:
        with self._on_stream():
            array = cuda_memory.allocate(shape, dtype)
            array.data.memset_async(0, array.nbytes, self.stream)
        return array

    def view(self, flat: Array, shape: tuple[int, ...]) -> Array:
        return layout.view(flat, shape)

    def flat(self, array: Array) -> Array:
        return cuda_memory.flat(array)

    def reshaped(self, array: Array, shape: tuple[int, ...]) -> Array:
        with self._on_stream():
            return cuda_copy.reshaped(array, shape)

    def fill(self, array: Array, value: float) -> None:
        with self._on_stream():
            cuda_memory.fill(array, value)

    def copy(self, source: Array, destination: Array) -> None:
        with self._on_stream():
            cuda_copy.copy(source, destination)

    def add(self, source: Array, destination: Array) -> None:
        with self._on_stream():
            cuda_copy.add(source, destination)

    def from_host(self, host: Any, destination: Array) -> None:
        with self._on_stream():
            cuda_copy.upload(host, destination, self._scratch)

    def upload(self, host: Any, destination: Array) -> None:
        with self._on_stream():
            self._staging.upload(host, destination)

    def download(self, arrays: Sequence[Array]) -> list[Any]:
        with self._on_stream():
            return self._staging.download(arrays)

    def adopt(self, array: Any) -> Array | None:
        return cuda_memory.adopt(array, self.device)

    def to_host(self, array: Array) -> Any:
        with self._on_stream():
            return cuda_memory.download(array, self.stream)

    # -- elementwise and reductions -----------------------------------------------------------------

    def apply(
        self, expression: Expression, inputs: Sequence[Array | float], outputs: Sequence[Array], axis: int = 1
    ) -> None:
        cuda_elementwise.apply(expression, inputs, outputs, axis, self._scratch)

    def reduce(
        self,
        expression: Expression,
        inputs: Sequence[Array | float],
        outputs: Sequence[Array],
        axis: int = 1,
        accumulate: bool = False,
    ) -> None:
        cuda_reduce.reduce(expression, inputs, outputs, axis, accumulate, self._scratch)

    def gemm(
        self,
        a: Array,
        b: Array,
        out: Array,
        transpose_a: bool = False,
        transpose_b: bool = False,
        accumulate: bool = False,
    ) -> None:
        self._blas.gemm(a, b, out, transpose_a, transpose_b, accumulate)

    def gemm_and_apply(
        self,
        expression: Expression,
        a: Array,
        b: Array,
        channel: Array,
        out: Array,
        transpose_a: bool = False,
        transpose_b: bool = False,
    ) -> None:
        epilogue = Epilogue(formula_of(expression, Kind.EACH, Kind.CHANNEL), channel)
        if not self._blas.gemm_with_epilogue(a, b, out, transpose_a, transpose_b, epilogue):
            super().gemm_and_apply(expression, a, b, channel, out, transpose_a, transpose_b)

    # -- windows ------------------------------------------------------------------------------------

    def plan_convolution(
        self, x_shape: tuple[int, ...], weights_shape: tuple[int, ...], geometry: Geometry, dtype: str = "float32"
    ) -> Convolution:
        problem = Problem(tuple(x_shape), tuple(weights_shape), geometry, dtype)
        if problem not in self._convolutions:
            self._convolutions[problem] = CudaConvolution(problem, self._resources)
        return self._convolutions[problem]

    def convolve_and_add(
        self, plan: Convolution, x: Array, weights: Array, bias: Array | None, residual: Array, y: Array, relu: bool
    ) -> None:
        assert isinstance(plan, CudaConvolution)
        plan.forward(x, weights, bias, y, relu, residual=residual)

    def pool_max_forward(self, x: Array, y: Array, mask: Array, geometry: Geometry) -> None:
        cuda_pooling.max_forward(x, y, mask, geometry)

    def pool_max_backward(self, dy: Array, mask: Array, dx: Array, geometry: Geometry) -> None:
        cuda_pooling.max_backward(dy, mask, dx, geometry)

    def pool_average_forward(self, x: Array, y: Array, geometry: Geometry) -> None:
        cuda_pooling.average_forward(x, y, geometry)

    def pool_average_backward(self, dy: Array, dx: Array, geometry: Geometry) -> None:
        cuda_pooling.average_backward(dy, dx, geometry)

    def lrn_across_forward(self, x: Array, y: Array, scale: Array | None, window: LrnWindow) -> None:
        assert scale is None, "the backward pass works the scale out again"
        cuda_lrn.lrn_forward(x, y, window)

    def lrn_across_backward(
        self, x: Array, y: Array | None, scale: Array | None, dy: Array, dx: Array, window: LrnWindow
    ) -> None:
        assert y is None and scale is None, "they are worked out again"
        cuda_lrn.lrn_backward(x, dy, dx, window)

    # -- normalisation and activation ---------------------------------------------------------------

    def batch_norm_measure(self, x: Array, n: BatchNormState) -> None:
        self._batch_norm.measure(x, n)

    def batch_norm_measure_sums(self, sums: Array, elements: int, n: BatchNormState) -> None:
        self._batch_norm.measure_sums(sums, elements, n)

    def batch_norm_load(self, n: BatchNormState) -> None:
        self._batch_norm.load(n)

    def batch_norm_forward(
        self, x: Array, n: BatchNormState, y: Array, residual: Array | None = None, relu: bool = False,
        mask: Array | None = None,
    ) -> None:  # fmt: skip
        self._batch_norm.forward(x, n, y, residual, relu, mask)

    def batch_norm_backward_sums(
        self, x: Array, dys: Sequence[Array], n: BatchNormState, sums: Sequence[Array], relu: bool = False,
        mask: Array | None = None, total: Array | None = None,
    ) -> None:  # fmt: skip
        self._batch_norm.backward_sums(x, dys, n, sums, relu, mask, total)

    def batch_norm_backward_data(
        self, x: Array, dy: Array, n: BatchNormState, sums: Sequence[Array], dx: Array, relu: bool = False
    ) -> None:
        self._batch_norm.backward_data(x, dy, n, sums, dx, relu)

    def activation_backward(
        self, expression: Expression, y: Array, dy: Array, dx: Array, dbias: Array | None, accumulate: bool
    ) -> None:
        formula = formula_of(expression, Kind.EACH, Kind.EACH)
        self._batch_norm.activation_backward(formula, y, dy, dx, dbias, accumulate)

    def add_n(self, sources: Sequence[Array], destination: Array) -> None:
        self._batch_norm.add_n(sources, destination)

    def dropout(self, source: Array, destination: Array, ratio: float, stream: RandomStream, counter: Counter) -> None:
        cuda_random.dropout(source, destination, ratio, stream, counter)

    # -- detection ----------------------------------------------------------------------------------

    def box_loss(self, settings: BoxLossSettings, images: int, priors: int) -> BoxLoss:
        with self._on_stream():
            return CudaBoxLoss(settings, images, priors, self._scratch)

    # -- softmax ------------------------------------------------------------------------------------

    def softmax_forward(self, x: Array, y: Array, axis: int) -> None:
        self._softmax.forward(x, y, axis)

    def softmax_backward(self, y: Array, dy: Array, dx: Array, axis: int) -> None:
        self._softmax.backward(y, dy, dx, axis)

    def softmax_loss_forward(
        self,
        x: Array,
        labels: Array,
        probabilities: Array,
        totals: Array,
        bad_label: Array,
        axis: int,
        ignore_label: int | None,
    ) -> None:
        self._softmax.loss_forward(x, labels, probabilities, totals, bad_label, axis, ignore_label)

    def softmax_loss_backward(
        self,
        probabilities: Array,
        labels: Array,
        dx: Array,
        totals: Array | None,
        axis: int,
        ignore_label: int | None,
        scale: float,
    ) -> None:
        self._softmax.loss_backward(probabilities, labels, dx, totals, axis, ignore_label, scale)

    def smooth_loss_forward(
        self, probabilities: Array, labels: Array, totals: Array, axis: int, ignore_label: int | None, smoothing: float
    ) -> None:
        self._softmax.smooth_forward(probabilities, labels, totals, axis, ignore_label, smoothing)

    def smooth_loss_backward(
        self, labels: Array, dx: Array, totals: Array | None, axis: int, ignore_label: int | None, scale: float
    ) -> None:
        self._softmax.smooth_backward(labels, dx, totals, axis, ignore_label, scale)

    def label_ranks(
        self, x: Array, labels: Array, ranks: Array, bad_label: Array, axis: int, higher_wins: bool = False
    ) -> None:
        self._softmax.label_ranks(x, labels, ranks, bad_label, axis, higher_wins)

    # -- random numbers -----------------------------------------------------------------------------

    def random_uniform(self, out: Array, stream: RandomStream, counter: Counter) -> None:
        cuda_random.uniform(out, stream, counter)

    # -- health -------------------------------------------------------------------------------------

    def all_finite(self, array: Array) -> bool:
        with self._on_stream():
            return cuda_reduce.is_finite(array, self._scratch)
