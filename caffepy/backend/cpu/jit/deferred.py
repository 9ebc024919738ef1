"""Kernels of modules that are imported before numba: Python interprets them until compilation would pay.

Importing numba, and what it imports for the first function, takes more than 0.5 s with the GIL held, as long as the
rest of a GPU process's start. Until then these functions run as plain Python:

    @part
    def word(file: Bytes, at: Int) -> Int: ...

    @deferred_kernel
    def walk(begin: Int, end: Int, file: Bytes) -> None: ...

    walk.run(...) if walk.should_compile(items, compiling=15_000, loading=4_000) else walk.interpret(...)

`cpu_count` is for code that divides work among threads before numba is imported.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from functools import cache, cached_property
from types import FunctionType
from typing import Any

Int = Any
"""Annotation: a 64-bit integer."""
Words = Any
"""Annotation: the first element of an int64 array."""
Bytes = Any
"""Annotation: the first element of a uint8 array."""

_PARTS: set[Any] = set()
"""The functions decorated with `part`."""


def part(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function that deferred kernels and Python may call."""
    _PARTS.add(function)
    return function


def read_at(descriptor: int, destination: int, count: int, offset: int) -> int:
    """Call POSIX's pread with an address, as the intrinsic of this name. Return the bytes read, -1 on error."""
    try:
        found = os.pread(descriptor, count, offset)
    except OSError:
        return -1
    ctypes.memmove(int(destination), found, len(found))
    return len(found)


class JitThreshold:
    """Counts work done without numba until importing it would have paid.

    Args:
        items: items whose interpretation takes as long as the import.
    """

    def __init__(self, items: int) -> None:
        self._items = items
        self.asked = 0
        """Items so far."""

    def ends(self, items: int) -> bool:
        """Return whether numba may be used for this work; True at once if it is already imported."""
        self.asked += items
        return self.asked > self._items or "numba" in sys.modules


class DeferredKernel:
    """A `Kernel` that is created at first use."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.interpret = function
        """The Python function, called with (begin, end, arguments); memoryviews are the fastest byte arrays."""
        self._threshold: JitThreshold | None = None
        self.__doc__ = function.__doc__

    def should_compile(self, items: int, compiling: int, loading: int) -> bool:
        """Return whether to run this work as machine code.

        Args:
            items: items of this work.
            compiling: as for `Kernel.should_compile`.
            loading: items whose interpretation takes as long as importing numba.
        """
        if "kernel" not in self.__dict__:
            if self._threshold is None:
                self._threshold = JitThreshold(loading)
            if not self._threshold.ends(items):
                return False
        return bool(self.kernel.should_compile(items, compiling))

    def run(self, threads: int, items: int, grain: int, *arguments: Any) -> None:
        """As `Kernel.run`."""
        self.kernel.run(threads, items, grain, *arguments)

    @cached_property
    def kernel(self) -> Any:
        """The `Kernel`; imports numba."""
        from caffepy.backend.cpu.jit.kernel import Kernel

        return Kernel(_compilable(self.interpret))


deferred_kernel = DeferredKernel
"""Decorator that makes a deferred kernel of a function."""


def _compilable(function: Any) -> Any:
    """Return a copy of a function that calls the compiled forms of its `part` functions."""
    from caffepy.backend.cpu.jit import vector

    names = {name: function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__}
    compiled = {name: compiled_part(value) for name, value in names.items() if _is_part(value)}
    compiled |= {name: vector.read_at for name, value in names.items() if value is read_at}
    copy = FunctionType(function.__code__, {**function.__globals__, **compiled}, function.__name__)
    copy.__annotations__, copy.__qualname__ = function.__annotations__, function.__qualname__
    copy.__module__, copy.__doc__ = function.__module__, function.__doc__
    return copy


def _is_part(value: Any) -> bool:
    return isinstance(value, FunctionType) and value in _PARTS


@cache
def compiled_part(function: Any) -> Any:
    """Return a `part` function as a `device_function`; imports numba."""
    from caffepy.backend.cpu.jit.kernel import device_function

    return device_function(_compilable(function))


def cpu_count() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
