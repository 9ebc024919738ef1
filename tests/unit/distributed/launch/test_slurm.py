from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from caffepy.distributed.launch.launchers import Allocation, Job, find_allocation, refusal, srun_line, without_slurm
from caffepy.errors import ConfigError

JOB = Job(["caffepy", "train"], 4, 2)
NOT_LOADED = """\
srun: error:  mpi/pmix_v4: init: (null) [0]: mpi_pmix.c:195: pmi/pmix: can not load PMIx library
srun: error: Couldn't load specified plugin name for mpi/pmix: Plugin init() callback failed
srun: error: Invalid MPI type 'pmix', --mpi=list for acceptable types
"""


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A PATH with an srun."""
    program(tmp_path / "srun", "exit 0")
    return str(tmp_path)


def allocation(folder: str, **variables: str) -> Allocation:
    """What is read from these of Slurm's variables."""
    environment = {f"SLURM_{name}": value for name, value in {"JOB_ID": "7", **variables}.items()}
    found = find_allocation({"PATH": folder, **environment})
    assert found is not None
    return found


def test_what_an_allocation_holds(folder: str) -> None:
    found = allocation(folder, JOB_NUM_NODES="2", NTASKS="4", TASKS_PER_NODE="2(x2)", JOB_CPUS_PER_NODE="8,4")
    assert found == Allocation(2, (2, 2), (8, 4))
    assert found.tasks_per_node() == 2
    assert allocation(folder, NTASKS_PER_NODE="3", NTASKS="6", TASKS_PER_NODE="3(x2)").tasks_per_node() == 3
    full = allocation(folder, CPUS_PER_TASK="16", OVERCOMMIT="1", STEP_ID="0")
    assert (full.nodes, full.cores_per_task, full.overcommit, full.within_step) == (1, 16, True, True)


def test_a_whole_hosts_cpus_are_no_tasks(folder: str) -> None:
    assert allocation(folder, JOB_NUM_NODES="1", TASKS_PER_NODE="64").tasks_per_node() == 1


def test_without_srun_there_is_no_allocation(tmp_path: Path, folder: str) -> None:
    assert find_allocation({"SLURM_JOB_ID": "7", "PATH": str(tmp_path / "container")}) is None
    assert find_allocation({"PATH": folder}) is None
    assert without_slurm({"SLURM_JOB_ID": "7", "SLURM_CONF": "x", "PATH": "p"}) == {"PATH": "p"}


def test_uneven_tasks_are_left_to_the_user(folder: str) -> None:
    with pytest.raises(ConfigError, match=r"3 tasks lie unevenly on its hosts \(2,1\): say with --nproc-per-node"):
        allocation(folder, NTASKS="3", TASKS_PER_NODE="2,1").tasks_per_node()


def test_what_srun_would_refuse_is_refused() -> None:
    small = Allocation(2, cores=(2, 1))
    with pytest.raises(ConfigError, match="^2 hosts: the allocation has 1; take fewer, or allocate more"):
        Allocation(1).check(JOB)
    with pytest.raises(ConfigError, match="has 2 CPUs a host for 4 processes: lower --nproc-per-node, allocate more"):
        small.check(JOB)
    with pytest.raises(ConfigError, match="has 1 CPU a host for 4 processes"):
        replace(small, cores=(1, 1)).check(JOB)
    small.check(replace(JOB, oversubscribe=True))
    replace(small, overcommit=True).check(JOB)
    replace(small, cores=(4, 4)).check(JOB)
    replace(small, cores=()).check(JOB)


def test_an_mpis_own_launcher_may_fill_the_cpus() -> None:
    assert Allocation(2, tasks=(4, 4)).allow(JOB) == JOB
    assert Allocation(2, tasks=(4, 1)).allow(JOB).oversubscribe
    assert Allocation(2).allow(JOB).oversubscribe


@pytest.mark.parametrize(
    ("found", "cores"),
    [
        (Allocation(2, cores_per_task=16, cores=(64, 64)), 16),
        (Allocation(2, cores_per_task=16, cores=(16, 16)), 4),  # one task with 16 CPUs, four processes
        (Allocation(2, cores_per_task=2, cores=(2, 2)), 1),
        (Allocation(2, cores_per_task=16), 16),
        (Allocation(2, cores=(64, 64)), None),
    ],
)
def test_cpus_of_a_process(found: Allocation, cores: int | None) -> None:
    assert found.cores_of(JOB) == cores


def test_the_line() -> None:
    common = "srun --nodes=2 --ntasks=8 --ntasks-per-node=4 --cpu-bind=none --kill-on-bad-exit=1"
    assert shlex.join(srun_line("srun", JOB, None, Allocation(2))) == f"{common} caffepy train"
    job = replace(JOB, hosts=["a", "b"], oversubscribe=True, options=["-l"])
    line = shlex.join(srun_line("srun", job, "pmix", Allocation(2, cores_per_task=16)))
    assert line == f"{common} --cpus-per-task=16 --mpi=pmix --nodelist=a,b --overcommit -l caffepy train"


def test_a_way_that_slurm_names_but_cannot_load_is_found_out(tmp_path: Path) -> None:
    srun = str(program(tmp_path / "srun", f'test "$*" = "--mpi=pmix --test-only true" && echo "{NOT_LOADED}" >&2'))
    expected = "mpi/pmix_v4: init: (null) [0]: mpi_pmix.c:195: pmi/pmix: can not load PMIx library"
    assert refusal(srun, "pmix") == expected
    assert refusal(srun, "pmi2") is None


def test_another_complaint_of_sruns_is_no_refusal(tmp_path: Path) -> None:
    busy = program(tmp_path / "srun", "echo 'srun: error: Unable to contact slurm controller' >&2; exit 1")
    assert refusal(str(busy), "pmix") is None
