"""Compiled CPU kernels, and captured kernel calls, which are replayed without Python.

A kernel is a plain function over a range of items, with raw pointers and numbers as arguments:

    @kernel
    def scale(begin: Int, end: Int, x: Floats, y: Floats, factor: Float) -> None:
        for i in range(begin, end):
            y[i] = factor * x[i]

    scale.run(threads, items=n, grain=4096, x, y, 2.0)

The first call compiles it to a C function of one common signature (argument block, begin, end) and caches it on disk
(compiler.py). All kernels share one parallel loop (threads.py). The functions that a kernel calls are compiled with it,
once. This makes a cold kernel far cheaper to compile than a separate function with `parallel=True`.

A captured sequence of kernel calls becomes one program. Between two kernels of a net Python takes about 40 us on one
thread, as long as the kernels of small layers.
"""

from __future__ import annotations

import ctypes
import inspect
import math
import struct
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, cached_property
from itertools import groupby
from statistics import median
from types import FunctionType
from typing import Any

import numpy as np
from numba import types

from caffepy.backend.cpu.jit import compile_helper
from caffepy.backend.cpu.jit.compiler import (
    NotKeptError,
    PartDispatcher,
    compile_c_function,
    compile_kernel,
    file_stamp,
    kernels_stamp,
)
from caffepy.backend.cpu.jit.threads import KERNEL_SIGNATURE, THREADS, Command, JointCalls, call_in_turn
from caffepy.backend.cpu.jit.vector import as_double, doubles, floats, ints, octets, words
from caffepy.backend.types import host_address
from caffepy.errors import RunError
from caffepy.utils.process_fork import free_after_fork

# -- captured kernel calls -----------------------------------------------------------------------------


class HostWorkError(RunError):
    """Work other than kernels accesses arrays during a capture."""


class KernelCalls:
    """Recorded kernel calls.

    Attributes:
        commands: function, argument block, items and pieces of each call.
        kept: owners of the memory at the addresses in the argument blocks, and the blocks.
    """

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.kept: list[Any] = []


class _Current(threading.local):
    calls: KernelCalls | None = None


CURRENT = _Current()
"""The recorder of this thread's kernel calls."""


def note_host_work() -> None:
    """Announce array access outside kernels.

    Raises:
        HostWorkError: a capture is in progress.
    """
    if CURRENT.calls is not None:
        raise HostWorkError("the work is not done by kernels alone")


class KernelGraph:
    """A `Graph` on the CPU: work done by kernels alone becomes one program; other work is called in order.

    Args:
        works: functions, in order; they are not executed now. The arrays of their kernels must not move.
    """

    def __init__(self, works: Sequence[Callable[[], None]]) -> None:
        self.kernel_calls = 0
        """Kernel calls that a launch makes without Python."""
        self.host_works = 0
        """Number of works that a launch calls in Python."""
        self._steps: list[Callable[[], None]] = []
        captured = [(work, _kernel_calls(work)) for work in works]
        # A work that needs Python cuts the sequence; the kernels between two such works become one program.
        for by_kernels, group in groupby(captured, key=lambda pair: pair[1] is not None):
            pairs = list(group)
            if by_kernels:
                calls = [calls for _, calls in pairs if calls is not None and calls.commands]
                self.kernel_calls += sum(len(each.commands) for each in calls)
                self._steps += [_Program(calls).launch] if calls else []
            else:
                self.host_works += len(pairs)
                self._steps += [work for work, _ in pairs]

    def launch(self) -> None:
        """Run the works in order."""
        for step in self._steps:
            step()


def _kernel_calls(work: Callable[[], None]) -> KernelCalls | None:
    """Record a work's kernel calls without executing them; None if it is not done by kernels alone."""
    CURRENT.calls = calls = KernelCalls()
    try:
        work()
    # The recorded part of the work is dropped: launching it alone would compute other values.
    except HostWorkError:
        return None
    finally:
        CURRENT.calls = None
    return calls


class _Program:
    """Kernel calls that run as one call, on one thread or on all, with equal results.

    Args:
        calls: of one or more works, in order, not empty.
    """

    def __init__(self, calls: Sequence[KernelCalls]) -> None:
        self._kept = [one.kept for one in calls]
        commands = [command for one in calls for command in one.commands]
        # Two tables of the same calls. With several threads the end of each entry is a barrier, so neighbours that one
        # thread is to run are merged there into one entry (`_merged`).
        self._alone = _table(commands)
        self._parts = [_table(part) for part in _serial_parts(commands)]
        self._table = _table([_merged(part) for part in self._parts])
        threads = int(self._table[:, 3].max())
        self._joint = JointCalls(self._table, threads)
        self._choice = ThreadChoice() if threads > 1 else None
        self._lock = threading.Lock()

    def launch(self) -> None:
        """Run the calls in order."""
        # The counters of `JointCalls` belong to one launch at a time.
        with self._lock:
            if self._choice is None:
                self._run(True)
                return
            begin, on_one = time.perf_counter(), self._choice.on_one
            self._run(on_one)
            self._choice.record(time.perf_counter() - begin)

    def _run(self, on_one: bool) -> None:
        if on_one:
            _serial()(self._alone.ctypes.data, 0, len(self._alone))
        else:
            THREADS.run_program(self._joint)


