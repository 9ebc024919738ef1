"""The commands of the launchers, and the hosts that they are given."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from caffepy.distributed.launch.launchers import (
    Allocation,
    Host,
    Job,
    Mpirun,
    Rendezvous,
    exported_names,
    find_allocation,
    find_mpirun,
    identify,
    local_commands,
    local_rank_name,
    mpirun_line,
    parse_hosts,
    read_hostfile,
    refusal,
    secret_for,
    srun_line,
    without_slurm,
)
from caffepy.errors import ConfigError
from caffepy.utils.installation import MissingExtraError


def test_each_process_learns_what_torchrun_tells() -> None:
    rendezvous = Rendezvous(3, 1, "host0", 4711).complete()
    found = local_commands(Job(["caffepy", "train"], 2), rendezvous)
    assert [line for line, _ in found] == [["caffepy", "train"]] * 2
    shared = {"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "host0", "MASTER_PORT": "4711"}
    assert found[0][1] == {"RANK": "2", "LOCAL_RANK": "0", **shared}
    assert found[1][1] == {"RANK": "3", "LOCAL_RANK": "1", **shared}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('p.add_argument("--local_rank", type=int)', "--local_rank"),
        ("p.add_argument('--local-rank', default=os.environ['LOCAL_RANK'])", "--local-rank"),
        ('os.environ["LOCAL_RANK"]', "LOCAL_RANK"),
        ("# started with --local_rank; OMPI_COMM_WORLD_LOCAL_RANK", None),
    ],
)
def test_a_script_asks_for_its_local_rank(tmp_path: Path, text: str, name: str | None) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    assert local_rank_name(["python", str(script), "other.py"]) == name
    assert local_rank_name(["python", "-m", "caffepy", str(script)]) is None
    assert local_rank_name([str(script)]) is None


def test_the_local_rank_comes_right_behind_the_script() -> None:
    found = local_commands(Job(["python", "a.py", "-x"], 2), Rendezvous().complete(), "--local_rank")
    assert [line for line, _ in found] == [["python", "a.py", f"--local_rank={local}", "-x"] for local in (0, 1)]


def test_one_machine_needs_no_address() -> None:
    rendezvous = Rendezvous().complete()
    assert rendezvous.address == "127.0.0.1" and rendezvous.port is not None and 1024 < rendezvous.port < 65536
    assert Rendezvous(2, 0, "a").complete().port == 29500


def test_one_machine_makes_its_own_secret() -> None:
    assert len(secret_for(Rendezvous(), {})["CAFFEPY_JOB_SECRET"]) == 64
    assert secret_for(Rendezvous(), {"CAFFEPY_JOB_SECRET": "given"}) == {}
    assert secret_for(Rendezvous(2, 0, "a"), {}) == {}


@pytest.mark.parametrize(
    ("rendezvous", "message"),
    [
        (Rendezvous(2, 2, "a"), "--node-rank 2: with --nnodes 2 it is 0 to 1"),
        (Rendezvous(2, 1), "--nnodes 2: where is rank 0"),
        (Rendezvous(1, 0, None, 65536), "--master-port 65536 is no port"),
    ],
)
def test_mistakes(rendezvous: Rendezvous, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rendezvous.complete()


# -- hostfile --------------------------------------------------------------------------------------------


def read(tmp_path: Path, text: str) -> list[Host]:
    path = tmp_path / "hosts"
    path.write_text(text)
    return read_hostfile(path)


def test_every_mpis_way_of_writing_is_read(tmp_path: Path) -> None:
    text = """
    # the first rack
    node-1 slots=4
    node-2.site:8          # MPICH
    10.0.0.3 slots = 2 max_slots=4
    user@node4
    """
    assert read(tmp_path, text) == [
        Host("node-1", 4),
        Host("node-2.site", 8),
        Host("10.0.0.3", 2),
        Host("user@node4", None),
    ]


def test_a_host_named_again_has_the_slots_of_all_its_lines(tmp_path: Path) -> None:
    assert read(tmp_path, "a\na\nb slots=3\na\nb\n") == [Host("a", 3), Host("b", 4)]


def test_no_slots_no_hosts_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hosts:1: host 'a' has 0 slots; leave it out"):
        read(tmp_path, "a slots=0\n")
    with pytest.raises(ConfigError, match="names no host"):
        read(tmp_path, "\n# nothing\n")
    with pytest.raises(ConfigError, match="absent: cannot be read: No such file"):
        read_hostfile(tmp_path / "absent")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="binary: cannot be read: it is not text"):
        read_hostfile(tmp_path / "binary")


def test_lists_of_hosts() -> None:
    assert parse_hosts(["a", "b:4"]) == [Host("a"), Host("b", 4)]
    with pytest.raises(ConfigError, match="--hosts: 'a b' is no host"):
        parse_hosts(["a b"])


# -- mpirun ----------------------------------------------------------------------------------------------


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


# -- slurm -----------------------------------------------------------------------------------------------


JOB = Job(["caffepy", "train"], 4, 2)
NOT_LOADED = """\
srun: error:  mpi/pmix_v4: init: (null) [0]: mpi_pmix.c:195: pmi/pmix: can not load PMIx library
srun: error: Couldn't load specified plugin name for mpi/pmix: Plugin init() callback failed
srun: error: Invalid MPI type 'pmix', --mpi=list for acceptable types
"""


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


def test_a_host_of_the_command_line_that_is_an_option() -> None:
    with pytest.raises(ConfigError, match="--hosts: '-mca' begins with a dash"):
        parse_hosts(["-mca"])
