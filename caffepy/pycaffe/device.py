"""Where pycaffe computes: devices, the host arrays of their blobs, process-wide settings, and the timer.

A program reads and writes blobs through NumPy arrays. Caffe's `SyncedMemory` copies between host and device when either
asks. Here the arrays that a program holds are copied to the device before anything is computed and from it afterwards,
so that between calls both have the same numbers.

Process-wide settings such as `caffe.set_mode_gpu()` are for nets and solvers created afterwards. The timer measures
host or GPU work (pycaffe's Timer; Caffe's `benchmark.cpp`).
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.backend import Array, Backend, create_backend
from caffepy.backend.types import HostTimedEvent, TimedEvent, address
from caffepy.data.sharding import Shard
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.python import ask_place
from caffepy.pycaffe.errors import ArgumentError, whole_number
from caffepy.utils.glog import LEVELS, GlogFormatter, StderrHandler
from caffepy.utils.options import MATH, MATH_MODES

logger = logging.getLogger("caffepy.pycaffe")


# -- devices and host arrays ---------------------------------------------------------------------------

HostArray = NDArray[np.float32]
_Key = tuple[int, tuple[int, ...], tuple[int, ...]]


class _Copy:
    """A host array that a program holds or has just been given, and the device array that it is a copy of."""

    def __init__(self, backend: Backend, array: Array) -> None:
        self._backend = backend
        self._array = array
        self._memory: HostArray = np.empty(array.shape, np.float32)
        """Outlives the arrays that the program gets: what it wrote before it released them is uploaded later."""
        self._memory[...] = backend.to_host(array)
        self._known = self._memory.copy()
        """The numbers that both had last."""
        self._given: Callable[[], HostArray | None] = _nothing

    def is_held(self) -> bool:
        """Whether the program holds an array of it."""
        return self._given() is not None

    def give(self) -> HostArray:
        """An array for the program; all have one base, which lives as long as the program holds one."""
        given = self._given()
        if given is None:
            given = _owner_of(self._memory)
            self._given = weakref.ref(given)
        view: HostArray = given.view()
        return view

    def upload(self) -> None:
        """Copy to the device what the program has changed, and only then: arrays of another shape may share memory."""
        if not np.array_equal(_bits(self._memory), _bits(self._known)):
            self._known[...] = self._memory  # another thread may be writing: what comes later is uploaded later
            self._backend.from_host(self._known, self._array)

    def download(self) -> None:
        """Copy the device's numbers to the host where they changed: another thread may be writing the others."""
        found = self._backend.to_host(self._array)
        if not np.array_equal(_bits(np.ascontiguousarray(found)), _bits(self._known)):
            self._known[...] = found
            self._memory[...] = self._known


def _nothing() -> None:
    return None


def _owner_of(memory: Any) -> HostArray:
    """An array of the same memory that its views, and no array of caffepy's, have as their base."""
    return np.asarray(memoryview(memory))


def _bits(array: HostArray) -> NDArray[np.uint32]:
    """Bit patterns, among which NaN equals itself."""
    return array.reshape(-1).view(np.uint32)


class HostArrays:
    """The host arrays of one device's blobs.

    Args:
        backend: the device.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._copies: dict[_Key, _Copy] = {}
        self._lock = threading.Lock()

    def of(self, array: Array) -> HostArray:
        """A C-contiguous float32 array of the numbers of a device array, in logical order.

        What is written into it reaches the device; it is the very memory where that is possible. Its `base` lives as
        long as the program holds the array or a view of it.
        """
        if isinstance(array, np.ndarray) and array.dtype == np.float32 and array.flags.c_contiguous:
            view: HostArray = _owner_of(array).view()
            return view
        key = (address(array), tuple(array.shape), tuple(array.strides))
        with self._lock:
            found = self._copies.get(key)
            others = [copy for (pointer, *_), copy in self._copies.items() if pointer == key[0] and copy is not found]
            for other in others:
                other.upload()  # what the program wrote there comes before what it is going to write here
            if found is None:
                found = self._copies[key] = _Copy(self._backend, array)
            elif others:
                found.upload()
                found.download()
            return found.give()

    def write(self, array: Array, numbers: NDArray[Any]) -> bool:
        """Copy numbers of the same shape to a device array; False where the program has, or had, a host array of it.

        Spares copying the device's numbers to a new host array first.
        """
        place = address(array)
        with self._lock:
            held = any(pointer == place for pointer, *_ in self._copies)
        if numbers.dtype.kind not in "biuf" or held:
            return False
        self._backend.upload(numbers, array)
        return True

    def upload(self) -> None:
        """Copy to the device what the program has written."""
        with self._lock:
            held = {key: copy for key, copy in self._copies.items() if copy.is_held()}  # asked before copying
            for copy in self._copies.values():
                copy.upload()
            self._copies = held

    def download(self) -> None:
        """Bring the arrays that the program holds up to date."""
        with self._lock:
            for copy in self._copies.values():
                copy.download()


class Device:
    """One device of this process; threads take turns in computing on it.

    Args:
        backend: its primitives.
        arrays: through which the program sees its blobs; None: its own.
    """

    def __init__(self, backend: Backend, arrays: HostArrays | None = None) -> None:
        self.backend = backend
        self.arrays = arrays or HostArrays(backend)
        self.turn = threading.RLock()
        """Held by the thread that computes, for all of a pass: passes of several threads follow one another."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let the calling thread use the backend within a block that changes nothing that the program can see."""
        with self.backend.activate():
            yield

    @contextmanager
    def computing(self) -> Iterator[None]:
        """A block that computes on the device: it sees what the program has written, the program then its results."""
        with self.turn, self.backend.activate():
            self.arrays.upload()
            try:
                yield
            finally:
                self.arrays.download()

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of the program's from within a `computing` block."""
        self.arrays.download()
        try:
            return function(*arguments)
        finally:
            self.arrays.upload()


