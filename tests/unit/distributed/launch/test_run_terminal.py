"""Which terminal shows a rank's stderr, where a launcher passes it on."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from caffepy.cli.screen import open_terminal
from caffepy.distributed.launch.run import TERMINAL, name_terminal

RANK = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}


@pytest.fixture
def pty() -> Iterator[tuple[int, str]]:
    """A terminal's other end, and its name."""
    ours, theirs = os.openpty()
    yield ours, os.ttyname(theirs)
    os.close(ours)
    os.close(theirs)


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """stderr is a pipe, as under mpirun."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)


def processes(folder: Path, *programs: tuple[str, str]) -> Path:
    """A folder as /proc is: this process and its ancestors, each with its name and the target of its stderr."""
    for number, (name, stderr) in enumerate([("caffepy", "pipe:[1]"), *programs]):
        process = folder / ("self" if number == 0 else str(number))
        (process / "fd").mkdir(parents=True)
        (process / "comm").write_text(f"{name}\n")
        (process / "stat").write_text(f"{number} ({name} ) 5) S {number + 1} 1 1 0")
        (process / "fd" / "2").symlink_to(stderr)
    return folder


def written(terminal: int, environment: dict[str, str], proc: Path) -> str | None:
    file = open_terminal(environment, proc)
    if file is None:
        return None
    with file:
        print("seen", file=file)
    return os.read(terminal, 100).decode().strip()


def test_mpiruns_terminal_is_found(pty: tuple[int, str], tmp_path: Path) -> None:
    assert written(pty[0], RANK, processes(tmp_path, ("prterun", pty[1]), ("bash", "/dev/null"))) == "seen"


def test_so_is_that_behind_hydras_proxy(pty: tuple[int, str], tmp_path: Path) -> None:
    chain = processes(tmp_path, ("hydra_pmi_proxy", "pipe:[2]"), ("mpiexec.hydra", pty[1]))
    assert written(pty[0], {"PMI_RANK": "0", "PMI_SIZE": "2"}, chain) == "seen"


def test_a_launcher_that_writes_into_a_file_has_none(pty: tuple[int, str], tmp_path: Path) -> None:
    """The shell behind it has a terminal, on which nothing of the job belongs."""
    assert written(pty[0], RANK, processes(tmp_path, ("mpirun", "/tmp/log"), ("bash", pty[1]))) is None


@pytest.mark.parametrize("environment", [{}, RANK | {"OMPI_COMM_WORLD_RANK": "1"}])
def test_only_rank_0_of_a_launcher_has_one(pty: tuple[int, str], tmp_path: Path, environment: dict[str, str]) -> None:
    assert written(pty[0], environment, processes(tmp_path, ("mpirun", pty[1]))) is None


def test_caffepy_launch_names_its_terminal(pty: tuple[int, str], tmp_path: Path) -> None:
    told = {TERMINAL: f"{socket.gethostname()}:{pty[1]}"}
    assert written(pty[0], RANK | told, tmp_path) == "seen"
    assert written(pty[0], RANK | {TERMINAL: f"another.host:{pty[1]}"}, tmp_path) is None
    assert written(pty[0], told, tmp_path) is None  # a shell within the job


def test_what_is_no_terminal_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    for path in (f"/dev/pts/../..{tmp_path}/file", "/dev/pts/absent", "/dev/pts/ptmx/x", "/dev/pts"):
        assert open_terminal(RANK | {TERMINAL: f"{socket.gethostname()}:{path}"}, tmp_path) is None
    assert (tmp_path / "file").read_text() == "kept"


def test_a_pipe_has_no_name() -> None:
    before, (reader, writer) = os.dup(2), os.pipe()
    os.dup2(writer, 2)
    try:
        assert name_terminal() is None
    finally:
        os.dup2(before, 2)
        for file in (before, reader, writer):
            os.close(file)