TRIALS = 5
"""Timed passes on one thread and on all threads before a choice."""
WARMUP_PASSES = 3
"""Untimed passes before the trials. After a pause, threads are asleep and weights are out of the caches, or other
programs' idle threads still spin: without them, the autoencoder beside another program always chose one thread."""
LONG = 0.002
"""Seconds above which one thread is not tried. It gains at most 5 % beside a busy program, and a wrong choice doubles
the time until the next trial."""
TRUSTED, MAX_TRUSTED = 10, 160
"""Validity of a choice as a multiple of its trials' time, because the machine's load may change: initial, and maximum
after repeated confirmation. Pauses between passes do not count, else a trial would follow each pause."""


class ThreadChoice:
    """The choice between one thread and all threads for the passes of a program.

    Waking a thread takes as long as a small net's whole pass. Therefore some passes are timed on all threads, where
    idle threads keep spinning in between, and as many on one. The faster way is valid for some time, then both are
    timed again.
    """

    def __init__(self) -> None:
        self._all_threads: list[float] = []
        self._one: list[float] = []
        self._chosen, self._trusted = False, TRUSTED
        self._remaining = 0.0
        """Seconds of passes for which the choice remains valid."""

    @property
    def on_one(self) -> bool:
        """Return whether the next pass runs on one thread."""
        # A trial begins with the passes on all threads: their times alone can show that one thread need not be tried
        # (LONG).
        return self._chosen if self._remaining > 0 else len(self._all_threads) == WARMUP_PASSES + TRIALS

    def record(self, seconds: float) -> None:
        """Record the duration of a pass that ran as `on_one` returned."""
        if self._remaining > 0:
            self._remaining -= seconds
            return
        all_threads, one = self._all_threads, self._one
        (one if self.on_one else all_threads).append(seconds)
        if len(one) == WARMUP_PASSES + TRIALS:
            self._choose(median(all_threads[WARMUP_PASSES:]), median(one[WARMUP_PASSES:]))
        elif len(all_threads) == WARMUP_PASSES + TRIALS and min(all_threads) > LONG:  # the first pass may have compiled
            self._hold(False, MAX_TRUSTED * sum(all_threads))

    def _choose(self, all_threads: float, one: float) -> None:
        on_one = one < all_threads
        # A confirmed choice is trusted for longer each time; a changed one must prove itself again.
        self._trusted = min(2 * self._trusted, MAX_TRUSTED) if self._chosen == on_one else TRUSTED
        self._hold(on_one, self._trusted * TRIALS * (all_threads + one))

    def _hold(self, on_one: bool, seconds: float) -> None:
        self._chosen, self._remaining = on_one, seconds
        self._all_threads, self._one = [], []


@cache
def _serial() -> Any:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)(call_in_turn())


def _table(commands: Sequence[Command]) -> Any:
    return np.array(commands, np.int64).reshape(-1, 4)


def _serial_parts(commands: Sequence[Command]) -> list[list[Command]]:
    """Split commands into parts: adjacent single-thread commands together, others separately."""
    parts: list[list[Command]] = []
    for command in commands:
        if parts and command[3] == parts[-1][-1][3] == 1:
            parts[-1].append(command)
        else:
            parts.append([command])
    return parts


def _merged(part: Any) -> Command:
    """Return a part's only command, or one that runs all of them on one thread."""
    if len(part) == 1:
        return tuple(part[0].tolist())
    return call_in_turn(), int(part.ctypes.data), len(part), 1


# -- kernels -------------------------------------------------------------------------------------------

Int = Any
"""Annotation: a 64-bit integer."""
Float = Any
"""Annotation: a float32 number."""
Floats = Any
"""Annotation: the first element of a float32 array."""
Doubles = Any
"""Annotation: the first element of a float64 array."""
Ints = Any
"""Annotation: the first element of an int32 array."""
Words = Any
"""Annotation: the first element of an int64 array."""
Bytes = Any
"""Annotation: the first element of a uint8 array."""

_KINDS = {
    "Bytes": types.CPointer(types.uint8),
    "Int": types.int64,
    "Float": types.float32,
    "Floats": types.CPointer(types.float32),
    "Doubles": types.CPointer(types.float64),
    "Ints": types.CPointer(types.int32),
    "Words": types.CPointer(types.int64),
}
_OPTIONS = {"error_model": "numpy", "fastmath": {"contract"}}


class ConstantTable(int):
    """The address of a constant table, which it keeps alive; cheaper to pass to a kernel than the array."""

    array: Any

    def __new__(cls, array: Any) -> ConstantTable:
        """The array must be C-contiguous and immutable."""
        assert array.flags.c_contiguous
        table = super().__new__(cls, host_address(array))
        table.array = array
        return table