@cache
def device_of(number: int | None, math: str = MATH) -> Device:
    """The device of a number, None: the CPU; the same object each time.

    Args:
        number: of a GPU.
        math: products of float32 numbers there, one of MATH_MODES.

    Raises:
        DeviceError: it is not there.
        MissingExtraError: CuPy or cuDNN is not installed.
    """
    return Device(create_backend(number, math=math))


def cpu_device() -> Device:
    """The CPU, for one net or solver: workspace of its own, so that threads run several nets at the same time."""
    return Device(create_backend(None), device_of(None).arrays)


# -- settings ------------------------------------------------------------------------------------------


VARIABLE = "CAFFEPY_LAYER_BY_LAYER"
"""Environment variable: 1 acts like `set_layer_by_layer()`, for unmodified scripts."""

MATH_VARIABLE = "CAFFEPY_MATH"
"""Environment variable: the argument of `set_math`, for unmodified scripts."""


@dataclass
class Mode:
    """The settings; `mode` is the only instance.

    Args:
        gpu: whether nets are created on a GPU.
        device: index of the GPU.
        seed: set by `set_random_seed`; None: each net draws its own seed.
        drawn: the number of seeds derived from `seed`.
        solver_count: the number of processes in the training.
        solver_rank: the rank of this process.
        multiprocess: whether solvers are processes that read different records.
        layer_by_layer: whether nets compute each layer separately in every pass.
        math: precision of float32 products on a GPU, one of MATH_MODES.
    """

    gpu: bool = False
    device: int = 0
    seed: int | None = None
    drawn: int = 0
    solver_count: int = 1
    solver_rank: int = 0
    multiprocess: bool = False
    layer_by_layer: bool = os.environ.get(VARIABLE, "0") not in ("", "0")
    math: str = os.environ.get(MATH_VARIABLE, MATH)

    def present_device(self) -> Device:
        """Return the device of new nets; the same object for a GPU each time.

        Raises:
            DeviceError: the device does not exist.
            MissingExtraError: CuPy or cuDNN is not installed.
            ConfigError: CAFFEPY_MATH is none of MATH_MODES.
        """
        return device_of(self.device, self.math) if self.gpu else cpu_device()

    def next_seed(self) -> int:
        """Return the seed of the next net: the given seed first after `set_random_seed`, then seeds derived from it."""
        if self.seed is None:
            return secrets.randbits(31)
        self.drawn += 1
        if self.drawn == 1:
            return self.seed
        return int(np.random.SeedSequence([self.seed, self.drawn]).generate_state(1)[0] >> 1)

    def shard(self, phase: int = caffe_pb2.TRAIN) -> Shard:
        """Return the shard of the records that data layers read."""
        if self.multiprocess and phase == caffe_pb2.TRAIN:
            return Shard(self.solver_rank, self.solver_count)
        return Shard()


mode = Mode()


def set_mode_cpu() -> None:
    """Create nets on the CPU from now on (the default)."""
    mode.gpu = False


def set_mode_gpu() -> None:
    """Create nets on the GPU of `set_device` from now on. If it does not exist, creating a net raises DeviceError."""
    mode.gpu = True


def set_device(device_id: int) -> None:
    """Choose the GPU of nets created from now on; `set_mode_gpu` is also needed, as in BVLC's Caffe.

    Raises:
        ArgumentError: the number is negative.
    """
    mode.device = whole_number("set_device", device_id, 0)


