"""The NCCL communicator: GPUs of one or several processes, on the solver thread's stream and on a side stream."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from caffepy.backend.types import Array
from caffepy.distributed.communicators.communicator import (
    Collective,
    Communicator,
    Compressor,
    FinishedWork,
    Format,
    Op,
    PendingCollective,
    PolledWork,
    ReduceOp,
    piece_of,
    rows,
)
from caffepy.distributed.communicators.local import LocalCommunicator
from caffepy.distributed.communicators.nvlink import NvlinkAverage, all_linked
from caffepy.distributed.nccl_info import nccl_version
from caffepy.errors import AbortedError, DeviceError, PeerError
from caffepy.utils.installation import MissingExtraError, cuda_extra

try:
    import cupy
    from cupy.cuda import nccl
except ImportError as error:
    raise MissingExtraError("CuPy", cuda_extra(), "to train on GPUs") from error

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
        raise MissingExtraError("the NCCL library", cuda_extra(), "to train on several GPUs")
    if int(nccl.get_version()) < _MIN_VERSION:
        raise DeviceError(
            f"NCCL {nccl_version()} is too old: averages of gradients (ncclAvg) need 2.10 or later; "
            f"pip install -U nvidia-nccl-{cuda_extra().replace('cuda', 'cu')}"
        )


def new_unique_id() -> UniqueId:
    """What connects the communicators of one world; made by global rank 0 and handed to all others."""
    check_nccl()
    return nccl.get_unique_id()


def gpu_identity(device: int) -> str:
    """The PCI address of a GPU: its number depends on what each process is allowed to see."""
    return str(cupy.cuda.runtime.deviceGetPCIBusId(device))


def gpu_name(device: int) -> str:
    """The model of a GPU."""
    return str(cupy.cuda.runtime.getDeviceProperties(device)["name"].decode())


def current_gpu() -> int:
    """The number of this thread's current GPU."""
    return int(cupy.cuda.Device().id)


def use_gpu(device: int) -> None:
    """Make a GPU the current one of this thread."""
    cupy.cuda.Device(device).use()


