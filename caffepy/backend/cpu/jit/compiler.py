"""Compilation of CPU kernels: numba's reduced pipeline, the machine code cache, and the handler of lost file pages.

Numba optimises and compiles every function, and again within each caller. Here LLVM optimises each function once:
functions that kernels call stay as numba's lowering emits them until they are linked into a kernel, where all code is
optimised together.

Numba's ways to choose a cache folder (NUMBA_CACHE_DIR, its list of locators) affect all functions of the process, and
its default is the __pycache__ beside the source. The functions that this module compiles have their own cache in the
user's cache folder. An unreadable or unwritable cache only costs time.

The folder's name depends on caffepy's version, the kernels' sources, numba, llvmlite, Python and the processor.
Different machines may share a home folder, and numba's per-function index does not support concurrent writers for two
processors. Within one folder all writers of a file write the same content.

`MappedFile` is a memory-mapped file that survives the loss of pages, when the file is truncated or its disk fails.
Access to a lost page of a mapped file raises SIGBUS, which ends a process. The handler here maps a page of zeros
instead and counts it; the reader continues and later checks the count. The handler is machine code, because Python's
handlers run too late. Wayland compositors read their clients' memory in this way.
"""

from __future__ import annotations

import ctypes
import hashlib
import inspect
import logging
import mmap
import os
import platform
import signal
import sys
import threading
import weakref
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from types import CodeType
from typing import Any

import llvmlite
import numba
import numpy as np
from llvmlite import ir
from llvmlite.binding import Linkage, add_symbol
from numba import config, types
from numba.core.caching import Cache, CompileResultCacheImpl, IndexDataCacheFile, NullCache, _CacheLocator
from numba.core.ccallback import CFunc
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.cpu import CPUContext
from numba.core.fastmathpass import rewrite_module
from numba.core.registry import CPUDispatcher, CPUTarget
from numba.core.runtime import _nrt_python
from numba.core.sigutils import normalize_signature
from numba.core.target_extension import CPU, dispatcher_registry, jit_registry, target_override, target_registry
from numba.core.typed_passes import NopythonRewrites
from numba.core.typing.context import Context
from numba.core.untyped_passes import InlineClosureLikes
from numpy.typing import NDArray

from caffepy import version
from caffepy.backend.cpu.jit.compile_helper import start_helper
from caffepy.backend.cpu.jit.vector import kept_word, map_zeros, set_handler, words
from caffepy.errors import ConfigError
from caffepy.utils.caches import version_folder
from caffepy.utils.garbage_collection import suspended_garbage_collection
from caffepy.utils.process_fork import free_after_fork

logger = logging.getLogger(__name__)


# -- the target ----------------------------------------------------------------------------------------


class _Typing(Context):  # type: ignore[misc,unused-ignore]
    """The types of numba's functions that kernels call: Python's and those of `math`."""

    def __init__(self) -> None:
        super().__init__()
        self._resolved: dict[tuple[Any, tuple[Any, ...]], Any] = {}

    def resolve_function_type(self, function: Any, arguments: tuple[Any, ...], names: dict[str, Any]) -> Any:
        """Return a call's signature. Kernels call few operators, each hundreds of times with the same types."""
        if names or not isinstance(function, types.Function):
            return super().resolve_function_type(function, arguments, names)
        key = function, arguments
        if self._resolved.get(key) is None:
            self._resolved[key] = super().resolve_function_type(function, arguments, names)
        return self._resolved[key]

    def load_additional_registries(self) -> None:
        self.install_registry(import_module("numba.core.typing.mathdecl").registry)


class _KernelContext(CPUContext):  # type: ignore[misc,unused-ignore]
    """The machine code of these functions."""

    def init(self) -> None:
        """Register the addresses of numba's runtime functions with LLVM, as numba does when it first compiles."""
        super().init()
        # Machine code of numba 0.60 refers to them, and LLVM aborts the process at an unknown name. Numba's
        # `rtsys.initialize` also compiles some functions, which takes 20 ms.
        for name, address in _nrt_python.c_helpers.items():
            add_symbol(name if name.startswith("_") else f"NRT_{name}", address)

    def load_additional_registries(self) -> None:
        for name in ("builtins", "iterators", "numbers", "rangeobj", "tupleobj"):
            import_module(f"numba.cpython.{name}")
        self.install_registry(import_module("numba.cpython.mathimpl").registry)

    def post_lowering(self, module: Any, library: Any) -> None:
        """Mark the operations that may be fused. Numba's runtime is not linked: kernels allocate nothing."""
        if self.fastmath:
            rewrite_module(module, self.fastmath)


