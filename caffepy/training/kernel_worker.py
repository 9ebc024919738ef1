"""The program that compiles the CPU kernels of nets that another process is about to train; see `early_kernels.py`.

Standard input has a description of each net (`caffepy.solvers.nets.foreseen`), one a line; what it writes is
described in `caffepy/phases/kernel_processes.py`. It ends when everything is compiled, or when nobody reads what it
writes.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import TextIO


def compile_nets(nets: Iterable[str], processes: int, write: Callable[[str], None]) -> None:
    """Compile what the nets described will call.

    Args:
        nets: their descriptions.
        processes: how many work at once, with this one.
        write: takes the lines that are to be written.
    """
    from caffepy.backend.cpu.jit.ahead_of_time import ForeseenKernels, compile_all
    from caffepy.backend.cpu.jit.cache import can_keep
    from caffepy.phases.kernel_processes import done_line, list_line
    from caffepy.solvers.nets.foreseen import run_described

    kernels = ForeseenKernels()
    for net in nets if can_keep() else ():
        kernels.note(partial(run_described, net))
    jobs = kernels.jobs()
    write(list_line([name for name, _ in jobs]))
    compile_all(jobs, processes, lambda name: write(done_line(name)))


def _writer(file: TextIO) -> Callable[[str], None]:
    def write(line: str) -> None:
        """Lines of several processes do not mix: each is one call of the system."""
        try:
            os.write(file.fileno(), f"{line}\n".encode())
        except OSError:
            os._exit(1)  # nobody waits for kernels any more

    return write


def main() -> None:
    """Read, compile, write."""
    # NumPy's BLAS would start threads, and only a process without threads is forked.
    os.environ.update(OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
    gc.disable()  # this process ends before its garbage would matter
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else is printed is not for the reader
    compile_nets(_described(), int(sys.argv[1]), _writer(output))


def _described() -> Iterable[str]:
    """The lines, for which this waits after it has imported what it will need."""
    from caffepy.backend import foreseeing_on_cpu
    from caffepy.backend.cpu.jit.ahead_of_time import warm_up

    foreseeing_on_cpu(1)
    warm_up()
    yield from sys.stdin
