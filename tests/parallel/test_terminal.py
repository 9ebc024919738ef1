"""The screen of a training, on a real terminal, under real launchers."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest
from processes import find_mpirun, program_environment
from training import CLASSIFIER

TRAIN = ["train", "--solver", "solver.prototxt", "--cpu", "--threads", "1"]
CAFFEPY = [sys.executable, "-m", "caffepy"]
ITERATIONS = 1000
SOLVER = f'net: "net.prototxt" base_lr: 0.01 lr_policy: "fixed" max_iter: {ITERATIONS} display: 100 snapshot: 0 '


def shown(command: list[str], folder: Path) -> str:
    """What a command writes to the terminal that is its stderr."""
    ours, theirs = os.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))  # rows and columns
    parts: list[bytes] = []

    def read() -> None:
        try:
            while part := os.read(ours, 1 << 16):
                parts.append(part)
        except OSError:  # the last process has closed the terminal
            pass

    reader = threading.Thread(target=read)
    try:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=program_environment({}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=theirs,
        )
        os.close(theirs)
        reader.start()
        status = process.wait(300)
        reader.join(300)
    finally:
        os.close(ours)
    text = b"".join(parts).decode()
    assert status == 0, text
    return text


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("start", "notice"),
    [(["mpirun", "-np", "1", *CAFFEPY], True), ([*CAFFEPY, "launch", "--nproc-per-node", "1", "--"], False)],
    ids=["mpirun", "launch"],
)
def test_a_summary_and_a_live_line(start: list[str], notice: bool, tmp_path: Path) -> None:
    (tmp_path / "net.prototxt").write_text(CLASSIFIER)
    (tmp_path / "solver.prototxt").write_text(SOLVER)
    mpirun = find_mpirun()
    text = shown([mpirun if word == "mpirun" else word for word in (*start, *TRAIN)], tmp_path)
    (log,) = tmp_path.glob("solver_*.log")
    summary, _, rest = text.partition("Solving")
    assert log.name in summary
    assert "3 layers" in summary
    assert "Creating Layer" not in text
    assert ("caffepy launch --nproc-per-node 1" in " ".join(summary.split())) == notice
    assert re.search(rf"\d+/{ITERATIONS} .*loss [\d.e-]+, lr 0\.01", rest)
    assert re.search(r"\d\d:\d\d:\d\d Iteration 100 \(", rest)
    assert "Creating Layer ip" in log.read_text()
