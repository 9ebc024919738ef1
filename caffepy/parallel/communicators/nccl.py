"""The NCCL communicator: GPUs of one or several processes, on the solver thread's stream and on one beside it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from caffepy.backend.types import Array
from caffepy.errors import AbortedError, DeviceError, MissingExtraError, PeerError
from caffepy.parallel.communicators.collectives import Operation, Operator, Work
from caffepy.parallel.communicators.communicator import Communicator
from caffepy.parallel.communicators.nccl_compression import device_compressor
from caffepy.parallel.communicators.nccl_operations import Messages, NcclWork, enqueue, nccl_operator, nccl_type
from caffepy.parallel.communicators.nccl_stream import SideStream, SideWork
from caffepy.parallel.hardware.nccl_info import nccl_version

try:
    import cupy
    from cupy.cuda import nccl
except ImportError as error:
    raise MissingExtraError("CuPy", "cuda13", "to train on GPUs") from error

UniqueId = Any
"""NCCL's 128 bytes, as CuPy hands them out: bytes, before CuPy 14 a tuple."""

_ERRORS = (nccl.NcclError, cupy.cuda.runtime.CUDARuntimeError, KeyError, AttributeError)
"""What CuPy raises: KeyError at statuses that it cannot name, AttributeError once `close` let the communicator go."""
_LEAST_VERSION = 21000
"""2.10, the first with ncclAvg, as NCCL counts."""
_LOCK_SECONDS = 1.0
"""How long an abort waits for an operation that is being put on the stream: that can block if the stream is full."""


def check_nccl() -> None:
    """Refuse to start without an NCCL library that can average.

    Raises:
        MissingExtraError: CuPy cannot load it.
        DeviceError: it is too old.
    """
    if not nccl.available:
        raise MissingExtraError("nvidia-nccl-cu13", "cuda13", "to train on several GPUs")
    if int(nccl.get_version()) < _LEAST_VERSION:
        raise DeviceError(
            f"NCCL {nccl_version()} is too old: averages of gradients (ncclAvg) need 2.10 or later; "
            "pip install -U nvidia-nccl-cu13 (nvidia-nccl-cu12 for CUDA 12)"
        )


def new_unique_id() -> UniqueId:
    """What connects the communicators of one world; made by global rank 0 and handed to all others."""
    check_nccl()
    return nccl.get_unique_id()


def gpu_identity(device: int) -> str:
    """The PCI address of a GPU: its number depends on what each process is allowed to see."""
    return str(cupy.cuda.runtime.deviceGetPCIBusId(device))


def use_gpu(device: int) -> None:
    """Make a GPU the current one of this thread."""
    cupy.cuda.Device(device).use()


