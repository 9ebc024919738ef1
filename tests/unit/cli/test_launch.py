from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from subprocess_training import find_mpirun, program_environment

from caffepy.cli.launch import LaunchCommand, make_start
from caffepy.cli.main import main, parse
from caffepy.distributed.launch.run import LaunchPlan

PYTHON = sys.executable
OPEN_MPI = "#!/bin/sh\necho 'mpirun (Open MPI) 5.0.1'\n"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith(("SLURM_", "PBS_NODEFILE", "LSB_JOBID", "PE_HOSTFILE")):
            monkeypatch.delenv(name)
    launcher = tmp_path / "fake"
    launcher.write_text(OPEN_MPI)
    launcher.chmod(0o755)
    Path("hosts").write_text("a slots=4\nb slots=4\n")
    Path("uneven").write_text("a slots=4\nb slots=2\n")


def launch(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The line that would be run, without the launcher and the program."""
    status = main(["launch", "--mpirun=./fake", "--dry-run", *arguments])
    out, err = capsys.readouterr()
    assert status == 0, err
    return out.split(" ", 1)[1].split(" -m caffepy")[0].removesuffix(sys.executable).strip()


def mistake(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["launch", *arguments]) == 2
    return capsys.readouterr().err.strip()


def test_one_host(capsys: pytest.CaptureFixture[str]) -> None:
    found = launch(capsys, "--nproc-per-node=4", "--", "train", "--solver", "s.prototxt")
    assert found == "-np 4 --map-by ppr:4:node --bind-to none"
    assert launch(capsys, "train") == "-np 1 --map-by ppr:1:node --bind-to none"


def test_the_program_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    def program(*words: str) -> list[str]:
        assert main(["launch", "--mpirun=./fake", "--dry-run", *words]) == 0
        return shlex.split(capsys.readouterr().out.split("none ")[1])

    Path("script.py").write_text("")
    assert program("--", "train", "--solver=a b") == [sys.executable, "-m", "caffepy", "train", "--solver=a b"]
    assert program("--", "script.py", "-n_x", "--", "2") == [sys.executable, "script.py", "-n_x", "--", "2"]
    assert program("script.py", "-n_x=1") == [sys.executable, "script.py", "-n_x=1"]
    assert program("--", "sh", "-c", "true") == ["sh", "-c", "true"]


@pytest.mark.parametrize("dash", ["-", "_"])
def test_a_script_of_torch_distributed_is_started_as_there(
    dash: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("train.py").write_text('parser.add_argument("--local_rank", type=int)')
    words = [f"--nproc{dash}per{dash}node=2", "train.py", "--lr", "0.1"]
    assert main(["launch", "--dry-run", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert ["mpirun" in line for line in lines] == [False, False]
    assert [line.split(" MASTER_PORT=")[0] for line in lines] == [
        f"RANK={rank} LOCAL_RANK={rank} WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1" for rank in range(2)
    ]
    assert all(line.endswith(f"train.py --local_rank={rank} --lr 0.1") for rank, line in enumerate(lines))
    nodes = [f"--nnodes{dash}".rstrip(dash) + "=2", f"--node{dash}rank=1", f"--master{dash}addr=a"]
    assert main(["launch", "--dry-run", *nodes, f"--master{dash}port=1234", *words]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert "RANK=2 LOCAL_RANK=0 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1234" in first
    assert second.endswith("train.py --local_rank=1 --lr 0.1")
    assert "-np 2" in launch(capsys, *words)  # --mpirun is for MPI


def test_hosts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("MINE", "1")
    found = launch(capsys, "--hostfile=hosts", "--export=MINE", "train")
    assert "-np 8 --map-by ppr:4:node --bind-to none --host a:4,b:4 -x " in found
    assert {"MINE", "NCCL_DEBUG"} <= set(found.split())
    assert "-np 2 " in launch(capsys, "--hostfile=hosts", "--nproc-per-node=2", "--nodes=1", "train")
    assert "--host a:2,b:2" in launch(capsys, "--hosts=a,b", "--nproc-per-node=2", "train")
    assert "--host a:4,b:4" in launch(capsys, "--hostfile=uneven", "--nproc-per-node=4", "--oversubscribe", "train")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dry-run"], "launch needs a command: caffepy launch --nproc-per-node 4 -- train"),
        (["--", "trian"], "'trian' is neither a caffepy command nor a program; did you mean 'train'?"),
        (["absent.py"], "there is no script absent.py"),
        (["--nodes=2", "train"], "--nodes 2: name the hosts with --hosts or --hostfile"),
        (["--nodes=3", "--hosts=a,b", "train"], "--nodes 3: only 2 hosts are named; name more, or lower --nodes"),
        (
            ["--hostfile=uneven", "train"],
            "hosts have different numbers of slots (a 4, b 2): give the processes per host with --nproc-per-node",
        ),
        (["--hostfile=uneven", "--nproc-per-node=4", "train"], "host b has 2 slots for 4 processes: lower --nproc-per"),
        (["--hostfile=absent", "train"], "--hostfile absent: cannot be read: No such file or directory"),
        (["--hosts=a", "--hostfile=hosts", "train"], "not allowed with argument"),
        (["--mpirun=absent", "train"], "--mpirun absent: there is no such program"),
        (["--mpirun=/bin/true", "train"], "/bin/true --version says"),
        (["--nproc-per-node=0", "train"], "'0' is not a whole number of at least 1"),
        (["--restarts=-1", "train"], "'-1' is no whole number of 0 or more"),
        (["--nnodes=2", "--hosts=a,b", "train"], "--hosts is for MPI; without MPI run caffepy launch on each machine"),
        (["--nnodes=2", "train"], "--nnodes 2: where is rank 0? Say it with --master-addr"),
        (["--node-rank=1", "train"], "--node-rank 1: with --nnodes 1 it is 0 to 0"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert message in mistake(capsys, *arguments)


def test_processes_that_were_launched_launch_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    assert "mpiexec has started this process" in mistake(capsys, "train")


@pytest.fixture
def allocation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with an srun and Open MPI's mpirun, within an allocation of three hosts."""
    folder = tmp_path / "bin"
    folder.mkdir()
    srun = "#!/bin/sh\nif [ -e broken ]; then echo \"srun: error: Invalid MPI type 'pmix'\" >&2; fi\n"
    for name, text in (("srun", srun), ("mpirun", OPEN_MPI)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setattr("sys.executable", str(folder / "python"))
    monkeypatch.setenv("PATH", str(folder))
    slurm(monkeypatch, JOB_ID="7", JOB_NUM_NODES="3", NTASKS_PER_NODE="4", JOB_CPUS_PER_NODE="8(x3)")
    return folder


def slurm(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", value)


def dry_run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    """The line, and what is said beside it."""
    assert main(["launch", "--dry-run", *arguments, "--", "train", "--solver", "s"]) == 0
    out, err = capsys.readouterr()
    return out, err


def test_within_an_allocation_slurm_starts_the_processes(capsys: pytest.CaptureFixture[str], allocation: Path) -> None:
    line, said = dry_run(capsys)
    words = shlex.split(line)
    assert words[:4] == [str(allocation / "srun"), "--nodes=3", "--ntasks=12", "--ntasks-per-node=4"]
    assert "--mpi=pmix" in words and words[-4:] == ["caffepy", "train", "--solver", "s"]
    assert said == ""
    assert "--nodes=2 --ntasks=16 --ntasks-per-node=8" in dry_run(capsys, "--nodes=2", "--nproc-per-node=8")[0]
    own = dry_run(capsys, "--mpirun-options=--mpi=cray_shasta")[0]
    assert "--mpi=cray_shasta" in own and "pmix" not in own
    assert "the allocation has 8 CPUs a host for 9 processes" in mistake(capsys, "--nproc-per-node=9", "train")
    assert "4 hosts: the allocation has 3" in mistake(capsys, "--nodes=4", "train")


def test_where_srun_cannot_start_this_mpi_its_own_launcher_does(
    capsys: pytest.CaptureFixture[str], allocation: Path
) -> None:
    Path("broken").write_text("")
    line, said = dry_run(capsys)
    assert line.startswith(f"{allocation / 'mpirun'} -np 12 --map-by ppr:4:node --bind-to none")
    assert "srun cannot start Open MPI 5.0.1 with --mpi=pmix here (Invalid MPI type 'pmix'): its own mpirun" in said
    assert "ppr:8:node:OVERSUBSCRIBE" in dry_run(capsys, "--nproc-per-node=8")[0]  # more than tasks, not than CPUs
    (allocation / "mpirun").unlink()
    assert "--mpi" not in dry_run(capsys)[0].split("caffepy")[0]  # a site whose only way is srun's default


def test_another_launcher_gets_all_hosts_of_the_allocation(
    capsys: pytest.CaptureFixture[str], allocation: Path
) -> None:
    assert dry_run(capsys, "--mpirun=mpirun")[0].startswith(f"{allocation / 'mpirun'} -np 12 ")


def test_within_a_step_another_step_shares_its_cpus(
    capsys: pytest.CaptureFixture[str], allocation: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm(monkeypatch, STEP_ID="0", PROCID="0", STEP_NUM_TASKS="1")
    assert dry_run(capsys)[0].startswith(f"SLURM_OVERLAP=1 {allocation / 'srun'} ")
    slurm(monkeypatch, STEP_NUM_TASKS="4")
    assert "srun has started this process; caffepy launch starts all of them" in mistake(capsys, "train")
    slurm(monkeypatch, PTY_PORT="4711")  # srun -n 4 --pty bash
    assert dry_run(capsys)[0].startswith("SLURM_OVERLAP=1 ")


def test_in_a_container_without_srun_slurm_is_left_out(
    capsys: pytest.CaptureFixture[str], allocation: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (allocation / "srun").unlink()
    monkeypatch.setenv("PATH", str(allocation))
    line, said = dry_run(capsys, "--nproc-per-node=2")
    assert line.startswith(f"{allocation / 'mpirun'} -np 2 --map-by ppr:2:node --bind-to none")
    assert "srun is not installed; Slurm's allocation is ignored" in said
    (allocation / "mpirun").write_text(f"{OPEN_MPI}/usr/bin/env > seen\n")
    variables = program_environment({"PATH": str(allocation), "SLURM_JOB_ID": "7"})
    command = [PYTHON, "-m", "caffepy", "launch", "--mpirun=mpirun", "train"]
    subprocess.run(command, check=True, capture_output=True, timeout=300, env=variables)
    seen = Path("seen").read_text()  # else mpirun would look for srun
    assert "PATH=" in seen and "SLURM_" not in seen


def test_without_mpi_each_process_is_told_its_rank(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["--dry-run", "--nproc-per-node=2", "--nnodes=2", "--node-rank=1", "--master-addr=a", "--", "sh", "-c", "x"]
    assert main(["launch", *line]) == 0
    shared = "WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=29500 sh -c x"
    assert capsys.readouterr().out.splitlines() == [
        f"RANK=2 LOCAL_RANK=0 {shared}",
        f"RANK=3 LOCAL_RANK=1 {shared}",
    ]


def test_where_no_mpirun_is_installed_the_processes_are_started_without(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "/bin:/usr/bin")
    if shutil.which("mpirun") or shutil.which("mpiexec"):
        pytest.skip("this machine has an mpirun of its own")
    (tmp_path / "program").write_text("#!/bin/sh\necho $RANK of $WORLD_SIZE, ${#CAFFEPY_JOB_SECRET}\nexit 4\n")
    (tmp_path / "program").chmod(0o755)
    monkeypatch.delenv("CAFFEPY_JOB_SECRET", raising=False)
    assert main(["launch", "--nproc-per-node=2", "--", "./program"]) == 4
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["0 of 2, 64", "1 of 2, 64"]
    assert "no mpirun is installed: the processes are started without MPI" in err
    assert "CAFFEPY_JOB_SECRET" not in err
    assert "mpirun is not installed" in mistake(capfd, "--hosts=a,b", "--", "./program")


def test_ranks_without_mpi_do_not_see_the_step_that_started_their_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    start = start_of("--nproc-per-node=2", "--nnodes=1", "--", "sh")
    assert start.variable == "RANK"
    assert not [name for name in start.environment if name.startswith("SLURM_")] and "PATH" in start.environment


def start_of(*arguments: str) -> LaunchPlan:
    """How a job would be started."""
    command = parse(["launch", *arguments])
    assert isinstance(command, LaunchCommand)
    return make_start(command)


def test_what_is_known_of_training() -> None:
    Path("s.prototxt").write_text("iter_size: 3 snapshot_prefix: 's'")
    fake = ("--mpirun=./fake", "--hosts=a,b", "--min-nodes=1", "--")
    plain = start_of(*fake, "train", "-solver=s.prototxt")
    assert (plain.shares_signals, plain.interrupt_stops, plain.terminate_stops, plain.passes) == (True, True, True, 3)
    assert plain.variable == "OMPI_COMM_WORLD_RANK"
    assert start_of(*fake, "train", "-solver=s.prototxt", "--set", "iter_size=5", "--set=base_lr=1").passes == 5
    Path("s.prototxt").write_text("iter_size: 3 snapshot_prefix: 's' force_iter: 7")
    options = ("--solver", "s.prototxt", "--ignore-fields", "SolverParameter.force_iter")
    assert start_of(*fake, "train", *options).passes == 3
    other = start_of(*fake, "train", "-solver", "absent", "--sigint_effect", "snapshot", "--sigterm-effect=none")
    assert (other.interrupt_stops, other.terminate_stops, other.passes) == (False, False, 1)
    assert start_of(*fake, "train", "--absent").shares_signals  # the ranks will say what is wrong
    program = start_of(*fake, "sh")
    assert (program.shares_signals, program.passes) == (False, 0)


def test_fewer_nodes_of_an_allocation_are_known_by_name(allocation: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol = allocation / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames n[1-3]" ] && printf "n1\\nn2\\nn3\\n"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-3]")
    start = start_of("--min-nodes=1", "--", "train")
    assert start.variable == "SLURM_PROCID" and start.job.hosts == ["n1", "n2", "n3"]
    (line, _), *_ = start.commands(start.job)
    assert "--nodelist=n1,n2,n3" in line
    assert start_of("--", "train").job.hosts == []


@pytest.mark.mpi
def test_the_installed_mpi_runs_it(tmp_path: Path) -> None:
    find_mpirun()
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom caffepy.distributed.processes.world import create_world\n"
        "world = create_world()\n"
        "everybody = world.all_gather((world.local_rank, sys.argv[1:]))\n"
        "if world.rank == 0: print(everybody)\n"
        "world.close()\n"
        "sys.exit(3)\n"
    )
    command = [sys.executable, "-m", "caffepy", "launch", "--nproc-per-node=2", "--oversubscribe", "script.py", "-a_b"]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=program_environment({}), cwd=tmp_path
    )
    assert "[(0, ['-a_b']), (1, ['-a_b'])]" in result.stdout, result.stderr
    assert result.returncode == 3
    assert "mpirun" in result.stderr.splitlines()[0]
