"""Calls NVRTC: a program of its own, which needs nothing but Python's standard library, and a module for the package.

    python -I -S worker.py LIBNVRTC FOLDER

compiles what it reads from standard input until that ends. A job is three lines, the key, the options with blanks
between them and the number of bytes of the text, and the text. The answer is a line with the name of the file in FOLDER
that holds the machine code; an empty one where the text does not compile or the file cannot be written.

NVRTC compiles one text at a time in a process, in several threads as well; hence other processes.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import zlib

SUFFIX = ".cubin"


class CompileError(Exception):
    """A text does not compile; the message is NVRTC's log."""


class Nvrtc:
    """NVIDIA's compiler.

    Args:
        path: of libnvrtc.so.

    Raises:
        OSError: it cannot be loaded.
    """

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)

    def version(self) -> tuple[int, int]:
        """Major and minor."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def architectures(self) -> list[int]:
        """Compute capabilities, times ten, that it has machine code for."""
        count = ctypes.c_int()
        self._library.nvrtcGetNumSupportedArchs(ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        self._library.nvrtcGetSupportedArchs(numbers)
        return list(numbers)

    def compile(self, text: bytes, options: list[bytes]) -> bytes:
        """The machine code of a text, PTX where the options name a virtual architecture.

        Raises:
            CompileError: it does not compile.
        """
        library, program = self._library, ctypes.c_void_p()
        if library.nvrtcCreateProgram(ctypes.byref(program), text, b"kernel.cu", 0, None, None) != 0:
            raise CompileError("nvrtcCreateProgram failed")
        try:
            given = (ctypes.c_char_p * len(options))(*options)
            if library.nvrtcCompileProgram(program, len(options), given) != 0:
                raise CompileError(self._get(program, "ProgramLog").decode(errors="replace").rstrip("\0\n"))
            virtual = any(option.startswith(b"-arch=compute") for option in options)
            return self._get(program, "PTX" if virtual else "CUBIN")
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))

    def _get(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(self._library, f"nvrtcGet{what}")(program, buffer)
        return buffer.raw


def find(folder: str, key: str) -> str | None:
    """The name of the file with the machine code of a key, if there is one."""
    return next((name for name in os.listdir(folder) if name.startswith(f"{key}-") and name.endswith(SUFFIX)), None)


def is_whole(name: str, cubin: bytes) -> bool:
    """Whether a file of this name should hold these bytes: the name has their checksum."""
    return name.endswith(f"-{zlib.crc32(cubin):08x}{SUFFIX}")


def keep(folder: str, key: str, cubin: bytes) -> str:
    """Write the machine code of a key; the name of its file.

    Raises:
        OSError: it cannot be written.
    """
    name = f"{key}-{zlib.crc32(cubin):08x}{SUFFIX}"
    temporary = os.path.join(folder, f".{name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(cubin)
        os.replace(temporary, os.path.join(folder, name))
    except OSError:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise
    return name


def main() -> int:
    """Compile until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started this one decides when it ends
    nvrtc, folder = Nvrtc(sys.argv[1]), sys.argv[2]
    jobs, answers = sys.stdin.buffer, sys.stdout
    while key := jobs.readline().decode().strip():
        options = jobs.readline().split()
        text = jobs.read(int(jobs.readline()))
        try:
            name = find(folder, key) or keep(folder, key, nvrtc.compile(text, options))
        except (CompileError, OSError):
            name = ""
        answers.write(f"{name}\n")
        answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