class _KernelTarget(CPUTarget):  # type: ignore[misc,unused-ignore]
    """Numba's target of kernels, smaller than its own for a CPU.

    Importing NumPy's functions takes numba 0.5 s, and each operator would be looked up among them.
    """

    @cached_property
    def typing_context(self) -> Any:
        return _Typing()

    @cached_property
    def target_context(self) -> Any:
        return _KernelContext(self.typing_context, self._target_name)


class _Kernels(CPU):  # type: ignore[misc,unused-ignore]
    """Numba's key of the target."""


KERNELS = _KernelTarget("caffepy")
target_registry["caffepy"] = _Kernels


# -- the pipeline --------------------------------------------------------------------------------------


class _KernelLibrary(JITCodeLibrary):  # type: ignore[misc,unused-ignore]
    """A kernel's code, optimised once after all its callees are linked."""

    def _optimize_functions(self, ll_module: Any) -> None:
        # numba would optimise here, before the callees are linked. The layout alone is needed to link the modules.
        ll_module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        for function in self._final_module.functions:
            # Functions called only by the C function are inlined and need not be kept.
            own = function.linkage == Linkage.external and not function.name.startswith("cfunc.")
            if own and not function.is_declaration:
                function.linkage = Linkage.internal
        super()._optimize_final_module()


class _PartLibrary(_KernelLibrary):
    """The code of a function that kernels call: neither optimised nor compiled."""

    def _optimize_final_module(self) -> None:
        """Do nothing; the kernel's library optimises the code."""

    def _finalize_final_module(self) -> None:
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        return 0


class KernelCompiler(Compiler):  # type: ignore[misc,unused-ignore]
    """Compiles a kernel's C function."""

    library_class: type[JITCodeLibrary] = _KernelLibrary

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        state = self.state
        if state.library is None:
            state.library = self.library_class(state.targetctx.codegen(), "kernel")
            state.library.enable_object_caching()

    def define_pipelines(self) -> list[Any]:
        """Return numba's passes without those for array expressions and closures."""
        pipelines: list[Any] = super().define_pipelines()
        closures = any(isinstance(value, CodeType) for value in self.state.func_id.code.co_consts)
        left_out = (NopythonRewrites,) if closures else (NopythonRewrites, InlineClosureLikes)
        for pipeline in pipelines:
            pipeline.passes = [entry for entry in pipeline.passes if entry[0] not in left_out]
        return pipelines


class _PartCompiler(KernelCompiler):
    """Compiles a function that kernels call."""

    library_class = _PartLibrary

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        flags = self.state.flags
        # Python never calls a part, so wrappers would only be compiled and thrown away.
        flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True

    def compile_extra(self, function: Any) -> Any:
        result = super().compile_extra(function)
        entry = object()
        self.state.targetctx.insert_user_function(entry, result.fndesc, [result.library])
        return result._replace(entry_point=entry)


class PartDispatcher(CPUDispatcher):  # type: ignore[misc,unused-ignore]
    """A function that kernels call; Python cannot call it."""

    targetdescr = KERNELS

    def __init__(self, function: Any, options: dict[str, Any]) -> None:
        super().__init__(function, {}, {"nopython": True, "boundscheck": None, **options}, _PartCompiler)

    def add_overload(self, result: Any) -> None:
        self.overloads[tuple(result.signature.args)] = result


dispatcher_registry[_Kernels] = PartDispatcher
# Numba writes some functions in Python, as `min`.
jit_registry[_Kernels] = lambda **options: lambda function: PartDispatcher(function, options)


_WORD = ir.IntType(64)


class NotKeptError(Exception):
    """A kernel is not in the cache."""


