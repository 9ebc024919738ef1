from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from caffepy.distributed.launch.launchers import Job, Mpirun, exported_names, find_mpirun, identify, mpirun_line
from caffepy.errors import ConfigError
from caffepy.utils.installation import MissingExtraError

ANSWERS = {
    ("Open MPI", "5.0.11"): "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/\n",
    ("Open MPI", "4.1.6"): "mpirun (Open MPI) 4.1.6\n",
    ("MPICH", "5.0.2"): "HYDRA build details:\n    Version:                                 5.0.2\n    CC:  cc\n",
    ("Intel MPI", "2021.18.1"): "Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 20260626 (id: b44796a)\n",
}
OPEN, OLD, MPICH, INTEL = (Mpirun(Path("/mpi/mpirun"), kind, version) for kind, version in ANSWERS)
ALONE = Job(["caffepy", "train"], 4)
HOSTS = Job(["caffepy", "train"], 4, 2, ["a", "b"], exported=["NCCL_DEBUG", "X"])


def line(launcher: Mpirun, job: Job) -> str:
    return shlex.join(mpirun_line(launcher, job)).removeprefix("/mpi/mpirun ").removesuffix(" caffepy train")


@pytest.mark.parametrize(("expected", "answer"), ANSWERS.items())
def test_launchers_are_known_by_their_answer(expected: tuple[str, str], answer: str) -> None:
    found = identify(Path("mpirun"), answer)
    assert (found.kind, found.version) == expected
    assert found.major == int(expected[1].split(".")[0])


def test_another_launcher_is_refused() -> None:
    with pytest.raises(ConfigError, match="x --version says 'LAM 7', which is neither Open MPI, MPICH nor Intel MPI"):
        identify(Path("x"), "LAM 7\nmore")
    with pytest.raises(ConfigError, match="says 'nothing'"):
        identify(Path("x"), "")


def test_open_mpi() -> None:
    assert line(OPEN, ALONE) == "-np 4 --map-by ppr:4:node --bind-to none"
    wanted = "-np 8 --map-by ppr:4:node --bind-to none --host a:4,b:4 -x NCCL_DEBUG -x X"
    assert line(OPEN, HOSTS) == line(OLD, HOSTS) == wanted
    crowded = replace(ALONE, oversubscribe=True, options=["--mca", "btl", "tcp"])
    assert line(OPEN, crowded) == "-np 4 --map-by ppr:4:node:OVERSUBSCRIBE --bind-to none --mca btl tcp"
    assert line(OLD, crowded) == "-np 4 --map-by ppr:4:node --bind-to none --oversubscribe --mca btl tcp"


def test_hydra() -> None:
    assert line(MPICH, ALONE) == "-np 4 -ppn 4 -bind-to none -genvall"
    assert line(MPICH, HOSTS) == "-np 8 -ppn 4 -hosts a:4,b:4 -bind-to none -genvall"
    assert line(INTEL, ALONE) == "-np 4 -ppn 4 -genvall -genv I_MPI_PIN off"
    assert line(INTEL, HOSTS) == "-np 8 -ppn 4 -hosts a,b -genvall -genv I_MPI_PIN off"


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_the_launcher_beside_this_python_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside, path = tmp_path / "beside", tmp_path / "path"
    for folder in (beside, path):
        folder.mkdir()
    monkeypatch.setattr("sys.executable", str(beside / "python"))
    monkeypatch.setenv("PATH", f"{path}:/usr/bin:/bin")
    program(path / "mpirun", "echo 'mpirun (Open MPI) 4.0.1'")
    assert find_mpirun() == Mpirun(path / "mpirun", "Open MPI", "4.0.1")
    part = program(beside / "part", "echo 'mpirun (Open MPI) 5.1.0'")
    program(beside / "mpirun", part.name)  # found in its own folder, as Intel's parts must be
    assert find_mpirun() == Mpirun(beside / "mpirun", "Open MPI", "5.1.0")
    assert find_mpirun("mpirun").version == "4.0.1"
    with pytest.raises(ConfigError, match="--mpirun absent: there is no such program"):
        find_mpirun("absent")


def test_without_a_launcher_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingExtraError, match=r"mpirun is not installed .* install .*\[mpi\]'"):
        find_mpirun()


def test_other_hosts_get_what_training_reads() -> None:
    environment = dict.fromkeys(("NCCL_DEBUG", "HOME", "PYTHONPATH", "OMP_NUM_THREADS", "SECRET", "XNCCL_A"), "1")
    assert exported_names(environment) == ["NCCL_DEBUG", "OMP_NUM_THREADS", "PYTHONPATH"]
    assert "SECRET" in exported_names(environment, ["SECRET"])
    with pytest.raises(ConfigError, match="--export MISSING: this variable is not set"):
        exported_names(environment, ["MISSING"])