class NcclCommunicator(Communicator):
    """Arrays on GPUs.

    Made by all solver threads of all ranks at about the same time, each with its GPU current. Collectives are put on
    the thread's current stream, `all_reduce_async` on a side stream; they return at once and may be captured in a CUDA
    graph. `barrier` and `sum`, which the host waits for, go through `host`.

    NVLink multicast is left as NCCL's environment has it. Gradients of GPUs of one process that NVLink connects are
    averaged by `NvlinkAverage`.

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
        self._nvlink: NvlinkAverage | None = None
        self._compressor = device_compressor(compress, size)
        self.compresses = self._compressor is not None
        self._comm: Any = None
        with self._translated("NCCL's connection of the GPUs"):
            # Returns when all devices have called it, with the GIL released.
            self._comm = nccl.NcclCommunicator(size, unique_id, rank)

    def start(self, collective: Collective) -> PendingCollective:
        with self._translated(f"NCCL's {collective.op.value}"):
            if collective.overlap is not None:
                return self._start_on_side_stream(collective.array, collective.overlap)
            with self._using:
                return self._start_on_current_stream(collective)

    def _start_on_current_stream(self, collective: Collective) -> PendingCollective:
        if collective.pattern is None:
            message = self._messages.add(collective)
            return PolledWork(lambda: self._is_done(message), collective)
        # Messages that were started before must precede the collective on the stream: the other ranks see the same
        # order.
        self._messages.flush(self._comm)
        self._enqueue(collective)
        if collective.blocking:
            return FinishedWork()  # for what follows on the stream; an event would be in the way of a capture
        event = record_event()
        return PolledWork(lambda: self._is_done(event), collective)

    def _start_on_side_stream(self, array: Array, timed: AbstractContextManager[None]) -> PendingCollective:
        """Start an average after what is on the current stream now."""
        if self._side_stream is None:
            self._side_stream = SideStream(self._is_done)
        compressor = self._compressor
        # The lock keeps `abort` from destroying the communicator while a call is being put on the stream.
        with self._using, self._side_stream.after_current(timed) as work:
            sent = array if compressor is None else compressor.compress(array)
            operator = ReduceOp.AVG if compressor is None else ReduceOp.SUM
            self._enqueue(Collective(Op.ALL_REDUCE, sent, sent, operator))
            if compressor is not None:
                compressor.decompress(sent, array)
        return work

    def _enqueue(self, collective: Collective) -> None:
        """Put a collective on the current stream."""
        mean = collective.op is Op.ALL_REDUCE and collective.operator is ReduceOp.AVG
        if mean and self._nvlink is not None and self._nvlink.holds(collective.array):
            self._nvlink.average(collective.array)
        else:
            enqueue(self._comm, collective, self.rank, self.size)

    @property
    def completed(self) -> int:
        return 0 if self._side_stream is None else self._side_stream.completed

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return cupy.empty(shape, dtype)

    def allocate_gradients(self, count: int) -> Array | None:
        """Memory that the kernel over NVLink reduces; None without NVLink, among processes, and with compression."""
        host = self._host
        if self.compresses or self.size == 1 or not isinstance(host, LocalCommunicator) or not all_linked(host):
            return None
        with self._translated("the GPUs' access to each other's memory"):
            self._nvlink = NvlinkAverage(host, count)
        return self._nvlink.memory

    def wait_on_device(self, wait: Callable[[], None] | None = None) -> None:
        # The GIL is free meanwhile, so another thread's abort can end a collective that a peer never joins.
        with self._translated("the GPU's work"):
            (wait or cupy.cuda.get_current_stream().synchronize)()
            if not self._aborted.is_set():
                # NCCL reports a broken connection only when it is asked.
                self._comm.check_async_error()

    def barrier(self) -> None:
        self._host.barrier()

    def sum(self, values: Any) -> Any:
        return self._host.sum(values)

    def abort(self) -> None:
        self._aborted.set()
        self._host.abort()
        if self._nvlink is not None:
            self._nvlink.stop()
        # A call that blocks because the stream is full ends only by the abort itself: so the lock is not waited for
        # without a limit.
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


# -- calls on the current stream -----------------------------------------------------------------------


_TYPES = {
    "uint8": 1,
    "int32": 2,
    "int64": 4,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "uint16": 9,  # bfloat16
}
"""ncclDataType_t; CuPy does not have a name for each in every version."""
_OPERATORS = {ReduceOp.SUM: 0, ReduceOp.PRODUCT: 1, ReduceOp.MAX: 2, ReduceOp.MIN: 3, ReduceOp.AVG: 4}
"""ncclRedOp_t."""


def nccl_type(array: Array) -> int:
    """The ncclDataType_t of an array's dtype; uint16 holds bfloat16."""
    return _TYPES[str(array.dtype)]


def enqueue(comm: Any, collective: Collective, rank: int, size: int) -> None:
    """Put a collective on the current stream; what follows on that stream sees the result."""
    stream = cupy.cuda.get_current_stream().ptr
    if collective.op is Op.BARRIER:
        # NCCL has no barrier; a sum of one number needs all ranks.
        token = cupy.zeros(1, cupy.float32)
        collective = Collective(Op.ALL_REDUCE, token, token, ReduceOp.SUM)
    if collective.op in (Op.GATHER, Op.SCATTER, Op.ALL_TO_ALL):
        _exchange(comm, collective, rank, size, stream)
    else:
        _call(comm, collective, stream)


def record_event(stream: Any = None) -> Any:
    """A new event without timing, recorded on a stream; None: the current one."""
    event = cupy.cuda.Event(disable_timing=True)
    event.record(stream)
    return event