class CFunction(CFunc):  # type: ignore[misc,unused-ignore]
    """Numba's compiled C function; logs a compilation."""

    _targetdescr = KERNELS
    _compiler: Any
    _cache: Any
    _sig: Any

    def _compile_uncached(self) -> Any:
        if config.DISABLE_JIT:
            raise ConfigError("NUMBA_DISABLE_JIT is set, but kernels on the CPU are compiled by numba: unset it")
        if _keeps_kernels(self._cache.cache_path):
            start_helper()
        # A compilation makes many objects and leaves few in cycles. Searching them would take a tenth of its time.
        with suspended_garbage_collection(), target_override("caffepy"):
            result = self._compiler.compile(self._sig.args, self._sig.return_type)
        # Numba would write every variable's type into the cache.
        return result._replace(type_annotation="")


@cache
def _keeps_kernels(folder: str | None) -> bool:
    """Return whether compiled kernels are cached in a folder; log once per process that they are compiled."""
    if folder is not None and os.access(folder, os.W_OK):
        logger.info("Compiling CPU kernels for the first time; they are cached in %s for later starts", folder)
        return True
    logger.info("Compiling CPU kernels; they cannot be cached on disk, so each start compiles them")
    return False


class KernelFunction(CFunction):
    """A C function void(block, begin, end) that calls a function with (begin, end, unpacked arguments).

    Args:
        function: the function to call.
        kinds: types of its arguments after `begin` and `end`: pointers, int64, float32 (stored as a float64).
        options: numba's options.
        kept: whether `compile` raises NotKeptError if the cache lacks it.
    """

    def __init__(self, function: Any, kinds: list[types.Type], options: dict[str, Any], kept: bool) -> None:
        super().__init__(function, ((types.int64, types.int64, *kinds), types.void), {}, options, KernelCompiler)
        self._kept = kept

    def _compile_uncached(self) -> Any:
        if self._kept:
            raise NotKeptError
        self._compiler._customize_flags = _no_wrapper
        result = super()._compile_uncached()
        self._write(result.target_context, result.fndesc, result.library)
        return result

    def _write(self, context: Any, description: Any, library: Any) -> None:
        """Emit the C function."""
        module = context.create_module("c_function")
        body = context.declare_function(module, description)
        c_type = ir.FunctionType(ir.VoidType(), [_WORD.as_pointer(), _WORD, _WORD])
        function = ir.Function(module, c_type, description.llvm_cfunc_wrapper_name)
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        # All kernels have this one signature, so that one parallel loop and one table of calls serve every kernel.
        block, begin, end = function.args
        arguments = []
        for i, kind in enumerate(description.argtypes[2:]):
            word = builder.load(builder.gep(block, [_WORD(i)]))
            arguments.append(_from_word(builder, word, context.get_value_type(kind)))
        context.call_conv.call_function(
            builder, body, description.restype, description.argtypes, [begin, end, *arguments]
        )
        builder.ret_void()
        library.add_ir_module(module)


def _from_word(builder: Any, word: Any, kind: Any) -> Any:
    """Return an argument unpacked from its word."""
    if isinstance(kind, ir.PointerType):
        return builder.inttoptr(word, kind)
    # A float64 holds every float32 exactly, and fills a word.
    return word if kind == _WORD else builder.fptrunc(builder.bitcast(word, ir.DoubleType()), kind)


def _no_wrapper(flags: Any) -> Any:
    flags.no_cpython_wrapper = flags.no_cfunc_wrapper = flags.no_compile = True
    return flags


# -- the cache -----------------------------------------------------------------------------------------


@cache
def file_stamp(file: str) -> int:
    """Return a number that changes with a file's content."""
    try:
        return zlib.crc32(Path(file).read_bytes())
    except OSError:
        return 0


