"""Process groups over real NCCL: without MPI, one process a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from subprocess_training import REPOSITORY, program_environment

SCRIPT = """
import sys, os, cupy
from collectives import Checker
from caffepy import distributed
with distributed.init_process_group("nccl", timeout=300) as group:
    if sys.argv[1] == "check":
        print(Checker(group, cupy.asarray, cupy.asnumpy).everything(), flush=True)
    elif group.rank == 1:
        os.kill(os.getpid(), 9)
    else:
        distributed.all_reduce(cupy.zeros(1000))
"""


def run(folder: Path, ranks: int, action: str) -> list[subprocess.CompletedProcess[str]]:
    """Start a script of as many ranks, which meet at a file, and wait for their end."""
    started = []
    for rank in range(ranks):
        environment = program_environment({"RANK": str(rank), "WORLD_SIZE": str(ranks)})
        environment["PYTHONPATH"] = os.pathsep.join((str(REPOSITORY / "tests" / "support"), environment["PYTHONPATH"]))
        code = SCRIPT.replace('"nccl",', f'"nccl", "file://{folder}/meet",')
        command = [sys.executable, "-c", code, action]
        started.append(
            subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        )
    try:
        return [
            subprocess.CompletedProcess(process.args, process.returncode, *output)
            for process, output in [(process, process.communicate(timeout=300)) for process in started]
        ]
    finally:
        for process in started:
            process.kill()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_operation_against_numpy(tmp_path: Path, ranks: int) -> None:
    from caffepy.backend.cuda.device import device_count

    if device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    for ended in run(tmp_path, ranks, "check"):
        assert ended.returncode == 0, ended.stderr
        assert int(ended.stdout) > 400


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    from caffepy.backend.cuda.device import device_count

    if device_count() < 2:
        pytest.skip("needs 2 GPUs")
    first, second = run(tmp_path, 2, "kill")
    assert (first.returncode, second.returncode) == (1, -9), first.stderr
    assert re.search(r"PeerError: rank 0 on .*all_reduce.* rank 1 on .* ended unexpectedly", first.stderr)