def _call(comm: Any, collective: Collective, stream: int) -> None:
    """What NCCL has a call for."""
    sent, received, peer = collective.sent, collective.received, collective.peer
    one: Array = sent if sent is not None else received
    other: Array = one if received is None else received
    kind = nccl_type(one)
    operator = None if collective.operator is None else _OPERATORS[collective.operator]
    # NCCL does not look at the pointer of a side that has nothing to send or receive.
    source, target = one.data.ptr, other.data.ptr
    calls: dict[Op, Callable[[], None]] = {
        Op.ALL_REDUCE: lambda: comm.allReduce(source, target, one.size, kind, operator, stream),
        Op.REDUCE: lambda: comm.reduce(source, target, one.size, kind, operator, peer, stream),
        Op.REDUCE_SCATTER: lambda: comm.reduceScatter(source, target, other.size, kind, operator, stream),
        Op.BROADCAST: lambda: comm.broadcast(source, target, one.size, kind, peer, stream),
        Op.ALL_GATHER: lambda: comm.allGather(source, target, one.size, kind, stream),
    }
    calls[collective.op]()


def _exchange(comm: Any, collective: Collective, rank: int, size: int, stream: int) -> None:
    """What NCCL has no call for: pieces from rank to rank, in one group, so that none waits for another."""
    pattern = collective.pattern
    assert pattern is not None
    senders, receivers = pattern.senders(size, collective.peer), pattern.receivers(size, collective.peer)
    # Without a group the first send would block until its receiver has called, which may itself be sending.
    with _together():
        if rank in senders:
            for receiver in receivers:
                piece = piece_of(collective, receiver, size)
                comm.send(piece.data.ptr, piece.size, nccl_type(piece), receiver, stream)
        if rank in receivers:
            assert collective.received is not None
            for sender, piece in zip(senders, rows(collective.received, len(senders)), strict=True):
                comm.recv(piece.data.ptr, piece.size, nccl_type(piece), sender, stream)


@contextmanager
def _together() -> Iterator[None]:
    """Calls of NCCL of which none waits for another."""
    nccl.groupStart()
    try:
        yield
    finally:
        nccl.groupEnd()


@dataclass
class Message:
    """A send or receive, the stream that was current when it was started, and the event that it is done."""

    collective: Collective
    stream: Any
    event: Any = None

    @property
    def done(self) -> bool:
        """Whether the event has come."""
        return self.event is not None and bool(self.event.done)


