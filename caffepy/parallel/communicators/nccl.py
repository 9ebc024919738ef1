"""The NCCL communicator: GPUs of one or several processes, on the solver thread's stream and on a side stream."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from caffepy.backend.types import Array
from caffepy.errors import AbortedError, DeviceError, MissingExtraError, PeerError
from caffepy.parallel.communicators.collectives import Collective, FinishedWork, Op, Operator, PolledWork, Work
from caffepy.parallel.communicators.communicator import Communicator
from caffepy.parallel.communicators.nccl_compression import device_compressor
from caffepy.parallel.communicators.nccl_operations import Messages, enqueue, record_event
from caffepy.parallel.communicators.nccl_stream import SideStream
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
_MIN_VERSION = 21000
"""2.10, the first with ncclAvg, as NCCL counts."""
_LOCK_SECONDS = 1.0
"""How long an abort waits for a collective that is being put on the stream: that can block if the stream is full."""


def check_nccl() -> None:
    """Refuse to start without an NCCL library that can average.

    Raises:
        MissingExtraError: CuPy cannot load it.
        DeviceError: it is too old.
    """
    if not nccl.available:
        raise MissingExtraError("nvidia-nccl-cu13", "cuda13", "to train on several GPUs")
    if int(nccl.get_version()) < _MIN_VERSION:
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


class NcclCommunicator(Communicator):
    """Arrays on GPUs.

    Made by all solver threads of all ranks at about the same time, each with its GPU current. Collectives are put on
    the thread's current stream, `all_reduce_async` on a side stream; they return at once and may be captured in a CUDA
    graph. `barrier` and `sum`, which the host waits for, go through `host`.

    NVLink multicast is left as NCCL's environment has it.

    Args:
        size: devices in all.
        unique_id: from `new_unique_id`.
        rank: this device's number.
        host: connects the same devices through host memory.
        compress: how `all_reduce_async` travels, one of `defaults.COMPRESSIONS`.

    Raises:
        PeerError: NCCL could not connect them.
    """

    memory = "gpu"
    capturable = True
    asynchronous = True
    overlaps = True

    def __init__(self, size: int, unique_id: UniqueId, rank: int, host: Communicator, compress: str = "none") -> None:
        check_nccl()
        super().__init__(rank, size)
        self._host = host
        self._aborted = threading.Event()
        self._using = threading.Lock()
        self._messages = Messages()
        self._side_stream: SideStream | None = None
        self._compressor = device_compressor(compress, size)
        self.compresses = self._compressor is not None
        self._comm: Any = None
        with self._translated("NCCL's connection of the GPUs"):
            self._comm = nccl.NcclCommunicator(size, unique_id, rank)

    def start(self, collective: Collective) -> Work:
        with self._translated(f"NCCL's {collective.op.value}"):
            if collective.overlap is not None:
                return self._start_on_side_stream(collective.array, collective.overlap)
            with self._using:
                return self._start_on_current_stream(collective)

    def _start_on_current_stream(self, collective: Collective) -> Work:
        if collective.pattern is None:
            message = self._messages.add(collective)
            return PolledWork(lambda: self._is_done(message), collective)
        self._messages.flush(self._comm)
        enqueue(self._comm, collective, self.rank, self.size)
        if collective.blocking:
            return FinishedWork()  # for what follows on the stream; an event would be in the way of a capture
        event = record_event()
        return PolledWork(lambda: self._is_done(event), collective)

    def _start_on_side_stream(self, array: Array, timed: AbstractContextManager[None]) -> Work:
        """Start an average after what is on the current stream now."""
        if self._side_stream is None:
            self._side_stream = SideStream(self._is_done)
        compressor = self._compressor
        with self._using, self._side_stream.after_current(timed) as work:
            sent = array if compressor is None else compressor.compress(array)
            operator = Operator.AVG if compressor is None else Operator.SUM
            enqueue(self._comm, Collective(Op.ALL_REDUCE, sent, sent, operator), self.rank, self.size)
            if compressor is not None:
                compressor.decompress(sent, array)
        return work

    @property
    def completed(self) -> int:
        return 0 if self._side_stream is None else self._side_stream.completed

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return cupy.empty(shape, dtype)

    def wait_on_device(self, wait: Callable[[], None] | None = None) -> None:
        # The GIL is free meanwhile, so another thread's abort can end a collective that a peer never joins.
        with self._translated("the GPU's work"):
            (wait or cupy.cuda.get_current_stream().synchronize)()
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

    def _is_done(self, started: Any) -> bool:
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