def set_devices(device_ids: Sequence[int]) -> None:
    """Create nets on the first of these GPUs from now on (NVIDIA's Caffe); one net runs on one GPU.

    Raises:
        ArgumentError: the list is empty or has a negative number.
    """
    if not device_ids:
        raise ArgumentError("set_devices([]): give the number of at least one GPU")
    set_device(device_ids[0])
    set_mode_gpu()


def set_layer_by_layer(wanted: bool = True) -> None:
    """Make nets created from now on compute each layer separately in every pass. Not in Caffe.

    Otherwise a TEST net whose hidden blobs are not read is folded; its outputs then differ in rounding.
    """
    mode.layer_by_layer = bool(wanted)


def set_math(math: str) -> None:
    """Choose the precision of float32 products on GPUs for nets created from now on. Not in Caffe.

    Args:
        math: "tf32" (default, as in `caffepy train`): tensor cores with 10-bit mantissas; "fp32": full precision.

    Raises:
        ArgumentError: `math` is neither.
    """
    if math not in MATH_MODES:
        raise ArgumentError(f"set_math({math!r}): give one of {', '.join(MATH_MODES)}")
    mode.math = math


def set_random_seed(seed: int) -> None:
    """Seed fillers and random layers of nets created from now on; a solver's random_seed takes precedence.

    Raises:
        ArgumentError: the number is negative.
    """
    mode.seed, mode.drawn = whole_number("set_random_seed", seed, 0), 0


def solver_count() -> int:
    """Return the number of solvers in the training: the devices of `caffepy train`, or the number that was set.

    In a net whose passes run on one device it is 1: a test net with a Python layer.
    """
    place = ask_place()
    return mode.solver_count if place is None else place[1]


def set_solver_count(count: int) -> None:
    """Set the number of processes in the training.

    Raises:
        ArgumentError: the number is less than 1.
    """
    mode.solver_count = whole_number("set_solver_count", count, 1)


def solver_rank() -> int:
    """Return the rank of the calling solver thread in `caffepy train`, or the rank that was set; see `solver_count`."""
    place = ask_place()
    return mode.solver_rank if place is None else place[0]


def set_solver_rank(rank: int) -> None:
    """Set the rank of this process; rank 0 writes the log and the snapshots.

    Raises:
        ArgumentError: the number is negative.
    """
    mode.solver_rank = whole_number("set_solver_rank", rank, 0)


def set_multiprocess(multiprocess: bool) -> None:
    """Set whether solvers are processes; data layers of training nets then read different records."""
    mode.multiprocess = bool(multiprocess)


# -- the log -------------------------------------------------------------------------------------------

_handler = StderrHandler()
_handler.setFormatter(GlogFormatter())


def init_log(level: int = 0, stderr: bool = True) -> None:
    """Show the log on stderr in glog's format. Without this call, Python's logging shows only warnings.

    Args:
        level: the lowest severity shown: 0 all, 1 warnings, 2 errors, 3 fatal errors.
        stderr: False shows nothing; Caffe then writes to files.
    """
    package = logging.getLogger("caffepy")
    package.removeHandler(_handler)
    if stderr:
        package.addHandler(_handler)
    package.setLevel(LEVELS[min(max(level, 0), len(LEVELS) - 1)])
    package.propagate = False


def log(message: str) -> None:
    """Log a line, or each line of a text."""
    for line in message.split("\n"):
        logger.info("%s", line, stacklevel=2)


# -- the timer -----------------------------------------------------------------------------------------


class Timer:
    """Measures milliseconds between `start` and `stop`; after `set_mode_gpu`, on the GPU's stream."""

    def __init__(self) -> None:
        self._start: TimedEvent | None = None
        self._stop: TimedEvent | None = None

    def start(self) -> None:
        """Start the timer. No effect if it is running."""
        if self._start is None or self._stop is not None:
            self._start, self._stop = _now(), None

    def stop(self) -> None:
        """Stop the timer if it is running."""
        if self._start is not None and self._stop is None:
            self._stop = _now()

    @property
    def ms(self) -> float:
        """Stop the timer and return milliseconds; 0 if it was never started."""
        if self._start is None:
            logger.warning("a Timer that was never started has no time; call start() and stop() first")
            return 0.0
        self.stop()
        assert self._stop is not None
        return self._stop.seconds_since(self._start) * 1000.0


def _now() -> TimedEvent:
    """Record an event after the queued work, on the host or on the GPU's stream."""
    if not mode.gpu:
        return HostTimedEvent()
    backend = mode.present_device().backend
    with backend.activate():
        return backend.record_timed_event()