class Messages:
    """Sends and receives that are put on their streams together, at the first wait for one of them.

    On a stream they would wait for each other in the order of the calls: two ranks that both start to receive and then
    send would never come to the sending.
    """

    def __init__(self) -> None:
        self._pending: list[Message] = []

    def add(self, collective: Collective) -> Message:
        """Keep a message for the next `flush`."""
        self._pending.append(Message(collective, cupy.cuda.get_current_stream()))
        return self._pending[-1]

    def flush(self, comm: Any) -> None:
        """Put all that are kept on their streams."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        with _together():
            for message in pending:
                array = message.collective.array
                call = comm.send if message.collective.op is Op.SEND else comm.recv
                call(array.data.ptr, array.size, nccl_type(array), message.collective.peer, message.stream.ptr)
        for message in pending:
            message.event = record_event(message.stream)


# -- the side stream -----------------------------------------------------------------------------------


_NUMBERS = 1024
"""Works that are counted before they are waited for; more than any net has buckets."""


class SideStream:
    """A second stream of a thread.

    Args:
        is_done: whether an event has come; raises what the connection or an abort has to say.
    """

    def __init__(self, is_done: Callable[[Any], bool]) -> None:
        self.is_done = is_done
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._spare_events: list[Any] = []
        self._started = self._waited_for = 0
        self._numbers = cupy.arange(_NUMBERS, dtype="int32")
        self._memory = cupy.cuda.alloc_pinned_memory(4)
        self._completed = np.frombuffer(self._memory, np.int32, 1)
        self._completed[0] = 0

    @property
    def completed(self) -> int:
        """How many works the device has done since all were waited for. Thread-safe.

        Counted anew from 1 with the first work that follows a wait for all of them.
        """
        return int(self._completed[0])

    @contextmanager
    def after_current(self, timed: AbstractContextManager[None]) -> Iterator[SideStreamWork]:
        """Make this the current stream within a `with` block, whose work comes after all that the other stream holds.

        Args:
            timed: entered where the work begins, left where it ends.
        """
        self._started += 1
        number = min(self._started, _NUMBERS - 1)
        work = SideStreamWork(self)
        # The exchange must come behind the kernels that make the gradients, and the events order the streams without
        # the host.
        work.begin.record(cupy.cuda.get_current_stream())
        self._stream.wait_event(work.begin)
        with self._stream:
            with timed:
                yield work
            # The count reaches the host by a copy on the stream: it can be captured in a graph, and the watchdog reads
            # it without a call of CUDA, which may hang.
            cupy.cuda.runtime.memcpyAsync(
                self._memory.ptr,
                self._numbers.data.ptr + 4 * number,
                4,
                cupy.cuda.runtime.memcpyDeviceToHost,
                self._stream.ptr,
            )
        work.end.record(self._stream)

    def take_event(self) -> Any:
        """An unused event, so that a capture creates none."""
        return self._spare_events.pop() if self._spare_events else cupy.cuda.Event(disable_timing=True)

    def release(self, *events: Any) -> None:
        """Give the events of a work back, which was waited for."""
        self._spare_events += events
        self._waited_for += 1
        # All works of this pass are done: the next pass counts from 1 again, also in a replayed graph, whose numbers
        # are those of its capture.
        if self._waited_for == self._started:
            self._started = self._waited_for = 0


class SideStreamWork(PendingCollective):
    """Work on the side stream, between two events."""

    def __init__(self, stream: SideStream) -> None:
        self._stream = stream
        self.begin, self.end = stream.take_event(), stream.take_event()

    def wait(self, seconds: float) -> bool:
        """Block the host; not for work that is being captured."""
        done = PolledWork(lambda: self._stream.is_done(self.end)).wait(seconds)
        if done:
            self._stream.release(self.begin, self.end)
        return done

    def synchronize(self, seconds: float = 0.0) -> bool:
        """Have the current stream wait; the host does not."""
        cupy.cuda.get_current_stream().wait_event(self.end)
        self._stream.release(self.begin, self.end)
        return True


# -- compression of gradients --------------------------------------------------------------------------


_ROUND = """
unsigned int bits = __float_as_uint(x * factor);
unsigned int upper = bits >> 16;
bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
y = (unsigned short)(is_nan ? upper | 0x40u : (bits + 0x7fffu + (upper & 1u)) >> 16);
"""
_WIDEN = "y = __uint_as_float((unsigned int)x << 16);"


def device_compressor(kind: str, size: int) -> Compressor | None:
    """The compressor of arrays on GPUs, on the current stream, which may be captured.

    The bits of bfloat16 are the host's, but for numbers below 1.2e-38 (subnormal ones), which GPUs take for 0.
    Arguments as in `compression.host_compressor`.
    """
    if kind == "fp16":
        form = Format("float16", _round_float16, lambda copy, array: cupy.copyto(array, copy))
    elif kind == "bf16":
        rounding = cupy.ElementwiseKernel("float32 x, float32 factor", "uint16 y", _ROUND, "caffepy_to_bfloat16")
        widening = cupy.ElementwiseKernel("uint16 x", "float32 y", _WIDEN, "caffepy_from_bfloat16")
        form = Format("uint16", rounding, widening)
    else:
        return None
    return Compressor(form, size, cupy.empty, lambda array: int(array.data.ptr))


def _round_float16(array: Array, factor: float, copy: Array) -> None:
    cupy.multiply(array, factor, out=copy, casting="unsafe")