@cache
def kernels_stamp() -> int:
    """Return a number that changes with every file of this backend, because kernels inline each other's tiles."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return zlib.crc32(" ".join(f"{file_stamp(str(file)):08x}" for file in files).encode())


@cache
def kernels_folder() -> Path | None:
    """Return the folder of cached kernels, or None without one."""
    parts = (
        kernels_stamp(),
        numba.__version__,
        llvmlite.__version__,
        sys.version,
        KERNELS.target_context.codegen().magic_tuple(),
    )
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
    return version_folder("kernels", f"{version.__version__}-{digest}")


class _Locator(_CacheLocator):  # type: ignore[misc,unused-ignore]
    """Gives numba a fixed folder; the folder's and the function's names are the cache key."""

    def __init__(self, folder: Path, file: str) -> None:
        self._folder = folder
        self._py_file = file  # numba reads it for its warnings

    def get_cache_path(self) -> str:
        return str(self._folder)

    def get_source_stamp(self) -> str:
        return self._folder.name

    def get_disambiguator(self) -> str:
        return "1"


class _KernelCacheImpl(CompileResultCacheImpl):  # type: ignore[misc,unused-ignore]
    """Numba's cache of compile results, in our folder regardless of numba's configuration."""

    def __init__(self, function: Callable[..., Any]) -> None:
        folder = kernels_folder()
        assert folder is not None
        file = inspect.getfile(function)
        self._lineno = function.__code__.co_firstlineno
        self._locator = _Locator(folder, file)
        name = f"{Path(file).stem}.{function.__qualname__}"
        self._filename_base = self.get_filename_base(name, getattr(sys, "abiflags", ""))


class _CheckedFiles(IndexDataCacheFile):  # type: ignore[misc,unused-ignore]
    """Numba's cache files with a checksum appended, because damaged machine code would be executed."""

    def _dump(self, obj: Any) -> bytes:
        content: bytes = super()._dump(obj)
        return content + _checksum(content)

    def _load_data(self, name: str) -> Any:
        content = Path(self._data_path(name)).read_bytes()
        if _checksum(content[:-4]) != content[-4:]:
            raise ValueError(f"the checksum of {name} is wrong")
        return super()._load_data(name)  # unpickling ignores trailing bytes


def _checksum(content: bytes) -> bytes:
    return zlib.crc32(content).to_bytes(4, "little")


class KernelCache(Cache):  # type: ignore[misc,unused-ignore]
    """The cache of one function."""

    _impl_class = _KernelCacheImpl

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        stamp = self._impl.locator.get_source_stamp()
        self._cache_file: Any = _CheckedFiles(self._cache_path, self._impl.filename_base, stamp)

    def _index_key(self, sig: Any, codegen: Any) -> tuple[Any, ...]:
        """Return the key of a result in the function's index."""
        # Numba adds the closure's content, but intrinsics are pickled with a number that differs in each process. The
        # function's name identifies the closure (see `named_kernel`).
        return sig, codegen.magic_tuple(), self._py_func.__code__.co_code

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the cached result, or None. A damaged file is ignored and replaced."""
        try:
            # Numba's `load_overload` would first import its compiler, 0.3 s, which machine code does not need.
            with self._guard_against_spurious_io_errors():
                return self._load_overload(sig, target_context)
        except Exception as error:  # unpickling damaged files can raise any exception
            logger.debug("%s: a cached kernel cannot be read and is recompiled: %r", self.cache_path, error)
            with suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Store the result if the folder is writable."""
        try:
            super().save_overload(sig, data)
        except OSError as error:
            logger.debug("%s: a compiled kernel cannot be cached: %s", self.cache_path, error)


def _cache_of(function: Callable[..., Any]) -> Any:
    return NullCache() if kernels_folder() is None else KernelCache(function)


def compile_c_function(function: Callable[..., Any], signature: Any, options: dict[str, Any]) -> Any:
    """Return `numba.cfunc(signature, cache=True, **options)` with our cache and compiler pipeline."""
    compiled = CFunction(function, normalize_signature(signature), {}, options, KernelCompiler)
    compiled._cache = _cache_of(function)
    compiled.compile()
    return compiled


def compile_kernel(
    function: Callable[..., Any], kinds: list[Any], options: dict[str, Any], kept: bool = False
) -> KernelFunction:
    """Return a `KernelFunction`, from the cache or compiled.

    Raises:
        NotKeptError: it is not in the cache and `kept` is set.
    """
    compiled = KernelFunction(function, kinds, options, kept)
    compiled._cache = _cache_of(function)
    compiled.compile()
    return compiled


# -- mapped files and SIGBUS ---------------------------------------------------------------------------

_MAX_FILES = 1024
_COLUMNS = 3
"""Columns of a table row: first address, end address, pages lost."""
_PAGE = mmap.PAGESIZE
_ACTION_BYTES = 256
"""More than the size of `struct sigaction`, 152."""
_FLAGS_AT = 136
"""Offset of `sa_flags`, with glibc and musl on 64-bit machines; the handler's address and the mask precede it."""
_SA_SIGINFO, _SA_ONSTACK = 4, 0x08000000

