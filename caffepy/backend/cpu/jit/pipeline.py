"""Numba's compiler pipeline, reduced for kernels: LLVM optimises each function once.

Numba optimises and compiles every function, and again within each caller. Here functions that kernels call stay as
numba's lowering emits them until they are linked into a kernel, where all code is optimised together.
"""

from __future__ import annotations

import logging
import os
from functools import cache
from types import CodeType
from typing import Any

from llvmlite import ir
from llvmlite.binding import Linkage
from numba import config, types
from numba.core.ccallback import CFunc
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.registry import CPUDispatcher
from numba.core.typed_passes import NopythonRewrites
from numba.core.untyped_passes import InlineClosureLikes

from caffepy.errors import ConfigError

logger = logging.getLogger(__name__)


class _KernelLibrary(JITCodeLibrary):  # type: ignore[misc,unused-ignore]
    """A kernel's code, optimised once after all its callees are linked."""

    def _optimize_functions(self, ll_module: Any) -> None:
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
        flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True

    def compile_extra(self, function: Any) -> Any:
        result = super().compile_extra(function)
        entry = object()
        self.state.targetctx.insert_user_function(entry, result.fndesc, [result.library])
        return result._replace(entry_point=entry)


class PartDispatcher(CPUDispatcher):  # type: ignore[misc,unused-ignore]
    """A function that kernels call; Python cannot call it."""

    def __init__(self, function: Any, options: dict[str, Any]) -> None:
        super().__init__(function, {}, {"nopython": True, "boundscheck": None, **options}, _PartCompiler)

    def add_overload(self, result: Any) -> None:
        self.overloads[tuple(result.signature.args)] = result


_WORD = ir.IntType(64)


class NotKeptError(Exception):
    """A kernel is not in the cache."""


class CFunction(CFunc):  # type: ignore[misc,unused-ignore]
    """Numba's compiled C function; logs a compilation."""

    _compiler: Any
    _cache: Any
    _sig: Any

    def _compile_uncached(self) -> Any:
        if config.DISABLE_JIT:
            raise ConfigError("NUMBA_DISABLE_JIT is set, but kernels on the CPU are compiled by numba: unset it")
        _log_compiling(self._cache.cache_path)
        return self._compiler.compile(self._sig.args, self._sig.return_type)


@cache
def _log_compiling(folder: str | None) -> None:
    """Log once per process that kernels are compiled, and whether they are cached."""
    if folder is not None and os.access(folder, os.W_OK):
        logger.info("Compiling CPU kernels for the first time; they are cached in %s for later starts", folder)
    else:
        logger.info("Compiling CPU kernels; they cannot be cached on disk, so each start compiles them")


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
    return word if kind == _WORD else builder.fptrunc(builder.bitcast(word, ir.DoubleType()), kind)


def _no_wrapper(flags: Any) -> Any:
    flags.no_cpython_wrapper = flags.no_cfunc_wrapper = flags.no_compile = True
    return flags
