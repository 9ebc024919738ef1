"""Processes that tests start: their environment, their end, and what to do with those that do not end."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
MARK = "SUBPROCESS_TRAINING"
"""The environment's variable by which a run's processes are known, whatever became of those that started them."""

PATIENCE = 400.0
"""Seconds after which a run is taken to hang: the first one of a checkout compiles all kernels."""
_SCRATCH = tempfile.TemporaryDirectory(prefix="caffepy-tests-")
WHOLE_LINES = {"PYTHONUNBUFFERED": ""}
"""Python writes lines to stderr at once and whole, unless it must not buffer: then their pieces mix with others'."""


def environments_of(mark: str) -> list[tuple[psutil.Process, dict[str, str]]]:
    """The processes whose environment has this mark, with it; a zombie has none."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            variables = process.environ()
            if variables.get(MARK) == mark:
                found.append((process, variables))
    return found


def processes_of(mark: str) -> list[psutil.Process]:
    """The processes whose environment has this mark."""
    return [process for process, _ in environments_of(mark)]


def kill_processes(mark: str) -> list[int]:
    """End the processes whose environment has this mark; returns their numbers."""
    found = processes_of(mark)
    for process in found:
        with suppress(psutil.Error):
            process.kill()
    return [process.pid for process in found]


def wait_for_end(
    processes: Sequence[subprocess.Popen[str]], mark: str, logs: Sequence[Path], timeout: float = PATIENCE
) -> tuple[str, float]:
    """Wait until these processes have ended, and all with their mark that they started.

    Returns what they wrote and when they ended. What hangs is killed, and fails the test.
    """
    deadline = time.monotonic() + timeout
    with suppress(subprocess.TimeoutExpired):
        for process in processes:
            process.wait(max(0.01, deadline - time.monotonic()))
        while processes_of(mark):
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
    ended = time.time()
    left = kill_processes(mark)
    for process in processes:
        process.wait()
    text = "\n".join(log.read_text(errors="replace") for log in logs)
    if left:
        pytest.fail(f"processes {left} are still running after {timeout} s:\n{text}")
    return text, ended


def ranks_of(mark: str) -> dict[int, psutil.Process]:
    """The processes of a run that a launcher started, by their rank."""
    found = {}
    for process, variables in environments_of(mark):
        rank = next(
            (variables[name] for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK") if name in variables), None
        )
        if rank is not None:
            found[int(rank)] = process
    return found


def time_of_fault(log: str) -> float | None:
    """When a fault came, as the process said that it came over; the last time, if it came step by step."""
    found = re.findall(r"fault at (\d+\.\d+)", log)
    return float(found[-1]) if found else None


def program_environment(changes: dict[str, str]) -> dict[str, str]:
    """The environment of a run: caffepy from this checkout; Open MPI 4 and 5 may run as root and oversubscribed.

    A run has a folder of its own for what MPI puts into files: an mpirun that was killed leaves them behind, and a
    later one whose process number leads to the same names does not start.
    """
    return {
        **os.environ,
        "TMPDIR": tempfile.mkdtemp(dir=_SCRATCH.name),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH")))),
        "PYTHONUNBUFFERED": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        **changes,
    }


def find_mpirun() -> str:
    """The mpirun beside this Python, else the one on the PATH; without one the test is skipped."""
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        pytest.skip("no mpirun: pip install '.[mpi]'")
    return found
