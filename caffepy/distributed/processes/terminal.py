"""The terminal that shows this process's stderr, also where mpirun or `caffepy launch` passes it on through a pipe.

MPI's launchers pass on whole lines only, so a line that is redrawn has to be written to their terminal itself.
"""

from __future__ import annotations

import os
import socket
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from caffepy.distributed.launch.run import TERMINAL
from caffepy.distributed.processes.launcher import find_launcher

_PROGRAMS = frozenset(
    ("mpirun", "mpiexec", "prterun", "orterun", "mpiexec.hydra", "hydra_pmi_proxy", "mpirun.openmpi", "mpirun.mpich")
)
"""Names of the processes of MPI's launchers, as the kernel cuts them to 15 characters."""


def open_terminal(environment: Mapping[str, str] = os.environ, proc: Path = Path("/proc")) -> TextIO | None:
    """Return the terminal that shows stderr: stderr itself, or the terminal of the launcher if it is on this machine.

    Args:
        environment: the process's.
        proc: the folder of processes.

    Returns:
        None if there is no terminal, and on ranks other than 0. The caller closes a file that is not stderr.
    """
    launcher = find_launcher(environment)
    if sys.stderr is None or (launcher is not None and launcher.rank != 0):
        return None
    if sys.stderr.isatty():
        return sys.stderr
    if launcher is None:
        return None
    path = _told(environment.get(TERMINAL, "")) or _of_launcher(proc)
    return None if path is None else _open(path)


def _told(text: str) -> str | None:
    host, _, path = text.partition(":")
    return path if host == socket.gethostname() and _is_terminal(path) else None


def _of_launcher(proc: Path) -> str | None:
    """Return the terminal to which a launcher's process, an ancestor of this one, writes its stderr."""
    try:
        process = _parent(proc, "self")
        while (proc / process / "comm").read_text().strip() in _PROGRAMS:
            path = os.readlink(proc / process / "fd" / "2")
            if _is_terminal(path):
                return path
            process = _parent(proc, process)
    except OSError:  # of another user, or not Linux
        pass
    return None


def _parent(proc: Path, process: str) -> str:
    """Return the number of a process's parent; the name before it in `stat` may contain anything."""
    return (proc / process / "stat").read_text().rpartition(")")[2].split()[1]


def _is_terminal(path: str) -> bool:
    return path.startswith(("/dev/pts/", "/dev/tty"))


def _open(path: str) -> TextIO | None:
    """Open a terminal of this user for writing, without making it the process's controlling terminal."""
    try:
        number = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError:
        return None
    status = os.fstat(number)
    if not stat.S_ISCHR(status.st_mode) or status.st_uid != os.geteuid() or not os.isatty(number):
        os.close(number)
        return None
    os.set_blocking(number, True)
    return open(number, "w", encoding="utf-8", errors="backslashreplace", buffering=1)
