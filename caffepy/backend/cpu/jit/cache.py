"""Compiles CPU kernels and keeps their machine code in the user's cache folder.

Numba's own ways to choose a folder (NUMBA_CACHE_DIR, its list of locators) act on all functions of the process, and
its default is the __pycache__ beside the source. Here the functions that this module compiles get a cache of their
own. A cache that cannot be read or written, now or later, costs time and nothing else.

The folder's name changes with caffepy's version, with the kernels' sources, with numba, llvmlite and Python, and with
the processor: machines of several kinds share home folders, and in numba's index of a function two processes
cannot write about two processors at once. Within one folder all writers of a file write the same.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import sys
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
from llvmlite.binding import add_symbol
from numba.core.caching import Cache, CompileResultCacheImpl, IndexDataCacheFile, NullCache, _CacheLocator
from numba.core.registry import cpu_target
from numba.core.runtime import _nrt_python
from numba.core.sigutils import normalize_signature

from caffepy import version
from caffepy.backend.cpu.jit.pipeline import CFunction, KernelCompiler, KernelFunction
from caffepy.caches import version_folder

logger = logging.getLogger(__name__)


@cache
def file_stamp(file: str) -> int:
    """Changes with a file's content."""
    try:
        return zlib.crc32(Path(file).read_bytes())
    except OSError:
        return 0


@cache
def kernels_stamp() -> int:
    """Changes with every file of this backend: a kernel may have another's tile compiled into it."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return zlib.crc32(" ".join(f"{file_stamp(str(file)):08x}" for file in files).encode())


@cache
def kernels_folder() -> Path | None:
    """Where this process keeps kernels; None where it cannot."""
    parts = (
        kernels_stamp(),
        numba.__version__,
        llvmlite.__version__,
        sys.version,
        cpu_target.target_context.codegen().magic_tuple(),
    )
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
    return version_folder("kernels", f"{version.__version__}-{digest}")


class _Locator(_CacheLocator):  # type: ignore[misc,unused-ignore]
    """Tells numba a folder and lets the folder's and the function's names say all about freshness."""

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
    """Numba's cache of compile results, in our folder whatever numba's configuration says."""

    def __init__(self, function: Callable[..., Any]) -> None:
        folder = kernels_folder()
        assert folder is not None
        file = inspect.getfile(function)
        self._lineno = function.__code__.co_firstlineno
        self._locator = _Locator(folder, file)
        name = f"{Path(file).stem}.{function.__qualname__}"
        self._filename_base = self.get_filename_base(name, getattr(sys, "abiflags", ""))


class _CheckedFiles(IndexDataCacheFile):  # type: ignore[misc,unused-ignore]
    """Numba's files of a function, each with a checksum behind it: damaged machine code would run all the same."""

    def _dump(self, obj: Any) -> bytes:
        content: bytes = super()._dump(obj)
        return content + _checksum(content)

    def _load_data(self, name: str) -> Any:
        content = Path(self._data_path(name)).read_bytes()
        if _checksum(content[:-4]) != content[-4:]:
            raise ValueError(f"the checksum of {name} is wrong")
        return super()._load_data(name)  # a pickle ends where it says, not where the file does


def _checksum(content: bytes) -> bytes:
    return zlib.crc32(content).to_bytes(4, "little")


@cache
def _name_runtime() -> None:
    """Tell LLVM where the functions of numba's runtime lie, as numba does before it compiles.

    Machine code that numba 0.60 kept names them, and LLVM ends the process at a name that it does not know. Numba's own
    `rtsys.initialize` compiles some as well, which takes 20 ms.
    """
    for name, address in _nrt_python.c_helpers.items():
        add_symbol(name if name.startswith("_") else f"NRT_{name}", address)


class KernelCache(Cache):  # type: ignore[misc,unused-ignore]
    """The cache of one function."""

    _impl_class = _KernelCacheImpl

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        stamp = self._impl.locator.get_source_stamp()
        self._cache_file: Any = _CheckedFiles(self._cache_path, self._impl.filename_base, stamp)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """What is kept, else None; a damaged file counts as none and is replaced."""
        try:
            # Numba's `load_overload` would first import all that its compiler needs, 0.3 s; machine code needs nothing.
            _name_runtime()
            with self._guard_against_spurious_io_errors():
                return self._load_overload(sig, target_context)
        except Exception as error:  # unpickling damaged files raises anything
            logger.debug("%s: a compiled kernel cannot be read, it is compiled anew: %r", self.cache_path, error)
            with suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep it, if the folder can be written."""
        try:
            super().save_overload(sig, data)
        except OSError as error:
            logger.debug("%s: a compiled kernel is not kept: %s", self.cache_path, error)


def _cache_of(function: Callable[..., Any]) -> Any:
    return NullCache() if kernels_folder() is None else KernelCache(function)


def compile_c_function(function: Callable[..., Any], signature: Any, options: dict[str, Any]) -> Any:
    """What `numba.cfunc(signature, cache=True, **options)` gives, but for the cache and the pipeline."""
    compiled = CFunction(function, normalize_signature(signature), {}, options, KernelCompiler)
    compiled._cache = _cache_of(function)
    compiled.compile()
    return compiled


def compile_kernel(
    function: Callable[..., Any], kinds: list[Any], options: dict[str, Any], kept: bool = False
) -> KernelFunction:
    """A `KernelFunction`, read from the cache or compiled.

    Raises:
        NotKeptError: it is not in the cache, and only what is kept is wanted.
    """
    compiled = KernelFunction(function, kinds, options, kept)
    compiled._cache = _cache_of(function)
    compiled.compile()
    return compiled
