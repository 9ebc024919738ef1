"""CuPy and NCCL as far as process groups use them, on host memory; ranks are threads.

`install` puts them in the place of the real ones, for a process of its own. Shows that pointers, counts and numbers go
where NCCL's reference wants them, and which stream waits for which.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from subprocess_training import program_environment

from caffepy.distributed.communicators.communicator import Collective, Op, ReduceOp, round_to_bfloat16, widen_bfloat16
from caffepy.distributed.communicators.local import LocalCommunicator, ThreadGroup

TYPES = {7: np.float32, 6: np.float16, 8: np.float64, 2: np.int32, 4: np.int64, 1: np.uint8, 9: np.uint16}
OPERATORS = {0: ReduceOp.SUM, 1: ReduceOp.PRODUCT, 2: ReduceOp.MAX, 3: ReduceOp.MIN, 4: ReduceOp.AVG}
THREADS_STREAM = 77
groups: dict[bytes, ThreadGroup] = {}
lock = threading.Lock()
here = threading.local()


class Stream:
    """What is put on it happens at once; `done` keeps what it was asked for, to be looked at."""

    def __init__(self, non_blocking: bool = True, number: int = 78) -> None:
        self.ptr = number

    def __enter__(self) -> None:
        here.streams = [*streams(), self]

    def __exit__(self, *error: object) -> None:
        here.streams.pop()

    def wait_event(self, event: Event) -> None:
        log().append(f"stream {self.ptr} waits for stream {event.stream}")

    def synchronize(self) -> None:
        log().append(f"host waits for stream {self.ptr}")


def streams() -> list[Stream]:
    """The calling thread's, the current one last."""
    if not hasattr(here, "streams"):
        here.streams = [Stream(number=THREADS_STREAM)]
    return here.streams  # type: ignore[no-any-return]


def current_stream() -> Stream:
    return streams()[-1]


def log() -> list[str]:
    """What the calling thread's streams were asked for."""
    if not hasattr(here, "log"):
        here.log = []
    return here.log  # type: ignore[no-any-return]


class Array(np.ndarray):
    """NumPy's, with the attributes by which CuPy's are known."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {}

    @property
    def data(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(ptr=self.ctypes.data)


def array(values: Any) -> Array:
    """A copy on the simulated device."""
    return np.array(values).view(Array)


def at(pointer: int, count: int, kind: int) -> np.ndarray:
    """The numbers behind a pointer."""
    dtype = np.dtype(TYPES[kind])
    return np.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(pointer), dtype)


class NcclCommunicator:
    """NCCL's semantics; signatures as CuPy documents them."""

    def __init__(self, size: int, unique_id: bytes, rank: int) -> None:
        assert isinstance(unique_id, bytes) and len(unique_id) == 128
        with lock:
            group = groups.setdefault(unique_id, ThreadGroup(size))
        self.size, self.rank = size, rank
        self.local = LocalCommunicator(group, rank)

    def run(self, name: str, sent: Any, received: Any, op: int | None = None, peer: int | None = None) -> None:
        operator = None if op is None else OPERATORS[op]
        bfloat16 = received is not None and received.dtype == np.uint16
        work = self.local.start(Collective(Op(name), sent, received, operator, peer, compact=bfloat16))
        assert work.wait(300.0), name

    def allReduce(self, source: int, target: int, count: int, kind: int, op: int, stream: int) -> None:
        log().append(f"all-reduce of {count} {np.dtype(TYPES[kind])} on stream {stream}")
        assert stream == current_stream().ptr
        self.run("all_reduce", at(source, count, kind), at(target, count, kind), op)

    def reduce(self, source: int, target: int, count: int, kind: int, op: int, root: int, stream: int) -> None:
        assert stream == current_stream().ptr
        received = at(target, count, kind) if self.rank == root else None
        self.run("reduce", at(source, count, kind), received, op, root)

    def reduceScatter(self, source: int, target: int, count: int, kind: int, op: int, stream: int) -> None:
        assert stream == current_stream().ptr
        self.run("reduce_scatter", at(source, count * self.size, kind), at(target, count, kind), op)

    def broadcast(self, source: int, target: int, count: int, kind: int, root: int, stream: int) -> None:
        assert stream == current_stream().ptr
        own = self.rank == root
        self.run(
            "broadcast", at(source, count, kind) if own else None, None if own else at(target, count, kind), None, root
        )

    def allGather(self, source: int, target: int, count: int, kind: int, stream: int) -> None:
        assert stream == current_stream().ptr
        self.run("all_gather", at(source, count, kind), at(target, count * self.size, kind))

    def send(self, source: int, count: int, kind: int, peer: int, stream: int) -> None:
        assert stream == current_stream().ptr and (peer != self.rank or here.grouped is not None)
        self.run("send", at(source, count, kind), None, None, peer)

    def recv(self, target: int, count: int, kind: int, peer: int, stream: int) -> None:
        assert stream == current_stream().ptr
        if getattr(here, "grouped", None) is not None:
            here.grouped.append(lambda: self.run("receive", None, at(target, count, kind), None, peer))
        else:
            self.run("receive", None, at(target, count, kind), None, peer)

    def check_async_error(self) -> None:
        assert self.local is not None

    def abort(self) -> None:
        self.local.abort()

    def destroy(self) -> None:
        self.local.close()


