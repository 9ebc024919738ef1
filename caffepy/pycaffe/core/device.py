"""The devices that nets are made on, and the NumPy arrays through which a program reads and writes their blobs.

Caffe's `SyncedMemory` copies between host and device when either asks. Here the arrays that a program holds are copied
to the device before anything is computed and from it afterwards, so that between calls both have the same numbers.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.backend import Array, Backend, create_backend
from caffepy.backend.layout import address

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
def device_of(number: int | None, math: str = "tf32") -> Device:
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