class NcclCommunicator:
    """A `GroupCommunicator` of arrays on GPUs.

    Made by all solver threads of all ranks at about the same time, each with its GPU current. Operations are put on
    the thread's current stream, averages that are begun on a stream beside it; they return at once and may be captured
    into a graph. What the host waits for goes through `host`.

    NVLink multicast is left as NCCL's environment has it.

    Args:
        size: devices in all.
        unique_id: from `new_unique_id`.
        rank: this device's number.
        host: connects the same devices through host memory.
        compress: how the averages that are begun travel, one of `options.COMPRESSIONS`.

    Raises:
        PeerError: NCCL could not connect them.
    """

    memory = "gpu"
    captures = True
    overlaps_compute = True

    def __init__(self, size: int, unique_id: UniqueId, rank: int, host: Communicator, compress: str = "none") -> None:
        check_nccl()
        self.rank = rank
        self.size = size
        self._host = host
        self._aborted = threading.Event()
        self._using = threading.Lock()
        self._messages = Messages()
        self._beside: SideStream | None = None
        self._halves = device_compressor(compress, size)
        self._comm: Any = None
        with self._translated("NCCL's connection of the GPUs"):
            self._comm = nccl.NcclCommunicator(size, unique_id, rank)

    def all_reduce(self, array: Array, average: bool = True) -> None:
        with self._translated("NCCL's all-reduce"), self._using:
            pointer, stream = array.data.ptr, cupy.cuda.get_current_stream().ptr
            operation = nccl_operator(Operator.AVG if average else Operator.SUM)
            self._comm.allReduce(pointer, pointer, array.size, nccl_type(array), operation, stream)

    def all_reduce_async(self, array: Array, timed: AbstractContextManager[None]) -> SideWork:
        """All-reduce on the side stream, after what is on the current one now."""
        with self._translated("NCCL's all-reduce"):
            return self._begin_average(array, timed)

    def _begin_average(self, array: Array, timed: AbstractContextManager[None]) -> SideWork:
        if self._beside is None:
            self._beside = SideStream()
        with self._using, self._beside.after_current(timed) as work:
            sent = array if self._halves is None else self._halves.shrink(array)
            pointer, stream = sent.data.ptr, cupy.cuda.get_current_stream().ptr
            operator = nccl_operator(Operator.AVG if self._halves is None else Operator.SUM)
            self._comm.allReduce(pointer, pointer, sent.size, nccl_type(sent), operator, stream)
            if self._halves is not None:
                self._halves.widen(sent, array)
        return work

    @property
    def compresses(self) -> bool:
        return self._halves is not None

    @property
    def reached(self) -> int:
        """How many of the averages that were begun one after the other the device has done; by any thread."""
        return 0 if self._beside is None else self._beside.reached

    def broadcast(self, array: Array, root: int = 0) -> None:
        with self._translated("NCCL's broadcast"), self._using:
            pointer, stream = array.data.ptr, cupy.cuda.get_current_stream().ptr
            self._comm.broadcast(pointer, pointer, array.size, nccl_type(array), root, stream)

    def start(self, operation: Operation) -> Work:
        with self._translated(f"NCCL's {operation.name}"), self._using:
            if operation.kind is None:
                message = self._messages.add(operation)
                return NcclWork(lambda: self._done(message), operation)
            self._messages.flush(self._comm)
            event = enqueue(self._comm, operation, self.rank, self.size)
        return NcclWork(lambda: self._done(event), operation)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return cupy.empty(shape, dtype)

    def wait(self, until: Callable[[], None] | None = None) -> None:
        """Wait until the current stream's operations are done, or for what `until` waits for.

        The interpreter lock is free meanwhile, so another thread's `abort` can end an operation that a peer never
        joins.

        Raises:
            AbortedError: `abort` was called.
            PeerError: NCCL lost a peer.
        """
        with self._translated("the GPU's work"):
            (until or cupy.cuda.get_current_stream().synchronize)()
            if not self._aborted.is_set():
                self._comm.check_async_error()

    def barrier(self) -> None:
        self._host.barrier()

    def sum(self, values: Any) -> Any:
        return self._host.sum(values)

    def abort(self) -> None:
        self._aborted.set()
        self._host.abort()
        held = self._using.acquire(timeout=_LOCK_SECONDS)
        if self._comm is not None:
            self._comm.abort()
        if held:
            self._using.release()

    def close(self) -> None:
        """Destroy the communicator; graphs that captured its calls must be gone, or NCCL waits for them forever."""
        self._host.close()
        with self._using:
            if self._comm is not None and not self._aborted.is_set():
                self._comm.destroy()
            self._comm = None

    def _done(self, started: Any) -> bool:
        """Whether an event or a message has come."""
        with self._translated("the GPU's work"):
            if not self._aborted.is_set():
                with self._using:
                    self._messages.flush(self._comm)
                self._comm.check_async_error()
            return bool(started.done)

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        if self._aborted.is_set():
            raise AbortedError("another solver thread failed")
        try:
            yield
        except _ERRORS as error:
            if self._aborted.is_set():
                raise AbortedError("another solver thread failed") from error
            raise PeerError(f"{what} failed: {error}") from error
        if self._aborted.is_set():
            raise AbortedError("another solver thread failed")