class Entry:
    """A C function void(argument block, begin, end), compiled at first use and cached on disk.

    Args:
        name: for the cache's file names and profilers.
        file: its source file, whose content is part of the cache key.
        text: body of the function as Python lines; `_a` is the block of 64-bit words, `_begin` and `_end` the range.
        namespace: globals of the text.
        fmt: `struct` format of the block.
    """

    def __init__(self, name: str, file: str, text: list[str], namespace: dict[str, Any], fmt: str) -> None:
        self.file = file
        self._namespace = namespace
        body = "\n".join(f"    {line}" for line in text)
        stamp = zlib.crc32(f"{kernels_stamp()} {file_stamp(file)} {sorted(_OPTIONS.items())} {body}".encode())
        # numba's cache key covers the byte code but not its constants, so the name must identify the text.
        self.name = f"{name}_{stamp:08x}"
        self._source = f"def {self.name}(_a, _begin, _end):\n{body}\n"
        # "=" packs without gaps: each argument is one word of 64 bits.
        self._pack = struct.Struct("=" + fmt).pack
        self._block = ctypes.c_int64 * len(fmt)
        self._lock = free_after_fork(threading.Lock())

    @cached_property
    def _compiled(self) -> Any:
        # `cached_property` takes no lock. A thread that waited for the compilation takes its result.
        with self._lock:
            if "_compiled" in self.__dict__:
                return self.__dict__["_compiled"]
            return self._compile()

    def _compile(self) -> Any:
        scope: dict[str, Any] = {**_NAMESPACE, **self._namespace}
        exec(compile(self._source, self.file, "exec"), scope)
        function = scope[self.name]
        function.__module__ = __name__
        return compile_c_function(function, KERNEL_SIGNATURE, _OPTIONS)

    @cached_property
    def address(self) -> int:
        return int(self._compiled.address)

    @cached_property
    def _serial(self) -> Any:
        return ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)(self.address)

    def run(self, threads: int, items: int, grain: int, *arguments: Any) -> None:
        """Run over all items, on at most `threads` threads with at least `grain` items each."""
        if items <= 0 or (compile_helper.compiles_only and self.address):
            return
        pieces = min(threads, max(1, items // max(1, grain)))
        calls = CURRENT.calls
        words = [host_address(argument) if type(argument) is np.ndarray else argument for argument in arguments]
        block = self._block.from_buffer_copy(self._pack(*words))
        address = ctypes.addressof(block)
        if calls is not None:
            calls.commands.append((self.address, address, items, pieces))
            # The commands hold addresses. The entry, the block and the arrays must live as long as the program.
            calls.kept.append((self, block, arguments))
        elif pieces == 1:
            self._serial(address, 0, items)
        else:
            THREADS.run(self.address, address, items, pieces)


class Kernel(Entry):
    """An `Entry` made from a function with parameters annotated Int, Float, Floats, Doubles, Ints, Words, Bytes."""

    def __init__(self, function: Callable[..., None]) -> None:
        kinds = [str(p.annotation) for p in inspect.signature(function).parameters.values()][2:]
        fmt = "".join("d" if kind == "Float" else "q" for kind in kinds)
        super().__init__(function.__name__, inspect.getfile(function), [function.__qualname__, *kinds], {}, fmt)
        self._function = function
        self._kinds = [_KINDS[kind] for kind in kinds]
        self._asked = 0
        self.__doc__ = function.__doc__

    def should_compile(self, items: int, compiling: int) -> bool:
        """Return whether to run this work as machine code, for callers that have an alternative.

        True if the kernel is cached, or once the requested work would have paid for the compilation.

        Args:
            items: items of this work.
            compiling: items whose interpretation takes as long as the compilation.
        """
        if "_compiled" in self.__dict__:
            return True
        with self._lock:
            first, self._asked = self._asked == 0, self._asked + items
            # Only the first question looks into the cache on disk; a kernel that is not there does not appear by
            # itself.
            if first and self._asked <= compiling:
                with suppress(NotKeptError):
                    self.__dict__.setdefault("_compiled", self._compile(kept=True))
            return self._asked > compiling or "_compiled" in self.__dict__

    def _compile(self, kept: bool = False) -> Any:
        function = self._function
        code = function.__code__.replace(co_name=self.name)
        named = FunctionType(code, function.__globals__, self.name, function.__defaults__, function.__closure__)
        named.__module__, named.__qualname__ = function.__module__, self.name
        return compile_kernel(named, self._kinds, _OPTIONS, kept)


kernel = Kernel
"""Decorator that makes a kernel of a function."""

_NAMESPACE = {
    "as_double": as_double,
    "doubles": doubles,
    "float32": np.float32,
    "floats": floats,
    "ints": ints,
    "math": math,
    "np": np,
    "octets": octets,
    "words": words,
}


def device_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function callable by kernels; LLVM inlines it."""
    compiled: Callable[..., Any] = PartDispatcher(function, _OPTIONS)
    return compiled


def exact_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a `device_function` without fused or reassociated operations: each product and sum is rounded.

    For values that are compared with thresholds or with each other.
    """
    # Without fastmath=False it would inherit the calling kernel's option.
    compiled: Callable[..., Any] = PartDispatcher(function, {"error_model": "numpy", "fastmath": False})
    return compiled