_table: NDArray[np.int64] = np.zeros((_MAX_FILES + 1, _COLUMNS), np.int64)
"""One row per file; the last row has the addresses of the previous and of the default action."""
_others = ctypes.create_string_buffer(2 * _ACTION_BYTES)
"""The previous action of SIGBUS, followed by the system's default, which ends the process."""
_lock = free_after_fork(threading.Lock())


def _handle(number, information, context):  # type: ignore[no-untyped-def]
    """SIGBUS's handler: the third word of `siginfo_t` is the address. Called with 0: store the table's address."""
    if number == 0:
        words(kept_word())[0] = information
        return
    table, address = words(words(kept_word())[0]), words(information)[2]
    # No lock: a handler must not wait for a thread that it has interrupted. A free row ends at 0, so it contains no
    # address.
    for row in range(_MAX_FILES):
        if table[3 * row] <= address < table[3 * row + 1]:
            table[3 * row + 2] += 1
            # On return the processor repeats the instruction, which now reads zeros.
            if map_zeros(address // _PAGE * _PAGE, _PAGE) != -1:
                return
    # Not ours: retry the instruction under the previous action; if that returns here, because it calls ours, retry it
    # under the default action.
    set_handler(number, table[3 * _MAX_FILES])
    table[3 * _MAX_FILES] = table[3 * _MAX_FILES + 1]


class MappedFile:
    """A memory-mapped file. Pages that the file has lost read as zeros.

    Args:
        descriptor: the file.
        size: bytes to map, at least 1.

    Raises:
        OSError: mapping failed, too many files are mapped, or the system is not Linux.
        ValueError: the file is smaller.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        if platform.system() != "Linux":
            raise OSError("files are mapped on Linux only: the layout of sigaction is Linux's")
        self.memory: NDArray[np.uint8] = np.frombuffer(mmap.mmap(descriptor, size, access=mmap.ACCESS_READ), np.uint8)
        begin = self.memory.ctypes.data
        with _lock:
            free = np.flatnonzero(_table[:_MAX_FILES, 1] == 0)
            if not free.size:
                raise OSError(f"{_MAX_FILES} files are mapped already")
            self._row = int(free[0])
            # Written before anything can read the mapping: a fault in it finds its row.
            _table[self._row] = begin, begin + -(-size // _PAGE) * _PAGE, 0
            _install()
        weakref.finalize(self, _forget, self._row).atexit = False  # threads may still read at exit

    @property
    def pages_lost(self) -> int:
        """Number of pages read as zeros because the file lacked them or its disk failed."""
        return int(_table[self._row, 2])


def _forget(row: int) -> None:
    """Free a row. Takes no lock: the garbage collector may call this in a thread that holds it."""
    _table[row] = 0


@cache
def _handler() -> Any:
    """Return the compiled handler."""
    return compile_c_function(_handle, types.void(types.int32, types.int64, types.int64), {})


def _install() -> None:
    """Install the handler of SIGBUS, unless it is installed."""
    address = int(_handler().address)
    present, action = (ctypes.create_string_buffer(_ACTION_BYTES) for _ in range(2))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sigaction(int(signal.SIGBUS), None, present)
    # Checked for each file: another library may have installed its own handler since. Ours then goes in front of it,
    # and passes on the faults that are not ours.
    if ctypes.c_int64.from_buffer(present).value == address:
        return
    ctypes.memmove(_others, present, _ACTION_BYTES)
    kind = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    # A handler gets no argument of ours. This call, with a signal number that does not exist, leaves the table's
    # address in a word of the machine code.
    kind(address)(0, _table.ctypes.data, 0)
    _table[_MAX_FILES, :2] = ctypes.addressof(_others), ctypes.addressof(_others) + _ACTION_BYTES
    # The mask between the address and the flags stays zero: the handler blocks no other signal.
    ctypes.c_int64.from_buffer(action).value = address
    ctypes.c_int32.from_buffer(action, _FLAGS_AT).value = _SA_SIGINFO | _SA_ONSTACK
    if libc.sigaction(int(signal.SIGBUS), action, None) != 0:
        raise OSError(ctypes.get_errno(), "the handler of SIGBUS cannot be installed")