def group_start() -> None:
    assert getattr(here, "grouped", None) is None
    here.grouped = []


def group_end() -> None:
    calls, here.grouped = here.grouped, None
    for call in calls:
        call()


class Event:
    """Everything is done when it is called."""

    done = True

    def __init__(self, disable_timing: bool = False) -> None:
        self.timed = not disable_timing
        self.stream: int | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.stream = (stream or current_stream()).ptr


class ConstantTable(bytearray):
    """Host memory that the device writes to."""

    @property
    def ptr(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self))


def copy_to_pinned(target: int, source: int, size: int, kind: int, stream: int) -> None:
    assert kind == 2 and stream == current_stream().ptr
    ctypes.memmove(target, source, size)


class Device:
    """A thread's current device."""

    def __init__(self, number: int) -> None:
        self.number = number

    def use(self) -> None:
        here.device = self.number


def elementwise(inputs: str, outputs: str, code: str, name: str) -> Any:
    """CuPy's ElementwiseKernel; what a kernel computes is known by its name."""

    def to_bfloat16(x: Array, factor: float, y: Array) -> None:
        round_to_bfloat16(np.asarray(x) * np.float32(factor), np.asarray(y))

    def from_bfloat16(x: Array, y: Array) -> None:
        widen_bfloat16(np.asarray(x), np.asarray(y))

    return {"caffepy_to_bfloat16": to_bfloat16, "caffepy_from_bfloat16": from_bfloat16}[name]


def install(gpus: int) -> None:
    """Take the place of CuPy in this process, on a machine of so many GPUs; CUDA_VISIBLE_DEVICES hides some."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = list(range(gpus)) if shown is None else list(map(int, shown.split(",")))
    cupy: Any = ModuleType("cupy")
    cuda: Any = ModuleType("cupy.cuda")
    nccl: Any = ModuleType("cupy.cuda.nccl")
    runtime: Any = ModuleType("cupy.cuda.runtime")
    numbers = {name: number for number, name in enumerate(("SUM", "PROD", "MAX", "MIN", "AVG"))}
    numbers.update({np.dtype(dtype).name.upper(): number for number, dtype in TYPES.items() if number != 9})
    for name, number in numbers.items():
        setattr(nccl, f"NCCL_{name}", number)
    nccl.available, nccl.NcclError, nccl.NcclCommunicator = True, RuntimeError, NcclCommunicator
    nccl.groupStart, nccl.groupEnd = group_start, group_end
    nccl.get_unique_id = lambda: bytes(range(128))
    nccl.get_version = lambda: 22803
    runtime.CUDARuntimeError = RuntimeError
    runtime.getDeviceProperties = lambda device: {"name": b"Simulated"}
    runtime.deviceGetPCIBusId = lambda device: f"0000:{visible[device]:02X}:00.0"
    runtime.getDevice, runtime.deviceEnablePeerAccess = lambda: here.device, lambda device: None
    runtime.getDeviceCount = lambda: len(visible)
    cuda.nccl, cuda.runtime, cuda.Event, cuda.Device = nccl, runtime, Event, Device
    cuda.get_current_stream, cuda.Stream, cuda.using_allocator = current_stream, Stream, nullcontext
    cuda.alloc_pinned_memory, runtime.memcpyAsync, runtime.memcpyDeviceToHost = ConstantTable, copy_to_pinned, 2
    cupy.arange = lambda count, dtype: np.arange(count, dtype=dtype).view(Array)
    cupy.multiply, cupy.copyto, cupy.ElementwiseKernel = np.multiply, np.copyto, elementwise
    cupy.cuda, cupy.float32, cupy.ndarray = cuda, np.float32, Array
    cupy.empty = lambda shape, dtype: np.empty(shape, dtype).view(Array)
    cupy.asarray = array
    cupy.zeros = lambda shape, dtype: np.zeros(shape, dtype).view(Array)
    sys.modules.update({"cupy": cupy, "cupy.cuda": cuda, "cupy.cuda.nccl": nccl, "cupy.cuda.runtime": runtime})


def run_simulated(code: str) -> list[str]:
    """The lines that a script prints, in a process of its own; it calls `install` before it imports caffepy."""
    environment = program_environment({})
    environment["PYTHONPATH"] = os.pathsep.join((str(Path(__file__).parent), environment["PYTHONPATH"]))
    script = [sys.executable, "-c", code]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
