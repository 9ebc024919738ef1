from __future__ import annotations

import pytest

from caffepy.errors import ConfigError, RunError, UserError
from caffepy.parallel.mpi import CallService, check_launcher
from caffepy.parallel.world import Launcher, World, create_world, find_launcher


class FakeWorld(World):
    """One rank among several whose exchanged values are given."""

    def __init__(self, rank: int, others: list[object]) -> None:
        super().__init__()
        self.rank, self.size = rank, len(others)
        self.hosts = [f"host{i}" for i in range(self.size)]
        self._others = others

    def all_gather(self, value):  # type: ignore[no-untyped-def]
        gathered = list(self._others)
        gathered[self.rank] = value
        return gathered


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, (1, 4)),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, (0, 2)),
        ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8"}, (3, 8)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),  # a batch script: nothing was launched
        ({"PMIX_RANK": "2"}, (2, None)),
    ],
)
def test_launchers_are_known_by_their_variables(
    environment: dict[str, str], expected: tuple[int, int | None] | None
) -> None:
    found = find_launcher(environment)
    assert (found and (found.rank, found.size)) == expected


STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4"}


@pytest.mark.parametrize(
    ("environment", "name", "again"),
    [
        ({**STEP, "SLURM_MPI_TYPE": "pmix"}, "srun", "srun -n 2 --mpi=pmix"),
        (STEP, "srun", "srun -n 2"),
        ({**STEP, **HYDRA, "PMI_JOBID": "7.1", "SLURM_MPI_TYPE": "pmi2"}, "srun", "srun -n 4 --mpi=pmi2"),
        ({**STEP, **HYDRA}, "mpiexec", "mpirun -np 4"),  # Hydra, whose helpers srun started
        ({**HYDRA, "SLURM_MPI_TYPE": "pmi2"}, "mpiexec", "mpirun -np 4"),
    ],
)
def test_srun_is_told_from_hydra(environment: dict[str, str], name: str, again: str) -> None:
    found = find_launcher(environment)
    assert found is not None
    assert (found.name, found.again) == (name, again)


def test_without_a_launcher_no_mpi_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caffepy.parallel.world.find_launcher", lambda: None)
    world = create_world()
    assert (type(world), world.size, world.communicator()) == (World, 1, None)


def test_a_launcher_of_another_mpi_is_refused_once() -> None:
    launcher = Launcher("mpiexec", 0, 4)
    with pytest.raises(UserError, match="mpiexec started 4 processes, but Open MPI v5.0, .* sees 1: .* different MPIs"):
        check_launcher(launcher, 1, "Open MPI v5.0, package: x")
    with pytest.raises(UserError, match="but MPICH Version: 5.0.2, the MPI"):
        check_launcher(launcher, 1, "MPICH Version:      5.0.2\nMPICH Release date: today")
    with pytest.raises(SystemExit) as leaving:
        check_launcher(Launcher("mpiexec", 3, 4), 1, "Open MPI v5.0")
    assert leaving.value.code == 2
    check_launcher(launcher, 4, "")
    check_launcher(Launcher("a PMIx launcher", 0, None), 4, "")


@pytest.mark.parametrize(("options", "way"), [(" --mpi=pmi2", "--mpi=pmi2"), ("", "--mpi=none")])
def test_sruns_wrong_way_is_named(options: str, way: str) -> None:
    wanted = (
        f"srun started 4 processes, .* sees 1: srun's {way} is none that this library knows. Start with caffepy launch"
    )
    with pytest.raises(UserError, match=wanted):
        check_launcher(Launcher("srun", 0, 4, options), 1, "Open MPI v5.0.11, package: x")


def test_an_error_of_all_ranks_is_raised_by_the_root_as_it_is() -> None:
    error = ConfigError("no such file")
    with pytest.raises(ConfigError) as raised:
        FakeWorld(0, [None, ("no such file", 2)]).agree(error)
    assert raised.value is error
    with pytest.raises(SystemExit) as leaving:
        FakeWorld(1, [("no such file", 2), None]).agree(error)
    assert leaving.value.code == 2


def test_an_error_of_one_rank_names_it() -> None:
    with pytest.raises(UserError, match="^rank 1 on host1: disk is gone$"):
        FakeWorld(0, [None, ("disk is gone", 2)]).agree(None)
    with pytest.raises(RunError, match="^rank 0 on host0: ValueError: odd$"):
        FakeWorld(0, [None, None]).agree(ValueError("odd"))


def test_no_error_is_agreed_on_silently() -> None:
    FakeWorld(0, [None, None]).agree(None)
    assert World().call_on_all(lambda: 5) == 5


def test_calls_of_threads_run_on_the_main_thread_where_mpi_wants_it() -> None:
    import threading

    service = CallService(direct=False)
    ran_on: list[int] = []
    thread = threading.Thread(target=lambda: service.call(lambda: ran_on.append(threading.get_ident())), daemon=True)
    thread.start()
    while thread.is_alive():
        service.serve()
    assert ran_on == [threading.get_ident()]
